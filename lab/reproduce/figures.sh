#!/usr/bin/env bash
# The paper's figures: their data and PNG in results/figures; results/figures/README.md says what they show. Curves over c
# and reinforcement are drawn from committed records. Made here: a look into thoughts (retrieval), and the toy in
# four sizes, its records in results/toy/sizes. Everything else is left in runs/figures (or the folder given). Stopped
# and run again, it resumes.
#
#   bash lab/reproduce/figures.sh [--smoke] [FOLDER]   arena.sh has the options
#   ONLY=thoughts                                  thoughts or sizes: one of the two parts
#   SIZES="0.1m 6m"                                some of the sizes
set -euo pipefail
cd "$(dirname "$0")/../.."
source lab/reproduce/arena.sh figures "$@"
sizes=(${SIZES:-0.1m 0.4m 1.8m 6m}) short=(--max_latents 64 --max_completion_length 8)
results=${RESULTS:-results/figures} problems=100
if [[ $limit == 8 ]]; then results=${RESULTS:-$out/results} problems=4; fi

# Thoughts of the toy of table1.sh (the paper's head, c from 1 to 5) and of the SmolLM2 that comes with this repository.
thoughts() {
  local seed toys=() problem=$out/thoughts/problem data=(--options 'arithmetic.steps=[2,4]')
  for seed in "${seeds[@]}"; do train_missing cot-init "$seed"; done
  run_all "training CoT"
  for seed in "${seeds[@]}"; do
    train "seed$seed/colar" colar "$seed" --model.init_from "$(trained cot-init "$seed")/best"
    toys+=("seed$seed=$out/seed$seed/colar/best")
  done
  run_all "training CoLaR"

  mkdir -p "$out/thoughts"
  add "thoughts/toy-$(IFS=- && echo "${seeds[*]}")" python lab/scripts/rank_thoughts.py "${toys[@]}" \
    --options '{"steps": [2, 4]}' --compression_factor 2 5 --limit "$problems" "${short[@]}" --output "$out/thoughts/toy.json"
  add thoughts/smollm2 python lab/scripts/rank_thoughts.py smollm2=checkpoints/smollm2-135m-gsm --data gsm8k-aug \
    --skip_malformed --limit $((problems * 3 / 10)) --compression_factor 2 --output "$out/thoughts/smollm2.json"
  # The case study's question is the first of the test split.
  add thoughts/problem colar data prepare arithmetic "${data[@]}" --splits test --limit 1 --output "$problem"
  run_all "measuring what is in thoughts"
  add thoughts/case colar generate "${toys[0]#*=}" --input "$problem/test.jsonl" --compression_factor 2 5 --show_latents \
    "${short[@]}" --output "$out/thoughts/case.jsonl"
  run_all "reading the thoughts of one question"
}

# As in table1.sh: CoT, then CoT or CoLaR from its weights, each row seen once, as many rows for every size.
sizes() {
  declare -A rate=([0.1m]=5.3e-3 [0.4m]=2.7e-3 [1.8m]=1.3e-3 [6m]=0.9e-3) # 2e-3 at tiny's width, by 1 / width
  declare -A head_rate=([0.1m]=16e-3 [0.4m]=8e-3 [1.8m]=4e-3 [6m]=2.7e-3) # three times that, as there
  local seed size at first=16000 more=20000 answered=()
  local table=${results%/*}/toy/sizes # beside the figures' folder
  mkdir -p "$table"
  python lab/scripts/toy_backbones.py --sizes "${sizes[@]}" --seeds "${seeds[@]}" --output "$out/backbones" \
    --parameters "$table/parameters.json" >&2
  for seed in "${seeds[@]}"; do
    for size in "${sizes[@]}"; do
      train "$size/seed$seed/cot-init" cot-init "$seed" --model.backbone "$out/backbones/$size-$seed" \
        --data.train_size "$first" --training.learning_rate "${rate[$size]}"
    done
    run_all "training CoT of seed $seed"
    for size in "${sizes[@]}"; do
      at=$size/seed$seed
      local second=(--model.init_from "$out/$at/cot-init/best" --data.train_skip "$first" --data.train_size "$more")
      train "$at/cot" cot "$seed" "${second[@]}" --training.learning_rate "${rate[$size]}"
      train "$at/colar" colar "$seed" "${second[@]}" --training.learning_rate "${rate[$size]}" \
        --training.modules_learning_rate "${head_rate[$size]}"
    done
    run_all "training CoT and CoLaR of seed $seed"
    for size in "${sizes[@]}"; do
      at=$out/$size/seed$seed
      add "eval/$size-seed$seed" colar evaluate "$size=$at/cot/best" "$size=$at/colar/best" --compression_factor 1 2 5 \
        --options 'arithmetic.steps=[2,4]' --limit "$limit" "${short[@]}" --batch_size 250 \
        --output "$out/eval/$size-seed$seed"
      answered+=("$out/eval/$size-seed$seed")
    done
    run_all "answering the test questions of seed $seed"
  done
  # Each size beside the one below it.
  local i c
  for ((i = 1; i < ${#sizes[@]}; i++)); do
    for c in 1 2 5; do pair "${sizes[i]} colar c=$c" "${sizes[i - 1]} colar c=$c"; done
  done
  colar report "${answered[@]}" ${pairs[@]+"${pairs[@]}"} --title "The toy in four sizes" --output "$table" >/dev/null
  cat "${answered[@]/%//records.jsonl}" | gzip -9n >"$table/records.jsonl.gz"
}

for part in ${ONLY:-thoughts sizes}; do
  "$part"
  python lab/scripts/figures.py --runs "$out" --output "$results"
done
