#!/usr/bin/env bash
# Everything behind docs/evidence.md: does DLR do what its paper says, in this framework, on real text?
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

pieces=("$@")
[ ${#pieces[@]} -gt 0 ] || pieces=(tokens pairs paper)
for piece in "${pieces[@]}"; do
  echo "== $piece"
  "$piece"
done
