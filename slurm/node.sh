#!/usr/bin/env bash
# One node of a job: torchrun with RANKS_PER_NODE workers, started by srun from train.sbatch, which sets what is read
# here. Exits as torchrun does, or with 75 when a signal has stopped the run and the same command continues it.

set -euo pipefail
trap '' USR1 # until there is somebody to tell

# Compilers' caches on this node's own disk: on a network file system ranks and jobs spoil each other's.
scratch=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/dlr_pretrain.$SLURM_JOB_ID.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton

threads=$((SLURM_CPUS_ON_NODE / RANKS_PER_NODE))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))

meeting=(--standalone) # one node: a port that the system picks
if ((SLURM_NNODES > 1)); then
    meeting=(--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS")
    meeting+=(--rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --local-addr "$SLURMD_NODENAME")
    meeting+=(--rdzv-conf "is_host=$((SLURM_NODEID == 0))") # not left to a comparison of host names
fi

# torchrun dies of USR1, and its workers would go on alone. It inherits from here that USR1 is ignored, and so do the
# workers until they listen for it; this shell tells them itself. (SLURM alone does not reach them: with
# proctrack/cgroup a signal goes to the processes that srun started, and to no child of theirs.)
"$PYTHON" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$RANKS_PER_NODE" --log-dir "$scratch/log" \
    train.py "$@" &
agent=$!
asked=
trap 'asked=yes; pkill -USR1 -P "$agent" || true' USR1 TERM

while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done
outcome=0
wait "$agent" || outcome=$?

# torchrun exits with 1 for any failure. Each worker leaves its error in the log directory: `Stopped` is the one of a
# run that the same command continues. (Without a signal it is train.stop_after, and no reason to go on by itself.)
if [[ $asked ]] && ((outcome != 0)) && grep -qrs --include=error.json '"Stopped: ' "$scratch/log"; then
    exit 75
fi
exit "$outcome"
