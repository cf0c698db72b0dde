#!/usr/bin/env bash
# A task that needs other thoughts, not only another stop: on three in four problems with a loss the teacher adds it
# (`slips`). Which heads does reinforcement lead to the right chains, and does it take drawn thoughts?
#
#   bash reproduce/grpo_thoughts.sh [FOLDER]   runs/thoughts; stopped and run again, it resumes
#   SEEDS="0 1 2" PROCS=2 LIMIT=1000           training seeds, commands at a time (one thread each), test questions
#   UPDATES=60                                 of reinforcement
#   EXTRA="--training.max_steps 3"             more overrides, of every training: to see whether it all runs
#
# Ends with results/grpo-thoughts (RESULTS): the report, the paired differences, and reward and length over the seeds.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/thoughts}
results=${RESULTS:-results/grpo-thoughts}
read -ra seeds <<<"${SEEDS:-0 1 2}"
limit=${LIMIT:-1000}
updates=${UPDATES:-60}
read -ra extra <<<"${EXTRA:-}"
factor=2
errs='{"slips": 0.75}'
source reproduce/jobs.sh

train() {  # NAME-SEED RECIPE [OVERRIDES...]
  local name=$1 recipe=$2
  shift 2
  add "$name" colar train "tiny/$recipe" --output "$out/$name" --training.seed "${name##*-}" "$@" ${extra[@]+"${extra[@]}"}
}

reinforce() {  # NAME-SEED FROM LABEL [OVERRIDES...]
  local name=$1 from=$2 label=$3 recipe=grpo
  shift 3
  if [[ $from == cot ]]; then recipe=grpo-cot; fi
  train "$name" "$recipe" --model.init_from "$out/$from-${name##*-}/best" --label "$label" \
    --training.max_steps "$updates" "$@"
}

for s in "${seeds[@]}"; do train "cot-$s" cot --data.options "$errs"; done
run_all "training CoT"
for s in "${seeds[@]}"; do
  train "seq-$s" colar-nll --model.init_from "$out/cot-$s/best" --data.options "$errs" --label sequential \
    --method.head sequential --method.latent_loss soft_mse --method.nll_beta 0 --method.latent_weight 1
  train "nll-$s" colar-nll --model.init_from "$out/cot-$s/best" --data.options "$errs"
done
run_all "fine-tuning two heads"
for s in "${seeds[@]}"; do
  reinforce "seqrl-$s" seq "sequential, RL"
  reinforce "seqfixed-$s" seq "sequential, RL, thoughts fixed" --grpo.latent_temperature 0
  reinforce "seqalone-$s" seq "sequential, RL, thoughts alone" --grpo.temperature 0.0001
  reinforce "rl-$s" nll RL
  reinforce "cotrl-$s" cot RL
  for head in seq nll; do  # how much thoughts alone explore, at the start
    reinforce "frozen-$head-$s" "$head" "thoughts alone" \
      --grpo.temperature 0.0001 --grpo.dynamic_sampling 0 --training.max_steps 20 --training.logging_steps 1
  done
done
run_all "reinforcing"

tests=()
for s in "${seeds[@]}"; do
  for name in cot cotrl seq seqrl seqfixed seqalone nll rl; do
    method=colar asked=(--compression_factor "$factor")
    if [[ $name == cot* ]]; then method=cot asked=(); fi
    add "test/$name-$s" colar evaluate "$method=$out/$name-$s/best" --data arithmetic --limit "$limit" \
      ${asked[@]+"${asked[@]}"} --decoding greedy sampled --seeds 0 1 2 \
      --max_latents 96 --max_completion_length 8 --batch_size 128 --output "$out/test/$name-$s"
    tests+=("$out/test/$name-$s")
  done
done
run_all "answering the test questions"

colar report "${tests[@]}" --output "$results" --title "Other thoughts"
python scripts/grpo_report.py "$out" --seeds "${seeds[@]}" --output "$results"
cat "${tests[@]/%//records.jsonl}" | gzip -9n >"$results/records.jsonl.gz"
echo "table        $results/report.md"
echo "differences  $results/differences.md"
echo "curves       $results/curves.png"
