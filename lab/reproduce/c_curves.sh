#!/usr/bin/env bash
# The paper's two curve figures at the tiny scale: CoLaR trained with a random c against one model for each c, of as many
# rows and of a fifth of them, which is what a random c has of each; and trained with c in {1, 3, 5, 7} and asked for
# 2, 4 and 6 as well. Recipes and CoT weights are those of table1.sh. Everything is left in runs/c-curves (or the folder
# given). Stopped and run again, it resumes.
#
#   lab/reproduce/c_curves.sh [--smoke] [OUTPUT]     arena.sh has the options
set -euo pipefail
cd "$(dirname "$0")/../.."
source lab/reproduce/arena.sh c-curves "$@"

of_factors() { # NAME SEED LABEL FACTORS ASKED OPTION...
  train "seed$2/$1" colar "$2" --label "$3" --method.compression_factors "$4" --validation.params "$5" \
    --model.init_from "$(trained cot-init "$2")/best" "${@:6}"
}

for seed in "${seeds[@]}"; do train_missing cot-init "$seed"; done
run_all "training CoT"
for seed in "${seeds[@]}"; do
  of_factors random "$seed" "" "[1, 2, 3, 4, 5]" "[{compression_factor: 1}, {compression_factor: 5}]"
  of_factors odd "$seed" "c in 1 3 5 7" "[1, 3, 5, 7]" "[{compression_factor: 1}, {compression_factor: 7}]"
  for c in 1 2 3 4 5; do
    of_factors "only$c" "$seed" "one c" "[$c]" "[{compression_factor: $c}]"
    of_factors "fifth$c" "$seed" "one c, a fifth" "[$c]" "[{compression_factor: $c}]" --data.train_size 8800
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
for c in 1 2 3 4 5; do pair "tiny c=$c" "tiny c=$c (one c)" "tiny c=$c (one c, a fifth)"; done  # against that c alone
for c in 2 4; do pair "tiny c=$c (c in 1 3 5 7)" "tiny c=$c"; done  # left out, against drawn
for c in 2 4 6; do  # left out, against its neighbours
  pair "tiny c=$c (c in 1 3 5 7)" "tiny c=$((c - 1)) (c in 1 3 5 7)" "tiny c=$((c + 1)) (c in 1 3 5 7)"
done
colar report "${answered[@]}" "${pairs[@]}" --title "Compression factors: random, one, left out" --output "$out/report"
python lab/scripts/left_out.py "${odd[@]}" --trained 1 3 5 7 --output "$out/report" >/dev/null
echo
echo "table    $out/report/report.md"
echo "lengths  $out/report/lengths.md"
echo "picture  $out/report/accuracy_vs_length.png"
