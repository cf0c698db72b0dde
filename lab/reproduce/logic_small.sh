#!/usr/bin/env bash
# ProsQA and ProntoQA, small: SmolLM2-135M learns from generated rows that grow from stage to stage, first in words, then in
# compressed latents, and is asked 100 published test questions and 100 generated ones of each size.
# results/smollm2/prosqa and results/smollm2/prontoqa have such a run. About two hours each, with evaluation, on a core with AVX2.
# Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub. Everything is left in runs/logic-smollm2 (or $1).
# Stopped and run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/logic-smollm2}
common=(--limit 100 --dtype float32 --max_latents 160 --max_completion_length 16 --batch_size 32 --compile)

stages() { # NAME...: each starts from the one before it
  local before=()
  for name in "$@"; do
    colar train "lab/recipes/logic-smollm2/$name.yaml" --output "$out/$name" ${before[@]+"${before[@]}"}
    before=(--model.init_from "$out/$name/best")
  done
}

control() { # SET DATA-OPTION...: another question's thoughts, on the smallest problems of one task
  local set=$1
  colar evaluate smollm2-135m="$out/small-$set-colar/best" "${@:2}" --compression_factor 5 --control shuffled "${common[@]}" \
    --output "$out/eval-$set-control"
}

answer() { # SET DATA-OPTION...: all systems on the sets of one task
  local set=$1 data=("${@:2}")
  local colar=smollm2-135m="$out/small-$set-colar/best"
  colar evaluate cot="$out/small-$set-cot/best" "${data[@]}" "${common[@]}" --output "$out/eval-$set-cot"
  colar evaluate "$colar" "${data[@]}" --compression_factor 1 2 5 "${common[@]}" --output "$out/eval-$set-colar"
  colar evaluate "$colar" "${data[@]}" --compression_factor 5 --confidence_threshold 0.8 "${common[@]}" --output "$out/eval-$set-gated"
  colar evaluate no_cot="$out/small-$set-no_cot/best" "${data[@]}" "${common[@]}" --output "$out/eval-$set-no_cot"
  local one="smollm2-135m c=1" gated="smollm2-135m c=5 (confidence_threshold=0.8)"
  local two="smollm2-135m c=2" five="smollm2-135m c=5"
  colar report "$out/eval-$set"-{cot,colar,gated,no_cot,control} --pair "$two" "$one" --pair "$five" "$one" \
    --pair "$gated" "$one" --pair "$one" cot --pair "$five" no_cot --pair "$one" no_cot --pair "$gated" no_cot \
    --output "$out/report-$set"
}

stages small-prosqa-1 small-prosqa-2 small-prosqa-cot small-prosqa-colar-1 small-prosqa-colar
stages small-prosqa-no_cot
control prosqa --data prosqa-12=prosqa-made --options prosqa-12.nodes=12 'prosqa-12.hops=[2,3]'
answer prosqa --data prosqa prosqa-12=prosqa-made prosqa-16=prosqa-made \
  --options prosqa-12.nodes=12 'prosqa-12.hops=[2,3]' prosqa-16.nodes=16 'prosqa-16.hops=[2,4]'

stages small-prontoqa-1 small-prontoqa-cot small-prontoqa-colar
stages small-prontoqa-no_cot
control prontoqa --data prontoqa-1=prontoqa-made --options prontoqa-1.hops=1
answer prontoqa --data prontoqa prontoqa-1=prontoqa-made prontoqa-3=prontoqa-made prontoqa-5=prontoqa-made \
  --options prontoqa-1.hops=1 prontoqa-3.hops=3 prontoqa-5.hops=5
