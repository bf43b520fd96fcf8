#!/usr/bin/env bash
# Trains the runs that test the DLR paper's claims in this framework, on real text.
#
#   benchmarks/evidence/train.sh [PIECE ...]     all pieces, or those named (list: their names); repeat it to continue
#   benchmarks/evidence/train.sh smoke           five minutes of one core: two methods, one rate, two seeds
#
# The text is a file of C4 from the hub, or TEXT, a folder of *-train.*.json.gz and *-validation.*.json.gz in C4's
# layout. The vocabulary is trained on it, unless SPIECE names a sentencepiece model such as T5's. EXPERIMENT is
# evidence_cpu (the default: a run takes minutes on one core) or evidence_60m, which needs a GPU and SPIECE. JOBS is the
# number of concurrent runs. After a piece, its runs are packed into ROOT/<piece>.jsonl.gz (ROOT is runs/evidence by
# default), from which `python -m benchmarks.evidence.report PAGE ROOT` writes a page like docs/evidence.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
experiment=${EXPERIMENT:-evidence_cpu}
python=${PYTHON:-python}
pieces=("$@")
case $experiment in
evidence_cpu) longer=longer half=16 three_quarters=24 vocabulary=4096 ;;
evidence_60m) longer='' half=64 three_quarters=96 vocabulary=32100 ;;
*) echo "error: EXPERIMENT=$experiment: evidence_cpu or evidence_60m" >&2 && exit 2 ;;
esac
all=(tokens pairs paper mechanism ablations $longer cost)
[ ${#pieces[@]} -gt 0 ] || pieces=("${all[@]}")
for piece in "${pieces[@]}"; do
  case " ${all[*]} smoke list " in
  *" $piece "*) ;;
  *) echo "error: $piece: no such piece. Choose from ${all[*]} smoke" >&2 && exit 2 ;;
  esac
done
if [[ " ${pieces[*]} " = *" list "* ]]; then echo "${all[*]} smoke" && exit; fi
root=${ROOT:-runs/${experiment/_cpu/}}
text=(data=c4 data.train_files=en/c4-train.00000-of-01024.json.gz
  data.validation_files=en/c4-validation.00000-of-00008.json.gz)
if [ "${pieces[*]}" = smoke ]; then # a file of C4 of a tenth of that size
  root=${ROOT:-runs/evidence_smoke}
  text[1]=data.train_files=en/c4-validation.00001-of-00008.json.gz
fi
if [ -n "${TEXT:-}" ]; then
  text=(data=c4_local "data.root=$TEXT" 'data.train_files=*-train.*.json.gz'
    'data.validation_files=*-validation.*.json.gz')
fi
given=("experiment=$experiment" "data.root=$root/tokens" "run.root=$root")
rates=0.001,0.003,0.005,0.01,0.03   # a factor of 30; 0.01 is the paper's at 60m
paper=0.01
lower=0.003                         # so small a model trains evenly at this rate, but not at the paper's
seeds=42,43,44
more=42,43,44,45,46
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

tune() { # name of the comparison, words of submit.py
  local output=$root/$piece/$1
  shift
  "$python" slurm/submit.py "${given[@]}" --local --limit "${JOBS:-1}" --report "$output" "$@"
}

each() { # name of the comparison, rate, overrides of each method besides backbone=cola
  tune "$1" <(printf 'backbone=cola %s\n' "${@:3}") "train.lr=$2" "seed=$seeds"
}

tokens() { # tokenises the text, once
  local tokenizer=(--train-tokenizer "$vocabulary")
  if [ -n "${SPIECE:-}" ]; then
    tokenizer=("tokenizer.path=$SPIECE")
  elif [ "$experiment" = evidence_60m ]; then
    echo "error: EXPERIMENT=evidence_60m needs SPIECE, T5's sentencepiece model" >&2 && exit 2
  fi
  "$python" scripts/prepare_data.py "${text[@]}" "${tokenizer[@]}" --output "$root/tokens"
}

