#!/usr/bin/env bash
# The GPU programme, in slices of at most thirteen minutes. A slice that is cut off keeps its results so far.
#
#   benchmarks/gpu.sh pack DIR             packs what a machine without a network needs: wheels, peers' code, tokens
#   benchmarks/gpu.sh sizes DIR            lists what each slice takes along of it, and fails if one takes too much
#   benchmarks/gpu.sh OUT SLICE ...        runs slices g e f h b d, the most important first; results in OUT/SLICE
#   benchmarks/gpu.sh OUT list             lists the commands that are left
#   python -m benchmarks.page OUT          writes benchmarks/gpu.md from the results
#
# The same command continues where it was cut off, and skips what OUT/SLICE/done lists. A slice times everything first,
# and compares losses in the minutes that are left (`--no-parity`); STAGES=times leaves that to a later call. LIMIT
# lowers the seconds that a slice may take, ONLY names the measurements to make ("step-60m few-1b").
# PYTHON is the interpreter. PACK is a folder that `pack` wrote (default results/pack). Without one, PEERS_DIR has
# checkouts of CoLA and DLR, TF448 a folder with transformers 4.48 for CoLA's code, and TOKENS a folder of
# prepare_data.py. A measurement that lacks one of them is skipped with a message.
# GPU_REHEARSAL=1 makes everything small, for a stand-in device: its numbers mean nothing.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
adapter=benchmarks/adapters

