#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --account=llm
#SBATCH --time=1-00:00:00
#SBATCH --exclude=node07,node11
#SBATCH --chdir=/shared/ann
#SBATCH --output=runs/first/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --constraint=mi355x

set -uo pipefail
export GLOO_SOCKET_IFNAME=ens1f0
export GPU_MAX_HW_QUEUES=2
export HIP_FORCE_DEV_KERNARG=1
export HSA_NO_SCRATCH_RECLAIM=1
export MIOPEN_CUSTOM_CACHE_DIR=/var/tmp/miopen-ann
export MIOPEN_USER_DB_PATH=/var/tmp/miopen-ann
export NCCL_DEBUG=WARN
export NCCL_IB_HCA==mlx5_0,mlx5_1
export NCCL_SOCKET_IFNAME=ens1f0
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export RCCL_WARP_SPEED_AUTO=0
export TORCH_FR_BUFFER_SIZE=2000
export TORCH_FR_DUMP_TEMP_FILE=runs/first/flight-recorder-rank-
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_HIGH_PRIORITY=1
export WORLD_SIZE=16
export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
export MESHWRIGHT_RESTARTS=$((${SLURM_RESTART_COUNT:-0}))

step=
is_asked=no
# shellcheck disable=SC2317,SC2329 # the trap calls it
ask() { # the time limit comes near
  is_asked=yes
  [[ -z $step ]] || kill -USR1 "$step" # srun passes it on to every process
}
trap ask USR1

mkdir -p runs/first/logs
# shellcheck disable=SC2016 # each task has its own values
srun --export=ALL --distribution=block --kill-on-bad-exit=0 --wait=120 --cpu-bind=none --output=runs/first/logs/rank-%5t.log --open-mode=append \
  bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR; exec "$@"' rank \
  python3 -m meshwright train runs/first/run.yaml --out runs/first &
step=$!
[[ $is_asked == no ]] || ask # while srun started

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends the wait, not the step
  code=0
  wait "$step" || code=$?
done
trap '' USR1

requeue() {
  # A job that was cancelled is no longer running, and stays so.
  if scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
    echo "$1: queued again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
}

if [[ ${SLURM_RESTART_COUNT:-0} -eq 0 ]]; then rm -f runs/first/failures; fi # of an earlier job
failures=$(cat runs/first/failures 2>/dev/null || echo 0)
if [[ $code -eq 0 ]]; then
  echo "done"
elif [[ $code -eq 143 || ($is_asked == yes && $code -gt 128) ]]; then
  requeue "asked to stop"
elif [[ $code -eq 2 || $code -eq 3 ]]; then
  echo "exit code $code: starting again would not help"
elif [[ $failures -lt 3 ]]; then
  echo $((failures + 1)) >runs/first/failures
  requeue "exit code $code, failure $((failures + 1)) of 3 that are allowed"
else
  echo "exit code $code, and no restart is left"
fi
exit "$code"
