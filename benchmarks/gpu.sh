#!/usr/bin/env bash
# The GPU programme: tests, steps, peers, memory, a trace and runs with DLR, in pieces of under ten minutes each.
#
#   benchmarks/gpu.sh OUT [PIECE ...]      all pieces, or those named; benchmarks/gpu.sh OUT list prints their commands
#
# On an H100 with 16 cores the tests take four minutes with pytest-xdist (JOBS processes at once, default 10). A
# measurement compiles its variants and compares their losses before it times them: two to four minutes a piece.
# Needs no network. A piece is left out where its result is in OUT already, so the same command again goes on where it
# was cut off. PYTHON is the interpreter; PEERS_DIR holds checkouts of CoLA and DLR, TF448 a folder with
# transformers 4.48 for CoLA's, TOKENS a folder of prepare_data.py with 45M tokens of text: what lacks one of them says
# so and is left out.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUT [PIECE ...]}
shift
chosen=("$@")
python=${PYTHON:-python}
export PEERS_DIR=${PEERS_DIR:-peers} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=()

if [ "${chosen[*]}" != list ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no GPU answers to $python: nothing here would be measured" >&2
  exit 2
fi

wanted() { [ ${#chosen[@]} -eq 0 ] || [[ " ${chosen[*]} " == *" $1 "* ]]; } # piece

run() { # piece, its result, a command that writes it; a result that failed is moved away, and tried again the next time
  local piece=$1 result=$out/$2 start=$SECONDS
  shift 2
  if [ "${chosen[*]}" = list ]; then printf '%s:' "$piece"; printf ' %q' "$@"; echo; return; fi
  if ! wanted "$piece"; then return; fi
  if [ -e "$result" ]; then echo "$piece: done before ($result)"; return; fi
  mkdir -p "$out"
  if ! timeout 590 "$@" >"$out/$piece.log" 2>&1; then
    failed+=("$piece")
    if [ -e "$result" ]; then mv "$result" "$result.failed"; fi
  elif [ ! -e "$result" ]; then
    cp "$out/$piece.log" "$result"
  fi
  echo "$piece: $((SECONDS - start)) s"
  tail -n 25 "$out/$piece.log"
}

bench() { # piece, arguments of benchmarks
  local piece=$1
  shift
  run "$piece" "$piece.json" "$python" -m benchmarks "$@" device=cuda --json "$out/$piece.json"
}

tests() { # piece, arguments of pytest
  local piece=$1
  shift
  TORCHINDUCTOR_COMPILE_THREADS=2 run "$piece" "$piece.txt" "$python" -m pytest -m gpu "$@"
}

there() { # piece, a folder that it needs
  if [ -d "$2" ] || [ "${chosen[*]}" = list ]; then return; fi
  if wanted "$1"; then echo "$1: left out, ${2:-TOKENS} is not there"; fi
  return 1
}

compare() { # piece, checkout, arguments
  local piece=$1 checkout=$2
  shift 2
  if there "$piece" "$PEERS_DIR/$checkout"; then bench "$piece" compare "$@"; fi
}

small="scale=60m backbone=cola train.micro_batch=128"
large="scale=1b backbone=cola train.micro_batch=16"
eager=compile=false

tests tests -n "${JOBS:-10}" --dist worksteal -k "not 7b" tests/gpu
tests tests-7b -k 7b tests/gpu

bench step-60m step $small
bench step-60m-backbones step $small --variant backbone=cola --variant "backbone=cola dlr=on" \
  --variant backbone=lowrank --variant backbone=full
bench step-60m-others step $small --variant backbone=cola --variant backbone=lost --variant backbone=lax \
  --variant backbone=cola_lax --variant backbone=sltrain
cuts="--variant train.micro_batch=64 --variant train.micro_batch=128 --variant train.micro_batch=512"
bench step-60m-micro step scale=60m backbone=cola dlr=on $cuts
bench step-60m-compile step $small dlr=on --variant compile=true --variant compile=max-autotune
few="step $large train.global_batch=16 dlr=on --variant compile=true" # as of 32 ranks: the host may set the pace
bench step-1b-few $few
run step-1b-few-cpp step-1b-few-cpp.json env TORCHINDUCTOR_CPP_WRAPPER=1 "$python" -m benchmarks $few device=cuda \
  --json "$out/step-1b-few-cpp.json"
bench step-1b step $large train.global_batch=64
bench step-1b-full step $large train.global_batch=64 --variant backbone=full --variant "backbone=cola dlr=on"
kept="--variant train.activation_checkpointing=block --variant train.activation_checkpointing=latent"
bench step-1b-kept step $large train.global_batch=16 dlr=on $kept --variant train.activation_checkpointing=none
seven="scale=7b backbone=cola dlr=on train.global_batch=8 train.micro_batch=8"
bench step-7b-kept step $seven $kept --rounds 10
latent=train.activation_checkpointing=latent
bench memory-1b memory $large train.global_batch=16 dlr=on $eager # the plan's figures are of eager code
bench memory-7b memory $seven --variant "$latent $eager" \
  --variant "train.activation_checkpointing=none $eager" --variant $latent
bench memory-7b-8bit memory $seven optimizer=adamw_8bit precision=bf16_sr --variant "$latent $eager" --variant $latent

run trace-60m trace-60m/report.md "$python" train.py scale=60m backbone=cola dlr=on data=sample logger=jsonl \
  device=cuda profile=on train.steps=30 run.dir="$out/trace-60m"
if there dlr-60m "${TOKENS:-}"; then
  run dlr-60m dlr-60m/report.md "$python" scripts/tune.py experiment=evidence_60m data.root="${TOKENS:-TOKENS}" \
    device=cuda run.root="$out/runs" backbone=cola dlr=off,on train.lr=0.003,0.01,0.03 seed=42 \
    --local --limit 3 --output "$out/dlr-60m"
fi

peers="train.global_batch=64 dlr=on"
adapter=benchmarks/adapters
compare compare-60m-dlr DLR scale=60m backbone=cola $peers --peer $adapter/dlr.py --peer $adapter/dlr.py:build_off \
  --peer $adapter/dlr.py:build_random
compare compare-1b-dlr DLR scale=1b backbone=cola dlr=on train.global_batch=16 --peer $adapter/dlr.py
bench compare-60m-hf compare scale=60m backbone=full train.global_batch=64 --peer $adapter/dlr.py:build_dense
PYTHONPATH="$PYTHONPATH${TF448:+:$TF448}"
compare compare-60m-cola CoLA scale=60m backbone=cola $peers --peer $adapter/cola.py --peer $adapter/cola.py:build_lean
compare compare-60m-cola-eager CoLA scale=60m backbone=cola $peers compile=false --peer $adapter/cola.py
compare compare-1b-cola CoLA scale=1b backbone=cola dlr=on train.global_batch=16 --peer $adapter/cola.py

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; their logs are in $out"
  exit 1
fi
