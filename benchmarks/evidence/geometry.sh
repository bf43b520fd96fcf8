#!/usr/bin/env bash
# Trains the runs of docs/evidence-geometry.md on one core, one at a time. A finished run is left as it is.
#
#   bash benchmarks/evidence/geometry.sh                       all pieces: tokens methods scales
#   SEEDS=42 bash benchmarks/evidence/geometry.sh methods      fifteen methods, one of the three seeds
#
# The text is as in train.sh, whose piece `tokens` this calls: TEXT is a folder in C4's layout, or else C4 from the hub is
# read. Runs are written into ROOT (runs/geometry by default).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python} root=${ROOT:-runs/geometry} steps=${STEPS:-80}
seeds=${SEEDS:-42 43 44}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
pieces=("$@")
[ ${#pieces[@]} -gt 0 ] || pieces=(tokens methods scales)

run() { # name, overrides: one run, unless it has finished
  if ! [ -d "$root/$1/folded" ]; then
    "$python" train.py experiment=evidence_cpu "data.root=$root/tokens" "run.dir=$root/$1" precision=fp32 compile=false \
      "train.steps=$steps" train.global_batch=16 train.micro_batch=16 eval.every=20 eval.tokens=20_000 \
      checkpoint.every=20 checkpoint.keep_last=4 "${@:2}"
  fi
}

methods() {
  local seed dlr backbone optimizer
  for seed in $seeds; do
    for backbone in cola lowrank lost lax cola_lax; do
      for dlr in off on; do
        run "methods/$backbone-$dlr-s$seed" "backbone=$backbone" "dlr=$dlr" train.lr=0.003 "seed=$seed"
      done
    done
    run "methods/full-s$seed" backbone=full train.lr=0.003 "seed=$seed"
    for optimizer in galore fira; do # their authors' rate, without clipping
      run "methods/$optimizer-s$seed" backbone=full "optimizer=$optimizer" "optimizer.refresh_every=20" train.lr=0.01 \
        train.clip=null "seed=$seed"
    done
    run "methods/sltrain-s$seed" backbone=sltrain train.lr=0.003 "seed=$seed"
    run "methods/relora-s$seed" backbone=relora backbone.merge_every=30 train.lr=0.003 "seed=$seed"
  done
}

scales() { # cola at three more sizes than that of methods
  local seed dlr
  for seed in $seeds; do
    for dlr in off on; do
      local same=(backbone=cola "dlr=$dlr" train.lr=0.003 "seed=$seed" checkpoint.keep_last=1)
      run "scales/0.3m-$dlr-s$seed" "${same[@]}" scale.hidden_size=32 scale.intermediate_size=86 scale.rank=8
      run "scales/3.4m-$dlr-s$seed" "${same[@]}" scale.hidden_size=256 scale.intermediate_size=688 \
        scale.rank=64
      run "scales/8m-$dlr-s$seed" "${same[@]}" scale.hidden_size=384 scale.intermediate_size=1032 \
        scale.rank=96 scale.num_heads=6 scale.num_layers=8
    done
  done
}

if [[ " ${pieces[*]} " = *" list "* ]]; then echo "tokens methods scales" && exit; fi
for piece in "${pieces[@]}"; do
  case $piece in
  tokens) ROOT=$root bash benchmarks/evidence/train.sh tokens ;;
  methods | scales) "$piece" ;;
  *) echo "error: $piece: no such piece. Choose from tokens methods scales" >&2 && exit 2 ;;
  esac
done
