#!/usr/bin/env bash
# slurm/status.sh table2 [overrides]: cells done, running, queued, failed, missing, and the --array string of the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
set -a
# shellcheck source=site.env disable=SC1091
. "${CLUSTERFT_SITE:-slurm/site.env}"
set +a
[ $# -gt 0 ] || { echo "usage: slurm/status.sh EXPERIMENT [overrides of run.py]" >&2; exit 2; }
experiment="$1"
shift
exec "$CLUSTERFT_PYTHON" run.py "+experiment=$experiment" "$@" status=true
