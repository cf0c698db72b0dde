#!/usr/bin/env bash
# The paper's Table 1 at the tiny scale: every method of docs/methods.md on the same 70,000 problems, three training seeds,
# then in-domain problems and three shifts, greedy, with controls. About two hours on 2 cores; the page
# is results/toy/README.md. Everything is left in runs/arena (or the folder given). Stopped and run again, it resumes.
#
#   lab/reproduce/table1.sh [--smoke] [OUTPUT]       --smoke: two updates of each, 8 questions; to see that all of it works
#   SEEDS="0" PROCS=4 lab/reproduce/table1.sh        other training seeds (0 1 2), another number of commands at a time
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=500 seeds=(${SEEDS:-0 1 2}) out=runs/arena less=()
if [[ ${1:-} == --smoke ]]; then
  shift
  limit=8 seeds=(${SEEDS:-0}) out=runs/arena-smoke
  less=(--data.train_size 32 --data.train_skip 0 --data.validation_size 4 --training.max_steps 2)
fi
out=${1:-$out}
source lab/reproduce/jobs.sh

# Bigger numbers, as GSM-Hard has; shorter problems, as SVAMP; other wording, as MultiArith.
sets=(--data arithmetic arithmetic-hard=arithmetic arithmetic-short=arithmetic arithmetic-worded=arithmetic
  --options 'arithmetic.steps=[2,4]' arithmetic-hard.max_number=20 'arithmetic-short.steps=[2,2]'
  arithmetic-worded.wording=run_on --limit "$limit" --max_completion_length 8 --batch_size 250 --max_latents 64)
# The slowest first, so that the cores finish together.
from_nothing=(distill-scratch coconut-scratch no_cot cot-init)
from_cot=(distill sim_cot coconut tokenskip colar colar-dl colar-oc colar-mp colar-nll ruplar cot pause icot)

train() { # NAME SEED [OVERRIDE...]
  local run=seed$2/$1
  add "$run" colar train "lab/recipes/arena/$1.yaml" --output "$out/$run" --training.seed "$2" "${@:3}" ${less[@]+"${less[@]}"}
}

for name in "${from_nothing[@]}"; do for seed in "${seeds[@]}"; do train "$name" "$seed"; done; done
run_all "training from the backbone"
for name in "${from_cot[@]}"; do
  for seed in "${seeds[@]}"; do train "$name" "$seed" --model.init_from "$out/seed$seed/cot-init/best"; done
done
run_all "training from CoT weights"

answered=()
ask() { # SEED FOLDER "NAME..." OPTION...: questions for some of a seed's models
  local models=() name
  for name in $3; do models+=("tiny=$out/seed$1/$name/best"); done
  add "eval/$2" colar evaluate "${models[@]}" "${sets[@]}" "${@:4}" --output "$out/eval/$2"
  answered+=("$out/eval/$2")
}

for seed in "${seeds[@]}"; do
  ask "$seed" "methods$seed" "cot no_cot icot coconut coconut-scratch sim_cot distill distill-scratch tokenskip pause ruplar colar" \
    --compression_factor 1 2 3 4 5 --ratio 0.5 0.7
  ask "$seed" "ablations$seed" "colar-dl colar-oc colar-mp colar-nll" --compression_factor 2
  ask "$seed" "controls$seed" "coconut sim_cot distill pause ruplar colar" --control shuffled --compression_factor 2 5
  ask "$seed" "controls-scratch$seed" "coconut-scratch distill-scratch" --control shuffled
done
run_all "answering the test questions"

pairs=()
pair() { # SYSTEM BASELINE...: what is claimed, each by its name in the tables
  local system=$1 other
  shift
  for other in "$@"; do pairs+=(--pair "$system" "$other"); done
}
pair distill coconut
pair sim_cot coconut
pair "distill (from scratch)" "coconut (from scratch)" distill
pair "coconut (from scratch)" coconut
pair ruplar "colar c=3" "colar c=5"
pair "colar c=4" coconut "coconut (from scratch)" distill "distill (from scratch)" pause no_cot # 4 to 6 thoughts each
pair "colar c=5" coconut "coconut (from scratch)" distill "distill (from scratch)" pause no_cot
for name in distill "distill (from scratch)" coconut "coconut (from scratch)" sim_cot pause ruplar icot; do pair "$name" no_cot; done
pair "colar c=2" "colar c=2 (MP)" "colar c=2 (OC)" "colar c=2 (DL)" "colar c=2 (NLL)"
for name in coconut sim_cot distill "colar c=5" "colar c=2"; do pair "$name" "$name (control-shuffled)"; done
for name in coconut distill; do pair "$name (from scratch)" "$name (from scratch, control-shuffled)"; done
for name in coconut distill; do pair "$name (control-shuffled)" icot; done # CoT weights and no thoughts at all

colar report "${answered[@]}" "${pairs[@]}" \
  --title "The arena at the tiny scale" --output "$out/report"
echo
echo "table    $out/report/report.md"
echo "picture  $out/report/accuracy_vs_length.png"
