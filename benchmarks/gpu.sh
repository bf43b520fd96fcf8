#!/usr/bin/env bash
# The GPU programme: tests, steps, peers, folding, memory and compile times, in pieces of under ten minutes each.
#
#   benchmarks/gpu.sh OUT [PIECE ...]      all pieces, or those named; benchmarks/gpu.sh OUT list prints their names
#
# Needs no network. A piece is left out where its result is in OUT already, so the same command again goes on where it
# was cut off. PYTHON is the interpreter; PEERS_DIR holds checkouts of CoLA, DLR and SLTrain, TF448 a folder with
# transformers 4.48 for CoLA's: comparisons whose checkout is missing say so and are left out.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUT [PIECE ...]}
shift
chosen=("$@")
python=${PYTHON:-python}
export PEERS_DIR=${PEERS_DIR:-peers} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=()

wanted() { # piece, file of its result
  if [ "${chosen[*]}" = list ]; then echo "$1"; return 1; fi
  if [ ${#chosen[@]} -gt 0 ] && [[ " ${chosen[*]} " != *" $1 "* ]]; then return 1; fi
  if [ -e "$2" ]; then echo "$1: done before ($2)"; return 1; fi
  mkdir -p "$out"
}

bench() { # piece, words of scripts/benchmark.py
  local piece=$1 start=$SECONDS
  shift
  wanted "$piece" "$out/$piece.json" || return 0
  timeout 590 "$python" scripts/benchmark.py "$@" --json "$out/$piece.json" --markdown "$out/$piece.md" \
    >"$out/$piece.log" 2>&1 || failed+=("$piece")
  echo "$piece: $((SECONDS - start)) s"
  tail -n 25 "$out/$piece.log"
}

tests() { # piece, arguments of pytest
  local piece=$1
  shift
  wanted "$piece" "$out/$piece.txt" || return 0
  if timeout 590 "$python" -m pytest -m gpu "$@" >"$out/$piece.log" 2>&1; then
    mv "$out/$piece.log" "$out/$piece.txt"
  else
    failed+=("$piece")
  fi
  tail -n 15 "$out/$piece".*
}

compare() { # piece, checkout, words
  local piece=$1 checkout=$2
  shift 2
  if [ "$checkout" = any ] || [ -d "$PEERS_DIR/$checkout" ]; then
    bench "$piece" compare "$@"
  elif wanted "$piece" "$out/$piece.json"; then
    echo "$piece: left out, $PEERS_DIR/$checkout is not there"
  fi
}

small="scale=60m backbone=cola train.micro_batch=128"
large="scale=1b backbone=cola train.global_batch=64 train.micro_batch=16"

tests tests tests/gpu/test_gpu.py
tests tests-rest tests/gpu --ignore tests/gpu/test_gpu.py
bench step-60m step $small
bench step-60m-loader step $small --loader --arm dlr=on
bench step-60m-backbones step $small --arm backbone=cola --arm "backbone=cola dlr=on" --arm backbone=lowrank \
  --arm backbone=lost --arm backbone=lax --arm backbone=cola_lax --arm backbone=sltrain --arm backbone=full
bench step-1b step $large
bench step-1b-full step $large --arm backbone=full --arm "backbone=cola dlr=on"
bench compile-60m step $small --arm dlr=on --rounds 2 --warmup 0 --compile-times
bench compile-1b step $large --arm dlr=on --rounds 2 --warmup 0 --compile-times
bench fold-60m fold $small train.global_batch=128 dlr=on
bench fold-1b fold $large train.global_batch=16 dlr=on
bench memory-1b memory $large train.global_batch=16 dlr=on
bench memory-7b memory scale=7b backbone=cola dlr=on train.global_batch=8 train.micro_batch=8 \
  --setting train.activation_checkpointing=latent --setting train.activation_checkpointing=none
bench memory-7b-low memory scale=7b backbone=cola dlr=on train.global_batch=8 train.micro_batch=8 train.memory=low \
  optimizer=adamw_8bit train.clip_by=previous_norm precision=bf16_sr --setting train.activation_checkpointing=latent
peers="train.global_batch=64 dlr=on"
adapter=benchmarks/adapters
PYTHONPATH="$PYTHONPATH${TF448:+:$TF448}" compare compare-60m-cola CoLA scale=60m backbone=cola $peers \
  --peer $adapter/cola.py --peer $adapter/cola.py:build_lean
PYTHONPATH="$PYTHONPATH${TF448:+:$TF448}" compare compare-60m-cola-eager CoLA scale=60m backbone=cola $peers \
  compile=false --peer $adapter/cola.py
PYTHONPATH="$PYTHONPATH${TF448:+:$TF448}" compare compare-1b-cola CoLA scale=1b backbone=cola dlr=on \
  train.global_batch=16 --peer $adapter/cola.py
compare compare-60m-dlr DLR scale=60m backbone=cola $peers --peer $adapter/dlr.py --peer $adapter/dlr.py:build_off \
  --peer $adapter/dlr.py:build_random
compare compare-1b-dlr DLR scale=1b backbone=cola dlr=on train.global_batch=16 --peer $adapter/dlr.py
compare compare-60m-hf any scale=60m backbone=full train.global_batch=64 --peer $adapter/hf.py
compare compare-60m-sltrain SLTrain scale=60m backbone=sltrain train.global_batch=64 --peer $adapter/sltrain.py

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; their logs are in $out"
  exit 1
fi
