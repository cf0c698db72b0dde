#!/usr/bin/env bash
# Where each digit is a token: what c counts, and whether "=" is a thought of its own (docs/method.md). Four ways to group a
# chain, trained on the same rows from the same CoT weights, beside CoT trained on for as many. Everything is left in
# runs/units (or the folder given). Stopped and run again, it resumes. 50 minutes on 2 cores.
#
#   lab/reproduce/units.sh [--smoke] [OUTPUT]     SEEDS and PROCS as in table1.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=1000 seeds=(${SEEDS:-0 1 2}) out=runs/units less=()
if [[ ${1:-} == --smoke ]]; then
  shift
  limit=8 seeds=(${SEEDS:-0}) out=runs/units-smoke
  less=(--data.train_size 32 --data.validation_size 4 --training.max_steps 2)
fi
out=${1:-$out}
source lab/reproduce/jobs.sh

train() { # SEED NAME RECIPE OPTION...
  add "seed$1/$2" colar train "lab/recipes/tiny/$3.yaml" --output "$out/seed$1/$2" --training.seed "$1" "${@:4}" ${less[@]+"${less[@]}"}
}

for seed in "${seeds[@]}"; do train "$seed" cot-init cot-digits; done
run_all "training CoT"
for seed in "${seeds[@]}"; do
  start=(--model.init_from "$out/seed$seed/cot-init/best")
  # As many rows, in the same updates, as the others have.
  train "$seed" cot cot-digits "${start[@]}" --data.train_size 60000 --data.seed 2 \
    --training.per_device_train_batch_size 16 --training.warmup_steps 100
  train "$seed" both sequential-digits "${start[@]}" --label "numbers, = alone"
  train "$seed" numbers sequential-digits "${start[@]}" --label numbers --method.alone "[]"
  train "$seed" alone sequential-digits "${start[@]}" --label "tokens, = alone" --method.unit token
  train "$seed" tokens sequential-digits "${start[@]}" --label tokens --method.unit token --method.alone "[]"
done
run_all "training from CoT weights"

answered=()
ask() { # NAME MODEL=PATH... OPTION...
  add "eval/$1" colar evaluate "${@:2}" --data arithmetic --options 'arithmetic.steps=[2,4]' arithmetic.max_number=12 \
    arithmetic.max_value=99 --limit "$limit" --max_latents 96 --max_completion_length 8 --batch_size 256 \
    --output "$out/eval/$1"
  answered+=("$out/eval/$1")
}
for seed in "${seeds[@]}"; do
  models=()
  for name in tokens alone numbers both; do models+=("tiny-digits=$out/seed$seed/$name/best"); done
  ask "cot$seed" "tiny-digits=$out/seed$seed/cot/best"
  ask "colar$seed" "${models[@]}" --compression_factor 1 2 3
done
run_all "answering the test questions"

pairs=()
for c in 1 2 3; do
  pairs+=(--pair "colar c=$c (numbers, = alone)" cot)
  for other in tokens "tokens, = alone" numbers; do
    pairs+=(--pair "colar c=$c (numbers, = alone)" "colar c=$c ($other)")
  done
done
colar report "${answered[@]}" "${pairs[@]}" --title "What c counts, where each digit is a token" --output "$out/report"
echo
echo "table     $out/report/report.md"
echo "picture   $out/report/accuracy_vs_length.png"
