#!/usr/bin/env bash
# Table 2 at the tiny scale with one more system under the same reinforcement: the sequential method. The teacher, rows,
# updates, rewards and test questions are those of lab/reproduce/table2.sh, whose committed answers stand beside the new ones
# (COMMITTED: results/toy/grpo/records.jsonl.gz).
#
#   bash lab/reproduce/table2_sequential.sh [FOLDER]   runs/table2-sequential; stopped and run again, it resumes
#   SEEDS="0 1 2" PROCS=2 LIMIT=1000               training seeds, commands at a time (one thread each), test questions
#   EXTRA="--training.max_steps 3"                 more overrides, of every training: to see whether it all runs
#
# Ends with results/toy/grpo-sequential (RESULTS): the report, the paired differences, and reward and length over the seeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/table2-sequential}
results=${RESULTS:-results/toy/grpo-sequential}
committed=${COMMITTED:-results/toy/grpo/records.jsonl.gz}
source lab/reproduce/reinforce.sh

for s in "${seeds[@]}"; do train "cot-$s" cot-overruns; done
run_all "training CoT"
for s in "${seeds[@]}"; do
  train "seq-$s" sequential-overruns --model.init_from "$out/cot-$s/best"
done
run_all "fine-tuning the sequential method"
for s in "${seeds[@]}"; do
  train "seqrl-$s" grpo --method.name sequential --model.init_from "$out/seq-$s/best"
  alone "frozen-seq-$s" seq "thoughts alone" --method.name sequential
  alone "frozen-warm-$s" seq "thoughts alone at 1.5" --method.name sequential --grpo.latent_temperature 1.5
done
run_all "reinforcing"

answer seq seqrl
run_all "answering the test questions"
write_results "Table 2, tiny, with the sequential method"
