#!/usr/bin/env bash
# The core rows of the paper's Table 1 on SmolLM2-135M with an equal small budget: two epochs of 3,000 rows of GSM8k-Aug,
# the CoT weights counted in, and what other thoughts than a method's own come to. Needs `make smollm2`, and the data:
# $COLAR_DATA_DIR, else the Hub. Everything is left in runs/arena-smollm2 (or the folder given). Stopped and run again, it
# resumes.
#
#   reproduce/table1_smollm2.sh [--smoke] [OUTPUT]
#   PROCS=1 ROWS=385000 reproduce/table1_smollm2.sh      one command at a time (2: 6 GB each), all rows: on a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
limit=500 fewer=100 out=runs/arena-smollm2 less=(--data.train_size "${ROWS:-3000}")
if [[ ${1:-} == --smoke ]]; then
  shift
  limit=4 fewer=2 out=runs/arena-smollm2-smoke
  less=(--data.train_size 32 --data.validation_size 2 --training.max_steps 2 --training.compile false)
fi
out=${1:-$out}
export PROCS=${PROCS:-2}
source reproduce/jobs.sh

train() { # NAME OVERRIDE...
  add "$1" colar train "lab/recipes/arena-smollm2/$1.yaml" --output "$out/$1" "${@:2}" "${less[@]}"
}

train cot-init
train no_cot
run_all "training from the backbone"
for name in distill coconut colar cot; do train "$name" --model.init_from "$out/cot-init/best"; done # the slowest first
run_all "training from CoT weights"

answered=()
ask() { # FOLDER NAME OPTION...
  add "eval/$1" colar evaluate "smollm2=$out/$2/best" --data gsm8k-aug gsm-hard svamp multiarith --skip_malformed \
    --dtype bfloat16 --max_completion_length 16 --batch_size 64 "${@:3}" --output "$out/eval/$1"
  answered+=("$out/eval/$1")
}

asked=(--compression_factor 2 5 --snap true)
ask cot cot --limit "$limit" --max_latents 128
ask colar colar --limit "$limit" --max_latents 128 "${asked[@]}"
ask colar-controls colar --limit "$fewer" --max_latents 128 "${asked[@]}" --control zeroed shuffled random
for name in coconut distill; do
  ask "$name" "$name" --limit "$limit" --max_latents 128
  ask "$name-controls" "$name" --limit "$fewer" --max_latents 128 --control zeroed shuffled random
done
ask no_cot no_cot --limit "$limit" --max_latents 128
ask cut cot --limit "$limit" --max_latents 6 --label control-cut-6
run_all "answering the test questions"

pairs=()
for c in 2 5; do
  for name in coconut distill no_cot cot; do pairs+=(--pair "colar c=$c (snap)" "$name"); done
done
for name in coconut distill cot; do pairs+=(--pair "$name" no_cot); done
for name in coconut distill; do pairs+=(--pair "$name" "$name (control-shuffled)"); done
for c in 2 5; do
  pairs+=(--pair "colar c=$c (snap)" "colar c=$c (control-shuffled, snap)" --pair "colar c=$c (snap)" "cot (control-cut-6)")
done
colar report "${answered[@]}" --nearest colar "${pairs[@]}" --title "The arena on SmolLM2-135M" --output "$out/report"
echo
echo "table    $out/report/report.md"
echo "picture  $out/report/accuracy_vs_length.png"
