#!/usr/bin/env bash
# The paper's two curve figures at the tiny scale: CoLaR trained with a random c against one model for each c, of as many
# rows and of a fifth of them, which is what a random c has of each; and trained with c in {1, 3, 5, 7} and asked for
# 2, 4 and 6 as well. The recipes are those of table1.sh, and so are the CoT
# weights, which are taken from runs/arena (ARENA) where they are. Everything is left in runs/c-curves (or the folder given).
# Stopped and run again, it resumes.
#
#   lab/reproduce/c_curves.sh [--smoke] [OUTPUT]     SEEDS and PROCS as in table1.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=500 seeds=(${SEEDS:-0 1 2}) out=runs/c-curves less=() arena=${ARENA:-runs/arena}
if [[ ${1:-} == --smoke ]]; then
  shift
  limit=8 seeds=(${SEEDS:-0}) out=runs/c-curves-smoke arena=${ARENA:-runs/arena-smoke}
  less=(--data.train_size 32 --data.train_skip 0 --data.validation_size 4 --training.max_steps 2)
fi
out=${1:-$out}
source lab/reproduce/jobs.sh

train() { # NAME SEED LABEL FACTORS ASKED OPTION...
  local run=seed$2/$1
  add "$run" colar train lab/recipes/arena/colar.yaml --output "$out/$run" --training.seed "$2" --label "$3" \
    --method.compression_factors "$4" --validation.params "$5" --model.init_from "$(cot "$2")" "${@:6}" ${less[@]+"${less[@]}"}
}

cot() { # SEED: its CoT weights
  if [[ -e $arena/seed$1/cot-init.done ]]; then echo "$arena/seed$1/cot-init/best"; else echo "$out/seed$1/cot-init/best"; fi
}

for seed in "${seeds[@]}"; do
  if [[ $(cot "$seed") == "$out"/* ]]; then
    add "seed$seed/cot-init" colar train lab/recipes/arena/cot-init.yaml --output "$out/seed$seed/cot-init" \
      --training.seed "$seed" ${less[@]+"${less[@]}"}
  fi
done
run_all "training CoT"
for seed in "${seeds[@]}"; do
  train random "$seed" "" "[1, 2, 3, 4, 5]" "[{compression_factor: 1}, {compression_factor: 5}]"
  train odd "$seed" "c in 1 3 5 7" "[1, 3, 5, 7]" "[{compression_factor: 1}, {compression_factor: 7}]"
  for c in 1 2 3 4 5; do
    train "only$c" "$seed" "one c" "[$c]" "[{compression_factor: $c}]"
    train "fifth$c" "$seed" "one c, a fifth" "[$c]" "[{compression_factor: $c}]" --data.train_size 8800
  done
done
run_all "training CoLaR"

ask() { # NAME SEED FACTOR...
  add "eval/$1-seed$2" colar evaluate "tiny=$out/seed$2/$1/best" --compression_factor "${@:3}" \
    --options 'arithmetic.steps=[2,4]' --limit "$limit" --max_latents 64 --max_completion_length 8 --batch_size 250 \
    --output "$out/eval/$1-seed$2"
}

answered=() odd=()
for seed in "${seeds[@]}"; do
  ask random "$seed" 1 2 3 4 5
  ask odd "$seed" 1 2 3 4 5 6 7
  for c in 1 2 3 4 5; do ask "only$c" "$seed" "$c"; done
  for c in 1 2 3 4 5; do ask "fifth$c" "$seed" "$c"; done
  odd+=("$out/eval/odd-seed$seed/records.jsonl")
  for name in random odd {only,fifth}{1,2,3,4,5}; do answered+=("$out/eval/$name-seed$seed"); done
done
run_all "answering the test questions"
pairs=()
for c in 1 2 3 4 5; do pairs+=(--pair "tiny c=$c" "tiny c=$c (one c)"); done       # a random c against that c alone
for c in 1 2 3 4 5; do pairs+=(--pair "tiny c=$c" "tiny c=$c (one c, a fifth)"); done   # ... as many rows of it
for c in 2 4; do pairs+=(--pair "tiny c=$c (c in 1 3 5 7)" "tiny c=$c"); done      # left out, against drawn
for c in 2 4 6; do                                                                 # left out, against its neighbours
  for near in $((c - 1)) $((c + 1)); do pairs+=(--pair "tiny c=$c (c in 1 3 5 7)" "tiny c=$near (c in 1 3 5 7)"); done
done
colar report "${answered[@]}" "${pairs[@]}" --title "Compression factors: random, one, left out" --output "$out/report"
python lab/scripts/left_out.py "${odd[@]}" --trained 1 3 5 7 --output "$out/report" >/dev/null
echo
echo "table    $out/report/report.md"
echo "lengths  $out/report/lengths.md"
echo "picture  $out/report/accuracy_vs_length.png"
