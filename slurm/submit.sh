#!/usr/bin/env bash
# Submits the cells of a table that are neither complete nor in the queue, one array task each.
#     slurm/submit.sh table2                          see first what would be submitted: --dry-run
#     slurm/submit.sh table2 seed=0 --nodes 2         overrides of run.py; cells on two nodes each
# Options: --dry-run, --nodes N, --wait (until all tasks have ended). What a job asks for: slurm/site.env.
set -euo pipefail
cd "$(dirname "$0")/.."
set -a
# shellcheck source=site.env disable=SC1091
. "${CLUSTERFT_SITE:-slurm/site.env}"
set +a

fail() { echo "error: $*" >&2; exit 2; }

experiment="" dry="" nodes="" wait_option=() overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry=1 ;;
    --wait) wait_option=(--wait) ;;
    --nodes) nodes="${2:-}"; [[ "$nodes" =~ ^[1-9][0-9]*$ ]] || fail "--nodes needs a number of nodes"; shift ;;
    --*) fail "unknown option $1; known are --dry-run, --nodes N, --wait" ;;
    *=*) overrides+=("$1") ;;
    *) [ -z "$experiment" ] || fail "two experiments: $experiment and $1; submit one at a time"; experiment="$1" ;;
  esac
  shift
done
[ -n "$experiment" ] || fail "usage: slurm/submit.sh EXPERIMENT [--dry-run] [--nodes N] [--wait] [overrides of run.py]"
[ -f "conf/experiment/$experiment.yaml" ] || fail "$experiment is no experiment; see conf/experiment/"
[ "$experiment" != all ] || fail "all is many tables: submit each by its name, so that an index means one cell"

# A record names its commit: what runs must be what is committed, and new files of the code count too.
dirty=$({ git status --porcelain -uno -- . ':(exclude)results' ':(exclude)docs/findings.md'; git status --porcelain -- run.py src conf baselines eval experiments slurm; } | sort -u)
if [ -n "$dirty" ]; then
  [ -n "$dry" ] || fail "the tree has uncommitted changes, commit them first:"$'\n'"$dirty"
  echo "note: would be refused, the tree has uncommitted changes:"$'\n'"$dirty" >&2
fi
[ -n "$dry" ] || command -v sbatch >/dev/null || fail "sbatch is not here; run this on a login node, or see --dry-run"

arguments=("+experiment=$experiment" "${overrides[@]}")
standing=$("$CLUSTERFT_PYTHON" run.py "${arguments[@]}" status=true) || fail "run.py could not plan $experiment: $standing"
echo "$standing"
array=$(sed -n 's/^  the rest: --array=//p' <<<"$standing")
[ -n "$array" ] || exit 0

# What status=true compares: the same words in the same order (experiments/status.py, same_cells).
comment=$(printf '%s\n' "${arguments[@]}" | LC_ALL=C sort | paste -sd ' ')
script=slurm/array.sbatch where=()
[ -z "$nodes" ] || { script=slurm/multinode.sbatch; where=(--nodes="$nodes"); }
option() { [ -z "$2" ] || options+=("--$1=$2"); }
options=(--job-name="clusterft-$experiment" --comment="$comment" --requeue --signal="B:USR1@$CLUSTERFT_WARNING_SECONDS")
options+=(--array="$array${CLUSTERFT_TASKS_AT_ONCE:+%$CLUSTERFT_TASKS_AT_ONCE}" --chdir="$PWD" "${where[@]}" "${wait_option[@]}")
options+=(--output="$CLUSTERFT_LOGS/$experiment-%A_%a.log")
option partition "$CLUSTERFT_PARTITION"
option gres "$CLUSTERFT_GRES"
option constraint "$CLUSTERFT_CONSTRAINT"
option account "$CLUSTERFT_ACCOUNT"
option qos "$CLUSTERFT_QOS"
option time "$CLUSTERFT_MINUTES"
option cpus-per-task "$CLUSTERFT_CPUS_PER_TASK"
option mem "$CLUSTERFT_MEM"
# shellcheck disable=SC2206  # several options in one variable
options+=($CLUSTERFT_SBATCH_OPTIONS)

if [ -n "$dry" ]; then
  printf 'would submit:'
  printf ' %q' sbatch "${options[@]}" "$script" "${arguments[@]}"
  echo
  exit 0
fi
mkdir -p "$CLUSTERFT_LOGS"
CLUSTERFT_COMMIT=$(git rev-parse HEAD)
export CLUSTERFT_COMMIT
code=0
job=$(sbatch --parsable "${options[@]}" "$script" "${arguments[@]}") || code=$?
[ -n "$job" ] || exit "$code"
cat <<END
submitted as job ${job%%;*}
  what stands where:  slurm/status.sh $experiment ${overrides[*]@Q}
  the queue:          squeue --me --array --name=clusterft-$experiment
  a log:              tail -f $CLUSTERFT_LOGS/$experiment-${job%%;*}_INDEX.log
  the table so far:   $CLUSTERFT_PYTHON run.py ${arguments[*]@Q} plan=true
  stop all of it:     scancel ${job%%;*}
END
exit "$code"
