#!/usr/bin/env bash
# The paper's figures: their data and PNG in results/figures; results/figures/README.md says what they show. Curves over c
# and reinforcement are drawn from committed records. Made here: a look into thoughts (retrieval), and the toy in
# four sizes, its records in results/toy/sizes. Everything else is left in runs/figures (or the folder given). Stopped
# and run again, it resumes.
#
#   bash lab/reproduce/figures.sh [--smoke] [FOLDER]   --smoke: a few updates of each; to see that all of it works
#   SEEDS="0 1 2" PROCS=2                          training seeds, commands at a time (one thread each)
#   ONLY=thoughts                                  thoughts or sizes: one of the two parts
#   SIZES="0.1m 6m"                                some of the sizes
set -euo pipefail
cd "$(dirname "$0")/../.."
seeds=(${SEEDS:-0 1 2}) out=runs/figures arena=${ARENA:-runs/arena} results=${RESULTS:-results/figures}
sizes=(${SIZES:-0.1m 0.4m 1.8m 6m}) less=() questions=500 problems=100
if [[ ${1:-} == --smoke ]]; then
  shift
  seeds=(${SEEDS:-0}) out=runs/figures-smoke results=${RESULTS:-runs/figures-smoke/results}
  less=(--data.train_size 32 --data.train_skip 0 --data.validation_size 4 --training.max_steps 2)
  questions=8 problems=4
fi
out=${1:-$out}
source lab/reproduce/jobs.sh
short=(--max_latents 64 --max_completion_length 8)

train() { # FOLDER RECIPE SEED OVERRIDE...
  add "$1" colar train "lab/recipes/$2.yaml" --output "$out/$1" --training.seed "$3" "${@:4}" ${less[@]+"${less[@]}"}
}

cot_of() { # SEED: CoT weights of table1.sh, or those made here
  if [[ -e $arena/seed$1/cot-init.done ]]; then echo "$arena/seed$1/cot-init/best"; else echo "$out/seed$1/cot-init/best"; fi
}

# Thoughts of the toy of table1.sh (the paper's head, c from 1 to 5) and of the SmolLM2 that comes with this repository.
thoughts() {
  local seed toys=() problem=$out/thoughts/problem data=(--options 'arithmetic.steps=[2,4]')
  for seed in "${seeds[@]}"; do
    if [[ ! -e $arena/seed$seed/cot-init.done ]]; then train "seed$seed/cot-init" arena/cot-init "$seed"; fi
  done
  run_all "training CoT"
  for seed in "${seeds[@]}"; do
    train "seed$seed/colar" arena/colar "$seed" --model.init_from "$(cot_of "$seed")"
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
      train "$size/seed$seed/cot-init" arena/cot-init "$seed" --model.backbone "$out/backbones/$size-$seed" \
        --data.train_size "$first" --training.learning_rate "${rate[$size]}"
    done
    run_all "training CoT of seed $seed"
    for size in "${sizes[@]}"; do
      at=$size/seed$seed
      local second=(--model.init_from "$out/$at/cot-init/best" --data.train_skip "$first" --data.train_size "$more")
      train "$at/cot" arena/cot "$seed" "${second[@]}" --training.learning_rate "${rate[$size]}"
      train "$at/colar" arena/colar "$seed" "${second[@]}" --training.learning_rate "${rate[$size]}" \
        --training.modules_learning_rate "${head_rate[$size]}"
    done
    run_all "training CoT and CoLaR of seed $seed"
    for size in "${sizes[@]}"; do
      at=$out/$size/seed$seed
      add "eval/$size-seed$seed" colar evaluate "$size=$at/cot/best" "$size=$at/colar/best" --compression_factor 1 2 5 \
        --options 'arithmetic.steps=[2,4]' --limit "$questions" "${short[@]}" --batch_size 250 \
        --output "$out/eval/$size-seed$seed"
      answered+=("$out/eval/$size-seed$seed")
    done
    run_all "answering the test questions of seed $seed"
  done
  # Each size beside the one below it.
  local i c pairs=()
  for ((i = 1; i < ${#sizes[@]}; i++)); do
    for c in 1 2 5; do pairs+=(--pair "${sizes[i]} colar c=$c" "${sizes[i - 1]} colar c=$c"); done
  done
  colar report "${answered[@]}" ${pairs[@]+"${pairs[@]}"} --title "The toy in four sizes" --output "$table" >/dev/null
  cat "${answered[@]/%//records.jsonl}" | gzip -9n >"$table/records.jsonl.gz"
}

for part in ${ONLY:-thoughts sizes}; do
  "$part"
  python lab/scripts/figures.py --runs "$out" --output "$results"
done