# Stated before its first run: DLR's mean difference at update 250 is -0.0417 to -0.0142, as the seeds of pairs predict.
smoke() { # the first 250 updates of lost without and with DLR as pairs trains it, with seeds that pairs does not have
  local dlr seed code dir
  tokens
  for seed in 51 52; do
    for dlr in off on; do
      code=0 dir=$root/smoke/lost-dlr_$dlr-s$seed
      "$python" train.py "experiment=$experiment" "data.root=$root/tokens" backbone=lost "dlr=$dlr" train.lr=0.005 \
        "seed=$seed" train.stop_after=250 "run.dir=$dir" || code=$?
      if [ $code = 75 ] && grep -q eval/loss_b "$dir/metrics.jsonl"; then code=0; fi # stopped by train.stop_after
      if [ $code != 0 ]; then exit $code; fi
    done
  done
}

pairs() { # each backbone without and with DLR: finds each one's best rate in a grid, then trains fresh seeds at it
  tune full backbone=full "train.lr=$rates" seed=41 --confirm "$more"
  for backbone in cola lowrank lost lax cola_lax; do
    tune "$backbone" "backbone=$backbone" dlr=off,on "train.lr=$rates" seed=41 --confirm "$more"
  done
}

paper() { # the same pairs at the paper's single rate
  for backbone in cola lowrank lost lax cola_lax; do
    tune "$backbone" "backbone=$backbone" dlr=off,on "train.lr=$paper" "seed=$more"
  done
  tune full backbone=full "train.lr=$paper" "seed=$more"
}

mechanism() { # residual and initial offset: with and without decay, for each rounding of the updates
  local three=(backbone=cola dlr=on,off,init_offset "seed=$seeds") # the others are compared with the residual
  tune bf16_as_the_papers "${three[@]}" "train.lr=$lower,$paper" # in its rounding decay changes no weight
  for decay in 0.0 0.1; do
    local shared=("${three[@]}" "train.lr=$lower" "optimizer.weight_decay=$decay" optimizer=adamw)
    tune "bf16-$decay" "${shared[@]}"
    tune "bf16_sr-$decay" "${shared[@]}" precision=bf16_sr
    tune "bf16_mixed-$decay" "${shared[@]}" precision=bf16_mixed
  done
}

ablations() { # variants of the residual, and an alternative to it: a smaller rank
  local off=dlr=off on=dlr=on
  local strengths=("$on dlr.alpha=0.25" "$on dlr.alpha=0.5" "$on dlr.alpha=2" "$on dlr.alpha=4")
  local forms=(dlr=uncorrected dlr=random dlr=no_b dlr=learnable_alpha)
  local halves=("$off backbone.rank=$half" "$on backbone.rank=$half")
  local quarters=("$off backbone.rank=$three_quarters" "$on backbone.rank=$three_quarters")
  local some=(dlr=uncorrected dlr=random "$on dlr.alpha=0.5")
  each residual "$lower" "$on" "${forms[@]}" "${strengths[@]}"
  each rank "$lower" "$on" "$off" "${halves[@]}" "${quarters[@]}"
  each at_the_papers_rate "$paper" "$on" "$off" "${some[@]}"
  # The same runs in three more comparisons, chosen after the results were known.
  each without_b "$lower" "$off" dlr=no_b
  each half_rank "$lower" "${halves[@]}"
  each three_quarters_rank "$lower" "${quarters[@]}"
}

# evidence_60m already reads all of the text, so it has no longer runs.
longer() { # four times the tokens, or four times the parameters: does the difference keep its sign at each rate?
  local rate
  for rate in $lower $paper; do
    local shared=(backbone=cola dlr=off,on "train.lr=$rate" "seed=$seeds")
    tune "base-$rate" "${shared[@]}" # the runs of mechanism
    tune "tokens-$rate" "${shared[@]}" train.steps=4000 eval.every=1000
    tune "parameters-$rate" "${shared[@]}" scale.hidden_size=256 scale.intermediate_size=688 scale.rank=64
  done
}

cost() { # a step without DLR and with it, in turns in one process; the machine must be otherwise idle
  for backbone in cola lowrank lost lax cola_lax; do
    "$python" -m benchmarks step "${given[@]}" "scale.vocab_size=$vocabulary" "backbone=$backbone" \
      --variant dlr=off --variant dlr=on --rounds 100 --json "$root/cost/$backbone.json"
  done
}

for piece in "${pieces[@]}"; do
  echo "== $piece"
  "$piece"
  if [ "$piece" != tokens ]; then
    "$python" -m benchmarks.evidence.collect "$root/$piece" "$root/$piece.jsonl.gz"
  fi
  if [ "$piece" = smoke ]; then
    "$python" -m benchmarks.evidence.report "$root/smoke.jsonl.gz"
  fi
done
