#!/usr/bin/env bash
# The paper's Table 1 at the tiny scale: every method of docs/methods.md on the same 70,000 problems, three training seeds,
# then in-domain problems and three shifts, greedy, with controls. About two hours on 2 cores; the page
# is results/toy/README.md. Everything is left in runs/arena (or the folder given). Stopped and run again, it resumes.
#
#   lab/reproduce/table1.sh [--smoke] [OUTPUT]       arena.sh has the options; PROCS=4: another number of commands at a time
set -euo pipefail
cd "$(dirname "$0")/../.."
source lab/reproduce/arena.sh arena "$@"

# The slowest first, so that the cores finish together.
from_nothing=(distill-scratch coconut-scratch no_cot cot-init)
from_cot=(distill sim_cot coconut tokenskip colar colar-dl colar-oc colar-mp colar-nll ruplar cot pause icot)

for name in "${from_nothing[@]}"; do for seed in "${seeds[@]}"; do train "seed$seed/$name" "$name" "$seed"; done; done
run_all "training from the backbone"
for name in "${from_cot[@]}"; do
  for seed in "${seeds[@]}"; do train "seed$seed/$name" "$name" "$seed" --model.init_from "$out/seed$seed/cot-init/best"; done
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

# What is claimed, each by its name in the tables.
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
