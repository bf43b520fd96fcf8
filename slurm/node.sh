#!/usr/bin/env bash
# Run one node of a job: torchrun with RANKS_PER_NODE workers. train.sbatch starts this script by srun, and sets the
# variables that it reads. It exits as train.py does: with 75 if a signal has stopped the run and the same command
# continues it.

set -euo pipefail
trap '' USR1 # until launch.py can receive it

scratch=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/dlr_pretrain.$SLURM_JOB_ID.XXXXXX")
trap 'trap "" USR1 TERM; rm -rf "$scratch"' EXIT # a signal that kills rm would set the exit code

# Compilers cache on this node's own disk, because on a network file system ranks and jobs damage each other's caches.
# The folder outlives the job, for its restarts and for later jobs. A folder that others can write to is not trusted.
cache=${TMPDIR:-/tmp}/dlr_pretrain_compiled.$UID
{ mkdir -p -m 700 "$cache" && [[ -O $cache && ! -L $cache && ! $(find "$cache" -maxdepth 0 -perm /022) ]]; } 2>/dev/null ||
    cache=$scratch
# A power failure leaves files of length 0, with which every start would end in a traceback. Locks are always empty.
booted=$(awk '$1 == "btime" { print $2 }' /proc/stat)
empty=$(find "$cache" -type f -empty ! -name '*.lock' ! -newermt "@$booted" -print -quit)
if [[ $empty ]]; then
    aside=$(mktemp -d "$cache.damaged.XXXXXX")
    mv "$cache" "$aside" && mkdir -m 700 "$cache"
    echo "note: $empty is empty since this node has failed, so all compiled code was moved to $aside: delete it" >&2
fi
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}

threads=$((SLURM_CPUS_ON_NODE / RANKS_PER_NODE))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$OMP_NUM_THREADS} # else 32 processes per rank

meeting=(--standalone) # one node: the system picks the port
if ((SLURM_NNODES > 1)); then
    host=${RENDEZVOUS%:*}
    if ! getent hosts "$host" >/dev/null; then
        echo "error: $SLURMD_NODENAME cannot resolve $host, where the nodes meet: add it to DNS or /etc/hosts" >&2
        exit 2 # no restart would help
    fi
    meeting=(--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS")
    meeting+=(--rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --local-addr "$SLURMD_NODENAME")
    # Otherwise torchrun compares host names to find the host, and waits only a minute for one that is still importing.
    meeting+=(--rdzv-conf "is_host=$((SLURM_NODEID == 0)),read_timeout=600")
fi

# launch.py passes signals on to the workers. This shell signals launch.py, because SLURM may not: with proctrack/cgroup
# a signal goes only to the processes that srun started, not to their children.
launch=(scripts/launch.py) program=("${SCRIPT:-train.py}")
if [[ ! -f train.py && ${SCRIPT-} ]]; then
    echo "error: SCRIPT=$SCRIPT needs a checkout: submit from its root" >&2
    exit 2
fi
[[ -f train.py ]] || { launch=(-m dlr_pretrain.scripts.launch) program=(-m dlr_pretrain); } # not a checkout
"$PYTHON" "${launch[@]}" "${meeting[@]}" --nproc-per-node "$RANKS_PER_NODE" --log-dir "$scratch/log" \
    "${program[@]}" "$@" &
agent=$!
asked=
trap 'asked=yes; kill -USR1 "$agent" 2>/dev/null || true' USR1 TERM

while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done
outcome=0
wait "$agent" || outcome=$?

((outcome != 1)) || echo "note: if compiled code is at fault, delete $cache" >&2
if [[ ! $asked ]] && ((outcome == 75)); then
    exit 0 # train.stop_after stopped the run: this is not a failure, and no reason to requeue the job
fi
exit "$outcome"
