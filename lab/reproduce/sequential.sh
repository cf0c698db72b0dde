#!/usr/bin/env bash
# The sequential method at the tiny scale, beside CoT and CoLaR: the rows, updates, test sets and seeds of
# table1.sh. Three ways to train it: whole c from 1 to 5; others between them too; groups that the model's own confidence
# ends. A narrower range of c, up to 3, says what a wide one costs. The committed "any c" drew real numbers of a range
# (commit c901c920), of which lists stand here. CoT weights and CoT are taken from runs/arena
# (ARENA) where table1.sh has trained them, CoLaR from the committed records of results/toy/arena. Everything
# is left in runs/sequential (or the folder given). Stopped and run again, it resumes.
#
#   lab/reproduce/sequential.sh [--smoke] [OUTPUT]     arena.sh has the options
set -euo pipefail
cd "$(dirname "$0")/../.."
source lab/reproduce/arena.sh sequential "$@"
ends="[0, 0, 0.7, 0.95]"

for seed in "${seeds[@]}"; do train_missing cot-init "$seed"; done
run_all "training CoT"
for seed in "${seeds[@]}"; do
  start=(--model.init_from "$(trained cot-init "$seed")/best")
  train_missing cot "$seed" "${start[@]}"
  train "seed$seed/drawn" sequential "$seed" "${start[@]}"
  train "seed$seed/any" sequential "$seed" "${start[@]}" --label "any c" \
    --method.compression_factors "[1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5]"
  train "seed$seed/gated" sequential "$seed" "${start[@]}" --label "gated" --method.confidence_thresholds "$ends"
  train "seed$seed/gated3" sequential "$seed" "${start[@]}" --label "gated, c to 3" \
    --method.confidence_thresholds "$ends" --method.compression_factors "[1, 1, 2, 2, 2, 3, 3]" \
    --validation.params "[{compression_factor: 1}, {compression_factor: 2}, {compression_factor: 3}]"
  train "seed$seed/half" sequential "$seed" "${start[@]}" --label "gated, with 1.5" \
    --method.confidence_thresholds "$ends" --method.compression_factors "[1, 1, 1.5, 1.5, 2, 2, 3]" \
    --validation.params "[{compression_factor: 1}, {compression_factor: 1.5}, {compression_factor: 2}]"
done
run_all "training from CoT weights"

answered=() gated=()
ask() { # SEED FOLDER MODEL=PATH... -- OPTION...
  local seed=$1 folder=$2 models=()
  shift 2
  while [[ $1 != -- ]]; do models+=("$1"); shift; done
  shift
  add "eval/$folder$seed" colar evaluate "${models[@]}" "${sets[@]}" "$@" --output "$out/eval/$folder$seed"
  if [[ $folder == *gated* ]]; then gated+=("$out/eval/$folder$seed"); else answered+=("$out/eval/$folder$seed"); fi
}

for seed in "${seeds[@]}"; do
  at=$out/seed$seed
  ask "$seed" drawn "tiny=$(trained cot "$seed")/best" "tiny=$at/drawn/best" -- \
    --compression_factor 1 2 3 4 5
  ask "$seed" left-out "tiny=$at/drawn/best" -- --compression_factor 1.5 2.5 3.5 4.5 --label "left out"
  ask "$seed" any "tiny=$at/any/best" -- --compression_factor 1 1.5 2 2.5 3 3.5 4 4.5 5
  ask "$seed" gated3- "tiny=$at/gated3/best" -- --compression_factor 2 3 --confidence_threshold 0 0.7
  ask "$seed" half-gated "tiny=$at/half/best" -- --compression_factor 1.5 2 3 --confidence_threshold 0 0.7
  ask "$seed" gated "tiny=$at/gated/best" -- --compression_factor 2 3 5 --confidence_threshold 0 0.7
  ask "$seed" ungated "tiny=$at/drawn/best" -- --compression_factor 2 3 5 --confidence_threshold 0.7
done
run_all "answering the test questions"

# CoLaR answered the same questions in table1.sh: its greedy records are committed.
if [[ $limit == 500 ]]; then
  mkdir -p "$out/eval/paper"
  zcat results/toy/arena/records.jsonl.gz | grep '"method": "colar", "label": "", ' | grep '"decoding": "greedy"' \
    >"$out/eval/paper/records.jsonl"
  answered+=("$out/eval/paper")
fi
for c in 1 2 3 4 5; do pair "sequential c=$c" cot; done
if [[ $limit == 500 ]]; then
  for c in 1 2 3 4 5; do pair "sequential c=$c" "colar c=$c"; done # the paper's method
fi
for c in 1 1.5 2 2.5 3; do pair "sequential c=$c (any c)" cot; done
for c in 1.5 2.5 3.5 4.5; do pair "sequential c=$c (left out)" "sequential c=$c (any c)"; done
colar report "${answered[@]}" "${pairs[@]}" \
  --title "The sequential method at the tiny scale" --output "$out/report"

# CoT's and the ungated model's answers stand beside those of the gates.
pairs=()
for c in 2 3 5; do
  pair "sequential c=$c (gated)" "sequential c=$c" # what its training costs
  pair "sequential c=$c (gated, confidence_threshold=0.7)" cot
done
for c in 2 3; do
  pair "sequential c=$c (gated, c to 3)" cot
  pair "sequential c=$c (gated, c to 3, confidence_threshold=0.7)" cot
done
for c in 1.5 2 3; do
  pair "sequential c=$c (gated, with 1.5)" cot
  pair "sequential c=$c (gated, with 1.5, confidence_threshold=0.7)" cot
done
mkdir -p "$out/eval/beside"
for seed in "${seeds[@]}"; do grep -h '"decoding": "greedy"' "$out/eval/drawn$seed/records.jsonl" || true; done \
  >"$out/eval/beside/records.jsonl"
colar report "${gated[@]}" "$out/eval/beside" "${pairs[@]}" \
  --title "Speed by confidence at the tiny scale" --output "$out/gates"
echo
echo "tables    $out/report/report.md, $out/gates/report.md"
echo "pictures  $out/report/accuracy_vs_length.png, $out/gates/accuracy_vs_length.png"
