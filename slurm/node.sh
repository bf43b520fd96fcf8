#!/usr/bin/env bash
# One node of a job: torchrun with RANKS_PER_NODE workers, started by srun from train.sbatch, which sets what is read
# here. Exits as train.py does: with 75 when a signal has stopped the run and the same command continues it.

set -euo pipefail
trap '' USR1 # until there is somebody to tell

# Compilers' caches on this node's own disk: on a network file system ranks and jobs spoil each other's.
scratch=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/dlr_pretrain.$SLURM_JOB_ID.XXXXXX")
trap 'trap "" USR1 TERM; rm -rf "$scratch"' EXIT # a signal to all that killed rm would be this shell's exit code
export TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton

threads=$((SLURM_CPUS_ON_NODE / RANKS_PER_NODE))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))

meeting=(--standalone) # one node: a port that the system picks
if ((SLURM_NNODES > 1)); then
    meeting=(--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS")
    meeting+=(--rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --local-addr "$SLURMD_NODENAME")
    meeting+=(--rdzv-conf "is_host=$((SLURM_NODEID == 0))") # not left to a comparison of host names
fi

# launch.py passes signals on to the workers. This shell tells it, since SLURM alone may not: with proctrack/cgroup a
# signal goes to the processes that srun started, and to no child of theirs.
"$PYTHON" scripts/launch.py "${meeting[@]}" --nproc-per-node "$RANKS_PER_NODE" --log-dir "$scratch/log" \
    train.py "$@" &
agent=$!
asked=
trap 'asked=yes; kill -USR1 "$agent" 2>/dev/null || true' USR1 TERM

while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done
outcome=0
wait "$agent" || outcome=$?

if [[ ! $asked ]] && ((outcome == 75)); then
    exit 0 # train.stop_after: no failure, and no reason to go on by itself
fi
exit "$outcome"
