# Sourced by the batch scripts: the site's values, and a run that goes back into the queue when it was asked to stop.
# shellcheck shell=bash

set -u
set -a
# shellcheck source=site.env disable=SC1091
. "${CLUSTERFT_SITE:-slurm/site.env}"
set +a

# clusterft_run COMMAND...: runs it, hands SLURM's warning (SIGUSR1, or SIGTERM where a site sends that to the batch script) on to it, and
# requeues this task when it left with 75: everything that it had finished is on disk and its next turn goes on from there.
clusterft_run() {
  local child="" code=1 warned=""
  trap 'warned=1; [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null' TERM USR1
  if [ -n "$CLUSTERFT_SETUP" ]; then eval "$CLUSTERFT_SETUP" || exit 1; fi
  if [ -n "${CLUSTERFT_COMMIT:-}" ] && [ "$CLUSTERFT_COMMIT" != "$(git rev-parse HEAD 2>/dev/null)" ]; then
    echo "warning: submitted at commit $CLUSTERFT_COMMIT, the checkout has moved on; the record names the commit that ran" >&2
  fi
  "$@" &
  child=$!
  [ -z "$warned" ] || kill -USR1 "$child"
  while :; do  # a trap interrupts wait, the child lives on
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  # 138 and 143: the warning came before the program could answer it.
  if [ "$code" = 75 ] || { [ -n "$warned" ] && { [ "$code" = 138 ] || [ "$code" = 143 ]; }; }; then
    clusterft_requeue
    exit 75
  fi
  exit "$code"
}

clusterft_requeue() {
  local task="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$CLUSTERFT_MAX_RESTARTS" ]; then
    echo "error: $task was requeued $SLURM_RESTART_COUNT times (CLUSTERFT_MAX_RESTARTS); submit the rest with slurm/submit.sh" >&2
  elif scontrol requeue "$task"; then
    echo "stopped with its work on disk; $task is in the queue again"
  else
    echo "error: $task could not be requeued; submit the rest with slurm/submit.sh" >&2
  fi
}
