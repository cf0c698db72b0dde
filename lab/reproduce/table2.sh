#!/usr/bin/env bash
# The paper's Table 2 at the tiny scale: CoT, CoLaR with a deterministic head (DL) and with an NLL-trained Gaussian, and the
# sequential method, all reinforced; the average left out (dr_grpo); and the control that RL has to beat: SFT continued for
# the same wall-clock. Greedy and sampled, on test problems that none has seen.
#
#   bash lab/reproduce/table2.sh [FOLDER]        runs/table2; stopped and run again, it resumes
#   SEEDS="0 1 2" PROCS=2 LIMIT=1000         training seeds, commands at a time (one thread each), test questions
#   EXTRA="--training.max_steps 3"           more overrides, of every training: to see whether it all runs
#
# Ends with results/toy/grpo (RESULTS): the report, the paired differences, and reward and length over the seeds. The
# committed answers were made in two runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/table2}
results=${RESULTS:-results/toy/grpo}
read -ra seeds <<<"${SEEDS:-0 1 2}"
limit=${LIMIT:-1000}
read -ra extra <<<"${EXTRA:-}"
tests=()
source lab/reproduce/jobs.sh

train() { # NAME-SEED RECIPE [OVERRIDES...]: queues a training of lab/recipes/tiny/RECIPE.yaml
  local name=$1 recipe=$2
  shift 2
  add "$name" colar train "lab/recipes/tiny/$recipe.yaml" --output "$out/$name" --training.seed "${name##*-}" "$@" ${extra[@]+"${extra[@]}"}
}

alone() { # NAME-SEED FROM LABEL [OVERRIDES...]: 20 updates with stops and tokens fixed, so that thoughts alone explore
  train "$1" grpo --model.init_from "$out/$2-${1##*-}/best" --label "$3" \
    --grpo.temperature 0.0001 --grpo.dynamic_sampling 0 --training.max_steps 20 --training.logging_steps 1 "${@:4}"
}

answer() { # NAME...: queues the test questions for these models of all seeds; cot has no c
  local s name method asked
  for s in "${seeds[@]}"; do
    for name in "$@"; do
      method=colar asked=(--compression_factor 2)
      if [[ $name == cot ]]; then method=cot asked=(); fi
      if [[ $name == seq* ]]; then method=sequential; fi
      add "test/$name-$s" colar evaluate "$method=$out/$name-$s/best" --data arithmetic --limit "$limit" \
        ${asked[@]+"${asked[@]}"} --decoding greedy sampled --seeds 0 1 2 \
        --max_latents 96 --max_completion_length 8 --batch_size 128 --output "$out/test/$name-$s"
      tests+=("$out/test/$name-$s")
    done
  done
}

# The same recipe once more on other rows, for as many updates as SFT would have made in the seconds that RL took. As
# with RL, the best of 16 validations is tested. (In the published runs the first of them came before any update.)
continued() {  # SEED
  local steps
  steps=$(python lab/scripts/updates_in.py "$out/nll-$1" --as-long-as "$out/rl-$1")
  train "continued-$1" colar-nll --model.init_from "$out/nll-$1/best" --label "SFT continued" --data.seed 3 \
    --data.train_size $((steps * 16)) --training.max_steps "$steps" \
    --training.eval_steps 0.0625 --training.load_best_model_at_end true
}

for s in "${seeds[@]}"; do train "cot-$s" cot-overruns; done
run_all "training CoT"
for s in "${seeds[@]}"; do
  train "nll-$s" colar-nll --model.init_from "$out/cot-$s/best"
  train "dl-$s" colar-nll --model.init_from "$out/cot-$s/best" --label DL \
    --method.head deterministic --method.latent_loss soft_mse \
    --method.nll_beta 0 --method.latent_weight 1
  train "seq-$s" sequential-overruns --model.init_from "$out/cot-$s/best"
done
run_all "fine-tuning three heads"
for s in "${seeds[@]}"; do
  train "rl-$s" grpo --model.init_from "$out/nll-$s/best" --label RL
  train "dr-$s" grpo --model.init_from "$out/nll-$s/best" --label "RL w/o average" --grpo.loss_type dr_grpo
  train "dlrl-$s" grpo --model.init_from "$out/dl-$s/best" --label "DL, RL"
  train "seqrl-$s" grpo --method.name sequential --model.init_from "$out/seq-$s/best"
  for head in nll dl; do alone "frozen-$head-$s" "$head" "latents alone"; done
  alone "frozen-seq-$s" seq "thoughts alone" --method.name sequential
  alone "frozen-warm-$s" seq "thoughts alone at 1.5" --method.name sequential --grpo.latent_temperature 1.5
done
run_all "reinforcing"
for s in "${seeds[@]}"; do continued "$s"; done
run_all "continuing SFT for as long"

answer cot nll dl seq rl dr dlrl seqrl continued
run_all "answering the test questions"
colar report "${tests[@]}" --output "$results" --title "Table 2, tiny"
python lab/scripts/grpo_report.py "$out" --seeds "${seeds[@]}" --output "$results"
cat "${tests[@]/%//records.jsonl}" | gzip -9n >"$results/records.jsonl.gz"
echo "table        $results/report.md"
echo "differences  $results/differences.md"
echo "curves       $results/curves.png"
