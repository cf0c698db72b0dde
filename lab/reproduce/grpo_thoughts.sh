#!/usr/bin/env bash
# A task that needs other thoughts, not only another stop: on three in four problems with a loss the teacher adds it
# (`slips`). Which methods does reinforcement lead to the right chains, and does it take drawn thoughts?
# colar no longer has this option of `arithmetic`: commit c901c920 runs this script.
#
#   bash lab/reproduce/grpo_thoughts.sh [FOLDER]   runs/thoughts; stopped and run again, it resumes
#   SEEDS="0 1 2" PROCS=2 LIMIT=1000           training seeds, commands at a time (one thread each), test questions
#   UPDATES=60                                 of reinforcement
#   EXTRA="--training.max_steps 3"             more overrides, of every training: to see whether it all runs
#
# Ends with results/toy/grpo-thoughts (RESULTS): the report, the paired differences, and reward and length over the seeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/thoughts}
results=${RESULTS:-results/toy/grpo-thoughts}
updates=${UPDATES:-60}
errs='{"slips": 0.75}'
source lab/reproduce/reinforce.sh

reinforce() {  # NAME-SEED FROM LABEL [OVERRIDES...]
  local name=$1 from=$2 label=$3 recipe=grpo
  shift 3
  if [[ $from == cot ]]; then recipe=grpo-cot; fi
  if [[ $from == seq ]]; then set -- --method.name sequential "$@"; fi
  train "$name" "$recipe" --model.init_from "$out/$from-${name##*-}/best" --label "$label" \
    --training.max_steps "$updates" "$@"
}

for s in "${seeds[@]}"; do train "cot-$s" cot-overruns --data.options "$errs"; done
run_all "training CoT"
for s in "${seeds[@]}"; do
  train "seq-$s" sequential-overruns --model.init_from "$out/cot-$s/best" --data.options "$errs"
  train "nll-$s" colar-nll --model.init_from "$out/cot-$s/best" --data.options "$errs"
done
run_all "fine-tuning two methods"
for s in "${seeds[@]}"; do
  reinforce "seqrl-$s" seq RL
  reinforce "seqfixed-$s" seq "RL, thoughts fixed" --grpo.latent_temperature 0
  reinforce "seqalone-$s" seq "RL, thoughts alone" --grpo.temperature 0.0001
  reinforce "rl-$s" nll RL
  reinforce "cotrl-$s" cot RL
  alone "frozen-nll-$s" nll "thoughts alone"
  alone "frozen-seq-$s" seq "thoughts alone" --method.name sequential
done
run_all "reinforcing"

answer cot cotrl seq seqrl seqfixed seqalone nll rl
run_all "answering the test questions"
write_results "Other thoughts"
