#!/usr/bin/env bash
# The runs for the question whether DLR does what its paper says, in this framework, on real text.
#
#   TEXT=/data/webmix scripts/evidence.sh [PIECE ...]      all pieces, or those named; the same command again goes on
#
# TEXT is a folder of C4-layout shards, *-train.*.json.gz and *-validation.*.json.gz. EXPERIMENT is evidence_cpu (the
# default: minutes a run and core), or evidence_60m with SPIECE, T5's sentencepiece model, on a GPU. JOBS run at once.
set -euo pipefail
cd "$(dirname "$0")/.."
experiment=${EXPERIMENT:-evidence_cpu}
python=${PYTHON:-python}
root=runs/evidence
rates=0.001,0.003,0.005,0.01,0.03   # a factor of 30; 0.01 is the paper's at 60m
paper=0.01
seeds=42,43,44
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

tune() { "$python" scripts/tune.py "experiment=$experiment" --jobs "${JOBS:-1}" "$@"; }

tokens() { # the text, tokenised once
  local tokenizer=(--train-tokenizer 4096)
  if [ "$experiment" = evidence_60m ]; then tokenizer=("tokenizer.path=${SPIECE:?T5\'s sentencepiece model}"); fi
  "$python" scripts/prepare_data.py data=c4_local "data.root=${TEXT:?folder of the shards}" \
    'data.train_files=*-train.*.json.gz' 'data.validation_files=*-validation.*.json.gz' "${tokenizer[@]}" \
    --output "$root/tokens"
}

pairs() { # each backbone without and with DLR: a rate of its own from the same grid, then fresh seeds at it
  for backbone in cola lowrank lost lax cola_lax; do
    tune "pair=$backbone,$backbone+dlr" "lr=$rates" seeds=41 "confirm=$seeds"
  done
  tune pair=full "lr=$rates" seeds=41 "confirm=$seeds"
}

paper() { # the same at the paper's one rate
  for backbone in cola lowrank lost lax cola_lax; do
    tune "pair=$backbone,$backbone+dlr" "lr=$paper" "seeds=$seeds"
  done
  tune pair=full "lr=$paper" "seeds=$seeds"
}

mechanism() { # a residual, an initial offset, decay towards it: with and without decay, by the rounding of the updates
  local three=cola,cola+dlr,cola+init_offset four=cola,cola+dlr,cola+init_offset,cola+init_offset_decay
  for decay in 0.0 0.1; do
    tune "pair=$three" "lr=$paper" "seeds=$seeds" "optimizer.weight_decay=$decay"  # as the papers round
    tune "pair=$three" "lr=$paper" "seeds=$seeds" "optimizer.weight_decay=$decay" optimizer=adamw
    tune "pair=$three" "lr=$paper" "seeds=$seeds" "optimizer.weight_decay=$decay" optimizer=adamw precision=bf16_sr
  done
  tune "pair=$three" "lr=$paper" "seeds=$seeds" optimizer.weight_decay=0.0 optimizer=adamw precision=bf16_mixed
  tune "pair=$four" "lr=$paper" "seeds=$seeds" optimizer.weight_decay=0.1 optimizer=adamw precision=bf16_mixed
}

ablations() { # of the residual; then what a sceptic would try in its place: a larger B at the start, a faster B
  local controls=cola:backbone.b_gain=1.3,cola:backbone.b_gain=2,cola:optimizer.b_lr=2,cola:optimizer.b_lr=4
  local strengths=cola+dlr:dlr.alpha=0.25,cola+dlr:dlr.alpha=0.5,cola+dlr:dlr.alpha=2,cola+dlr:dlr.alpha=4
  local forms=cola+uncorrected,cola+random,cola+balanced,cola+no_b,cola+learnable_alpha
  local ranks=cola:backbone.rank=16,cola+dlr:backbone.rank=16,cola:backbone.rank=24,cola+dlr:backbone.rank=24
  tune "pair=cola+dlr,cola,$forms,$strengths,$controls,$ranks" "lr=0.003,$paper" "seeds=$seeds"
}

pieces=("$@")
[ ${#pieces[@]} -gt 0 ] || pieces=(tokens pairs paper mechanism ablations)
for piece in "${pieces[@]}"; do
  echo "== $piece"
  "$piece"
done
