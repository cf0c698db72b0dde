#!/usr/bin/env bash
# Table 2 at the tiny scale with two more systems under the same reinforcement: the sequential head, and CoT. The
# teacher, rows, updates, rewards and test questions are those of reproduce/table2.sh, whose committed answers stand
# beside the new ones (COMMITTED: results/grpo-tiny/records.jsonl.gz).
#
#   bash reproduce/table2_sequential.sh [FOLDER]   runs/table2-sequential; stopped and run again, it resumes
#   SEEDS="0 1 2" PROCS=2 LIMIT=1000               training seeds, commands at a time (one thread each), test questions
#   EXTRA="--training.max_steps 3"                 more overrides, of every training: to see whether it all runs
#
# Ends with results/grpo-sequential (RESULTS): the report, the paired differences, and reward and length over the seeds.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/table2-sequential}
results=${RESULTS:-results/grpo-sequential}
committed=${COMMITTED:-results/grpo-tiny/records.jsonl.gz}
read -ra seeds <<<"${SEEDS:-0 1 2}"
limit=${LIMIT:-1000}
read -ra extra <<<"${EXTRA:-}"
factor=2
source reproduce/jobs.sh

train() {  # NAME-SEED RECIPE [OVERRIDES...]
  local name=$1 recipe=$2
  shift 2
  add "$name" colar train "tiny/$recipe" --output "$out/$name" --training.seed "${name##*-}" "$@" ${extra[@]+"${extra[@]}"}
}

for s in "${seeds[@]}"; do train "cot-$s" cot-overruns; done
run_all "training CoT"
for s in "${seeds[@]}"; do
  train "seq-$s" colar-nll --model.init_from "$out/cot-$s/best" --label sequential \
    --method.head sequential --method.latent_loss soft_mse --method.nll_beta 0 --method.latent_weight 1
done
run_all "fine-tuning the sequential head"
for s in "${seeds[@]}"; do
  train "seqrl-$s" grpo --model.init_from "$out/seq-$s/best" --label "sequential, RL"
  train "cotrl-$s" grpo-cot --model.init_from "$out/cot-$s/best" --label RL
  # Stops and answers fixed: thoughts alone explore.
  train "frozen-seq-$s" grpo --model.init_from "$out/seq-$s/best" --label "sequential, thoughts alone" \
    --grpo.temperature 0.0001 --grpo.dynamic_sampling 0 --training.max_steps 20 --training.logging_steps 1
done
run_all "reinforcing"

tests=()
for s in "${seeds[@]}"; do
  for name in seq seqrl cotrl; do
    method=colar asked=(--compression_factor "$factor")
    if [[ $name == cotrl ]]; then method=cot asked=(); fi
    add "test/$name-$s" colar evaluate "$method=$out/$name-$s/best" --data arithmetic --limit "$limit" \
      ${asked[@]+"${asked[@]}"} --decoding greedy sampled --seeds 0 1 2 \
      --max_latents 96 --max_completion_length 8 --batch_size 128 --output "$out/test/$name-$s"
    tests+=("$out/test/$name-$s")
  done
done
run_all "answering the test questions"

colar report "${tests[@]}" "$committed" --output "$results" --title "Table 2, tiny, with the sequential head"
python scripts/grpo_report.py "$out" --seeds "${seeds[@]}" --committed "$committed" --output "$results"
{ gzip -dc "$committed" && cat "${tests[@]/%//records.jsonl}"; } | gzip -9n >"$results/records.jsonl.gz"
echo "table        $results/report.md"
echo "differences  $results/differences.md"
echo "curves       $results/curves.png"
