#!/usr/bin/env bash
# ProsQA and ProntoQA, small: SmolLM2-135M learns from generated rows that grow from stage to stage, first in words, then in
# compressed latents, and is asked the first 200 published test questions of each. results/smollm2-135m-logic has such a
# run. Three to four hours on one core each with AVX2; two processes at a time where there are two.
# Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub. Everything is left in runs/logic-smollm2 (or $1).
# Stopped and run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/logic-smollm2}
common=(--limit 200 --dtype float32 --max_latents 160 --max_completion_length 16 --batch_size 32 --compile)

stages() { # NAME...: each starts from the one before it
  local before=()
  for name in "$@"; do
    colar train "logic-smollm2/$name" --output "$out/$name" ${before[@]+"${before[@]}"}
    before=(--model.init_from "$out/$name/best")
  done
}
stages small-prosqa-1 small-prosqa-2 small-prosqa-cot small-prosqa-colar-1 small-prosqa-colar
stages small-prosqa-no_cot
stages small-prontoqa-1 small-prontoqa-cot small-prontoqa-colar
stages small-prontoqa-no_cot

for set in prosqa prontoqa; do
  colar evaluate cot="$out/small-$set-cot/best" no_cot="$out/small-$set-no_cot/best" --data $set "${common[@]}" \
    --output "$out/report-$set"
  colar evaluate smollm2-135m="$out/small-$set-colar/best" --data $set --compression_factor 1 2 5 "${common[@]}" \
    --output "$out/report-$set-colar"
  colar evaluate smollm2-135m="$out/small-$set-colar/best" --data $set --compression_factor 5 \
    --confidence_threshold 0.5 0.8 0.95 "${common[@]}" --output "$out/report-$set-gated"
done
colar report "$out"/report-{prosqa,prosqa-colar,prosqa-gated,prontoqa,prontoqa-colar,prontoqa-gated} --output "$out/report"
