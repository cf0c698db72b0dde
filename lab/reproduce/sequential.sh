#!/usr/bin/env bash
# The sequential method at the tiny scale, beside CoT and CoLaR: the rows, updates, test sets and seeds of
# table1.sh. Three ways to train it: whole c from 1 to 5; others between them too; groups that the model's own confidence
# ends. A narrower range of c, up to 3, says what a wide one costs. The committed "any c" drew real numbers of a range
# (commit c901c920), of which lists stand here. CoT weights and CoT are taken from runs/arena
# (ARENA) where table1.sh has trained them, CoLaR from the committed records of results/toy/arena. Everything
# is left in runs/sequential (or the folder given). Stopped and run again, it resumes.
#
#   lab/reproduce/sequential.sh [--smoke] [OUTPUT]     SEEDS and PROCS as in table1.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=500 seeds=(${SEEDS:-0 1 2}) out=runs/sequential arena=${ARENA:-runs/arena} less=()
if [[ ${1:-} == --smoke ]]; then
  shift
  limit=8 seeds=(${SEEDS:-0}) out=runs/sequential-smoke arena=${ARENA:-runs/arena-smoke}
  less=(--data.train_size 32 --data.train_skip 0 --data.validation_size 4 --training.max_steps 2)
fi
out=${1:-$out}
source lab/reproduce/jobs.sh

sets=(--data arithmetic arithmetic-hard=arithmetic arithmetic-short=arithmetic arithmetic-worded=arithmetic
  --options 'arithmetic.steps=[2,4]' arithmetic-hard.max_number=20 'arithmetic-short.steps=[2,2]'
  arithmetic-worded.wording=run_on --limit "$limit" --max_completion_length 8 --batch_size 250 --max_latents 64)
ends="[0, 0, 0.7, 0.95]"

trained() { # SEED NAME: where that model of table1.sh is, or will be
  if [[ -e $arena/seed$1/$2.done ]]; then echo "$arena/seed$1/$2"; else echo "$out/seed$1/$2"; fi
}

train() { # SEED NAME RECIPE OPTION...
  add "seed$1/$2" colar train "lab/recipes/arena/$3.yaml" --output "$out/seed$1/$2" --training.seed "$1" "${@:4}" ${less[@]+"${less[@]}"}
}

for seed in "${seeds[@]}"; do
  if [[ $(trained "$seed" cot-init) == "$out"/* ]]; then train "$seed" cot-init cot-init; fi
done
run_all "training CoT"
for seed in "${seeds[@]}"; do
  start=(--model.init_from "$(trained "$seed" cot-init)/best")
  if [[ $(trained "$seed" cot) == "$out"/* ]]; then train "$seed" cot cot "${start[@]}"; fi
  train "$seed" drawn sequential "${start[@]}"
  train "$seed" any sequential "${start[@]}" --label "any c" \
    --method.compression_factors "[1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5]"
  train "$seed" gated sequential "${start[@]}" --label "gated" --method.confidence_thresholds "$ends"
  train "$seed" gated3 sequential "${start[@]}" --label "gated, c to 3" \
    --method.confidence_thresholds "$ends" --method.compression_factors "[1, 1, 2, 2, 2, 3, 3]" \
    --validation.params "[{compression_factor: 1}, {compression_factor: 2}, {compression_factor: 3}]"
  train "$seed" half sequential "${start[@]}" --label "gated, with 1.5" \
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
  ask "$seed" drawn "tiny=$(trained "$seed" cot)/best" "tiny=$at/drawn/best" -- \
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
pairs=()
pair() { pairs+=(--pair "$1" "$2"); } # SYSTEM BASELINE, each by its name in the tables
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