pack() { # folder: wheels for the machine's Python (PACK_PYTHON), and copies of PEERS_DIR and TOKENS
  local into=$1 from=(--quiet --no-deps --only-binary=:all: --python-version "${PACK_PYTHON:-3.12}" --implementation cp)
  local tag
  for tag in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do from+=(--platform "$tag"); done
  rm -rf "$into" && mkdir -p "$into/wheels" "$into/peers" || return
  "$python" -m pip download "${from[@]}" -d "$into/wheels" 'hydra-core>=1.3.2,<1.4' 'omegaconf>=2.3,<2.4' \
    'torchao>=0.18,<0.19' || return
  "$python" -m pip wheel --quiet --no-deps -w "$into/wheels" antlr4-python3-runtime==4.9.3 || return # has no wheel
  "$python" -m pip download "${from[@]}" -d "$into/tf448" transformers==4.48.3 'tokenizers<0.22' \
    'huggingface-hub<1' || return
  for peer in CoLA DLR; do
    if [ -d "${PEERS_DIR:-peers}/$peer" ]; then cp -r "${PEERS_DIR:-peers}/$peer" "$into/peers/"; else
      echo "not packed: ${PEERS_DIR:-peers}/$peer is not there"
    fi
  done
  rm -rf "$into"/peers/*/.git
  if [ -d "${TOKENS:-}" ]; then tar c -C "$TOKENS" . | xz -3 >"$into/tokens.tar.xz"; else
    echo "not packed: tokens; TOKENS names no folder of prepare_data.py. Slices e and f would train on data=sample"
  fi
  sizes "$into"
}

sizes() ( # folder that `pack` wrote
  cd "$1" || exit
  code=0
  for slice in "${order[@]}"; do
    parts=(wheels)
    case $slice in b) parts+=(tf448 peers) ;; [efgh]) parts+=(tokens.tar.xz) ;; esac
    size=$(du -mc --apparent-size "${parts[@]}" 2>/dev/null | tail -n 1 | cut -f 1) # what was not packed has no size
    echo "slice $slice takes ${parts[*]} along: $size MiB"
    if [ "$size" -ge 64 ]; then
      echo "error: slice $slice: $size MiB of ${parts[*]}: must be less than 64. Pack fewer tokens or peers' files" >&2
      code=1
    fi
  done
  exit $code
)

unpack() { # PACK to a folder of this machine, once
  local pack=${PACK:-results/pack} into
  [ -d "$pack" ] || return 0
  into=${TMPDIR:-/tmp}/dlr_pretrain_pack.$UID
  export PYTHONPATH="$PYTHONPATH:$into/wheels"
  PEERS_DIR=$pack/peers TF448=$into/tf448 TOKENS=$into/tokens
  local part
  for part in wheels tf448; do
    if [ -d "$pack/$part" ] && [ ! -d "$into/$part" ]; then
      rm -rf "$into/$part.partial" # of a call that was cut off
      "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$into/$part.partial" \
        "$pack/$part"/*.whl && mv "$into/$part.partial" "$into/$part" || return
    fi
  done
  if [ -e "$pack/tokens.tar.xz" ] && [ ! -d "$TOKENS" ]; then
    rm -rf "$TOKENS.partial" && mkdir -p "$TOKENS.partial" || return
    tar xJf "$pack/tokens.tar.xz" -C "$TOKENS.partial" && mv "$TOKENS.partial" "$TOKENS"
  fi
}

limited() { # name, most seconds, command: logs its output in the slice's log; in `list` only prints it
  local name=$1 most=$(($2 * patience)) code=0 left start=$SECONDS
  shift 2
  if [ "$stage" = list ]; then
    printf '%s %s:' "$slice" "$name"
    printf ' %q' "$@"
    echo
    return 1
  fi
  left=$((until - SECONDS))
  if [ $left -lt 25 ]; then echo "$slice $name: no time is left" && failed+=("$name") && return 1; fi
  echo "== $slice $name, $left s are left" | tee -a "$log"
  # timeout has its own process group, to end all of the command; setpriv ends it when this script is killed
  "${tied[@]}" timeout -k 20 $((left < most ? left : most)) "$@" >"$out/$slice/running.txt" 2>&1 || code=$?
  cat "$out/$slice/running.txt" >>"$log"
  tail -n "${TAIL:-12}" "$out/$slice/running.txt"
  rm "$out/$slice/running.txt"
  echo "== $slice $name: $((SECONDS - start)) s, exit code $code" | tee -a "$log"
  if [ $code != 0 ]; then failed+=("$name"); fi
  return $code
}

due() { # name: whether it is wanted, and has not succeeded
  if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $1 "* ]]; then return 1; fi
  ! { [ -e "$out/$slice/done" ] && grep -qx "$1" "$out/$slice/done"; }
}

once() { # name, most seconds, command: skipped if it has succeeded
  if [ "$stage" = check ] || ! due "$1"; then return; fi
  if limited "$@"; then echo "$1" >>"$out/$slice/done"; fi
}

bench() { # name, most seconds, arguments of benchmarks
  local name=$1 most=$2 part=$3 result=$out/$slice/$1.json
  local line=("$python" -m benchmarks "${@:3}" "device=$device" --json "$result")
  case $part in
  step | compare)
    line+=(--no-parity "${rounds[@]}" "${trace[@]}")
    if ! due "$name"; then return; fi
    if [ "$stage" = check ]; then # also repeats times with too few rounds
      if limited "$name-parity" "$most" "${line[@]}"; then echo "$name" >>"$out/$slice/done"; fi
    elif [ ! -e "$result" ]; then
      limited "$name" "$most" "${line[@]}" --seconds 0
    fi
    ;;
  *) once "$name" "$most" "${line[@]}" ;;
  esac
}

compare() { # name, most seconds, checkout, arguments
  if [ "$stage" != list ] && [ ! -d "${PEERS_DIR:-peers}/$3" ]; then
    if [ "$stage" = times ]; then echo "$slice $1: left out, ${PEERS_DIR:-peers}/$3 is not there"; fi
    return
  fi
  bench "$1" "$2" compare "${@:4}"
}

slice_g() { # what a launch costs, and what recorded micro-batches, our attention and fp8 bring
  local cola=(backbone=cola dlr=on) text=(data=sample)
  bench launches 60 launches
  bench few-60m 100 step scale=60m "${cola[@]}" "train.global_batch=$rows_1b" "train.micro_batch=$rows_1b" \
    "${small[@]}" "${recorded[@]}"
  bench attention 100 attention "${cola[@]}" "${few_layers[@]}" --variant "scale=60m train.global_batch=$rows_60m" \
    --variant "scale=1b train.global_batch=$rows_1b"
  bench few-1b 120 step scale=1b "${cola[@]}" "train.global_batch=$few_1b" "train.micro_batch=$few_1b" "${small[@]}" \
    "${recorded[@]}"
  bench fp8 60 fp8 "${cola[@]}" --variant scale=60m --variant scale=1b
  bench step-1b 150 step scale=1b "${cola[@]}" "train.global_batch=$rows_1b" "${small[@]}" \
    --variant "$compiled train.micro_batch=$rows_1b" \
    --variant "$compiled train.micro_batch=$rows_1b attention=triton" \
    --variant "$compiled train.micro_batch=$few_1b" \
    --variant "$compiled train.micro_batch=$few_1b cuda_graphs=false"
  local few=(--variant "$compiled train.micro_batch=$rows_60m")
  bench step-60m 120 step scale=60m "${cola[@]}" "train.global_batch=$rows_60m" "${small[@]}" "${few[@]}" \
    --variant "$compiled train.micro_batch=$rows_60m attention=triton"
  bench step-60m-masked 80 step scale=60m "${cola[@]}" "train.global_batch=$rows_60m" "${small[@]}" "${few[@]}" \
    --variant "$compiled train.micro_batch=$rows_60m attention=triton" data.mask_documents=true
  TORCHINDUCTOR_USE_FAST_MATH=1 bench step-60m-fast-math 60 step scale=60m "${cola[@]}" \
    "train.global_batch=$rows_60m" "${small[@]}" "${few[@]}"
  if [ -d "${TOKENS:-}" ]; then text=(data=tokens "data.root=$TOKENS"); fi
  device=$trains_on bench train-60m-fsdp 80 train scale=60m "${cola[@]}" data=sample logger=jsonl parallel=fsdp \
    "train.global_batch=$rows_1b" "train.micro_batch=$few_1b" eval.tokens=20_000 train.steps=40 \
    "${trains_small[@]}" "${runs[@]}"
  device=$trains_on bench train-60m 120 train scale=60m "${cola[@]}" "${text[@]}" logger=jsonl "train.global_batch=$rows_60m" \
    "train.micro_batch=$rows_60m" eval.tokens=200_000 eval.packing=packed eval.every=50 train.steps=100 \
    checkpoint.every=50 "${trains_small[@]}" "${runs[@]}"
  local rows=("train.global_batch=$rows_7b" "train.micro_batch=$rows_7b" train.activation_checkpointing=latent)
  bench memory-7b 200 memory scale=7b "${cola[@]}" "${few_layers[@]}" "${rows[@]}" --variant compile=false \
    --variant "compile=false optimizer=adamw_8bit precision=bf16_sr" --variant "$compiled"
}

slice_d() { # what a start costs: few sequences, cold and warm
  local scales=(backbone=cola dlr=on "$compiled" "train.global_batch=$few_1b" "train.micro_batch=$few_1b" "${few_layers[@]}"
    --variant scale=60m --variant scale=350m --variant scale=1b)
  local cold=${TMPDIR:-/tmp}/dlr_pretrain_cold.$UID
  if [ "$stage" = times ] && due cold; then rm -rf "$cold" "$out/$slice/cold.json"; fi # warm needs the caches of all
  TORCHINDUCTOR_CACHE_DIR=$cold/inductor TRITON_CACHE_DIR=$cold/triton bench cold 240 memory "${scales[@]}"
  TORCHINDUCTOR_CACHE_DIR=$cold/inductor TRITON_CACHE_DIR=$cold/triton bench warm 120 memory "${scales[@]}"
}

slice_h() { # the pair of e that says most, on four times the tokens, and tests
  RATES=${RATES:-0.003} STEPS=$((4 * ${STEPS:-340})) trained 500 "${PAIR:-cola}"
  TAIL=4 once tests 200 "$python" -m pytest -q -m gpu -p no:cacheprovider \
    -k "${TESTS:-kept_latents or doctor or graph or one_kernel}" tests/gpu "${collect[@]}"
}

slice_b() { # beside other code
  local cola=(--peer $adapter/cola.py --peer $adapter/cola.py:build_lean)
  local dlr=(--peer $adapter/dlr.py --peer $adapter/dlr.py:build_off)
  local path=$PYTHONPATH
  PYTHONPATH=${TF448:+$TF448:}$path
  compare cola-1b 150 CoLA scale=1b backbone=cola dlr=on "train.global_batch=$few_1b" "${small[@]}" "${cola[@]}"
  PYTHONPATH=$path
  compare dlr-1b 120 DLR scale=1b backbone=cola dlr=on "train.global_batch=$few_1b" "${small[@]}" "${dlr[@]}"
  bench dense-60m 90 compare scale=60m backbone=full "train.global_batch=$rows_1b" "${small[@]}" \
    --peer $adapter/dlr.py:build_dense
}

trained() { # seconds, backbones: runs with and without DLR, at two rates, with two seeds; the first seed comes first
  local most=$1 folder=${TMPDIR:-/tmp}/dlr_pretrain_runs.$UID/$slice backbones=$2 steps=${STEPS:-340}
  local text=(experiment=evidence_60m "data.root=${TOKENS:-TOKENS}")
  if [ "$stage" = times ] && [ ! -d "${TOKENS:-}" ]; then
    text=(experiment=evidence_60m data=sample eval.tokens=20_000)
    echo "$slice runs: TOKENS names no folder of prepare_data.py; the sample of this project is the text"
  fi
  if [ -n "${GPU_REHEARSAL:-}" ]; then backbones=${2%%,*}; fi
  packing "$folder" &>/dev/null & # whose sleep may outlive it
  local packer=$!
  once runs "$most" "$python" slurm/submit.py --local --limit "${JOBS:-2}" "${text[@]}" "device=$trains_on" \
    "run.root=$folder" "train.steps=$steps" "eval.every=$((steps / 4))" "checkpoint.every=$((steps / 4))" \
    train.micro_batch=512 "${tiny[@]}" "$seeds" "backbone=$backbones" "train.lr=${RATES:-0.003,0.01}" dlr=off,on
  kill $packer 2>/dev/null
  wait $packer 2>/dev/null
  packed "$folder"
}

packing() { while sleep 10 && kill -0 $$ 2>/dev/null; do packed "$1"; done; } # folder of runs; ends with this script

packed() { # folder of runs: packs their records; the archive is whole at any time
  if [ "$stage" = list ] || [ ! -d "$1" ]; then return; fi
  local draft=$out/$slice/runs.$BASHPID # of this process: a killed packer's tar may still be writing its own
  (cd "$1" && find . \( -name metrics.jsonl -o -name config.yaml -o -name manifest.json \) -print0) |
    tar czf "$draft" -C "$1" --null -T - 2>/dev/null && mv "$draft" "$out/$slice/runs.tgz"
}

# 340 updates are one epoch of the 45M tokens; 16 runs (e) are 713M tokens, 24 (f) 1,070M. An H100 took 1.26 million
# tokens/s in slice a: 9.4 and 14.1 minutes. With two more for starts and evaluations, a guess, these fit (multiples of
# 4, because a fourth of them ends with an evaluation). On the same machine, the same command continues the runs.
#   LIMIT      780   690   600   400
#   STEPS, e   340   340   284   164
#   STEPS, f   252   224   188   108    (340 take two calls)
# Four runs of h are 713M tokens: the first call ends the pair of the first seed, a second call that of the other.
slice_e() { trained 760 cola,lowrank; }
slice_f() { trained 760 lost,lax,cola_lax; }

order=(g e f h b d)

main() { # bash reads it whole before it runs, so an edit of this file does not change a running script
  if [[ ${1:-} = pack || ${1:-} = sizes ]]; then
    : "${2:?usage: benchmarks/gpu.sh $1 DIR}"
    if [ "${3:-}" = list ]; then echo "$1 $2" && exit; fi
    "$1" "$2" && exit
    exit 1
  fi
  out=${1:?usage: benchmarks/gpu.sh OUT SLICE ...}
  shift
  slices=("$@")
  [ ${#slices[@]} -gt 0 ] || slices=("${order[@]}")
  device=cuda trains_on=cuda seeds=seed=42,43 rows_60m=512 rows_1b=64 few_1b=16 rows_7b=8 compiled=compile=true
  small=() few_layers=() tiny=() trains_small=() collect=() rounds=(--rounds 30) trace=(--trace)
  recorded=(--variant "$compiled" --variant "$compiled cuda_graphs=false")
  runs=("${recorded[@]}") patience=1
  if [ -n "${GPU_REHEARSAL:-}" ]; then
    rows_60m=4 rows_1b=4 few_1b=2 rows_7b=2 patience=10 # its host may have other work
    few_layers=(scale.num_layers=1) collect=(--collect-only) rounds=(--rounds 6 --warmup 1) trace=() STEPS=4
    trains_on=cpu seeds=seed=42 # a run checks values, which a stand-in device does not compute
    small=("${few_layers[@]}" "$compiled")
    tiny=(scale.hidden_size=32 scale.intermediate_size=88 scale.num_heads=2 scale.num_layers=1 scale.rank=8 compile=false
      train.global_batch=4 train.micro_batch=4 train.seq_len=32 eval.tokens=2_000 data.packing=packed)
    runs=(--variant compile=false)
    trains_small=("${tiny[@]}" train.steps=4 eval.every=2 checkpoint.every=2)
  fi
  declare -gA seconds=([g]=720 [e]=780 [f]=780 [h]=720 [b]=720 [d]=720)
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
  failed=() tied=()
  if command -v setpriv >/dev/null; then tied=(setpriv --pdeathsig TERM); fi
  if [[ " ${slices[*]} " = *" list "* ]]; then
    stage=list
    for slice in "${order[@]}"; do slice_$slice; done
    exit
  fi
  for slice in "${slices[@]}"; do
    if [ -z "${seconds[$slice]:-}" ]; then echo "error: $slice: no such slice. They are ${order[*]}" >&2 && exit 2; fi
  done
  local word listed
  listed=$(stage=list out=/dev/null && for slice in "${slices[@]}"; do slice_$slice; done) # with what has succeeded
  for word in ${ONLY:-}; do
    if ! grep -q "^. $word:" <<<"$listed"; then echo "error: ONLY: ${slices[*]} measure no $word" >&2 && exit 2; fi
  done
  for word in ${STAGES:-}; do
    if [[ $word != times && $word != check ]]; then echo "error: STAGES: $word is neither times nor check" >&2 && exit 2; fi
  done
  unpack || exit
  export PEERS_DIR=${PEERS_DIR:-peers}
  if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU answers to $python: nothing here would be measured" >&2
    exit 2
  fi
  for slice in "${slices[@]}"; do
    mkdir -p "$out/$slice"
    log=$out/$slice/log.txt
    until=$((SECONDS + (${LIMIT:-9999} < seconds[$slice] ? LIMIT : seconds[$slice]) * patience))
    for stage in ${STAGES:-times check}; do slice_$slice; done
  done
  if [ ${#failed[@]} -gt 0 ]; then
    echo "failed, or not ended: ${failed[*]}; the logs are in $out"
    exit 1
  fi
}

main "$@"; exit
