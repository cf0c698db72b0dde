#!/usr/bin/env bash
# What makes reinforcement of latents stable: one change each from tiny/grpo, 60 updates ("long": 150), the
# same start and questions. Takes up the first training seed of table2.sh (its CoT, NLL and DL weights), and trains two
# soft-MSE heads beside it.
#
#   bash lab/reproduce/grpo_stability.sh [--smoke] [FOLDER [TABLE2]]     runs/grpo-stability, runs/table2; it resumes
#   PROCS=2                                                          trainings at a time, a thread each
#
# Ends with results/toy/grpo-stability (RESULTS): a table, the curves, and every logged value. Its runs "sum" and
# "used-4-times-sum" set an option that colar no longer has: the script is at commit c7602ac with them.
set -euo pipefail
cd "$(dirname "$0")/../.."
less=() out=runs/grpo-stability
if [[ ${1:-} == --smoke ]]; then
  shift
  less=(--training.max_steps 2) out=runs/grpo-stability-smoke
fi
out=${1:-$out} from=${2:-runs/table2}
results=${RESULTS:-results/toy/grpo-stability}
source lab/reproduce/jobs.sh
for name in cot-0 nll-0 dl-0; do
  if [[ ! -d $from/$name/best ]]; then
    echo "$from/$name/best is not there: run lab/reproduce/table2.sh first (SEEDS=0 will do)" >&2
    exit 1
  fi
done

soft() { # NAME ALPHA: SFT with a spread that is the same everywhere, sqrt(alpha / 2)
  add "$1" colar train lab/recipes/tiny/colar-nll.yaml --output "$out/$1" --model.init_from "$from/cot-0/best" --label "$1" \
    --method.latent_loss soft_mse --method.nll_beta 0 --method.latent_weight 1 --method.alpha "$2" ${less[@]+"${less[@]}"}
}
soft sft-narrow 0.02
soft sft-wide 0.5
run_all "fine-tuning two soft-MSE heads"

tried=()
try() { # NAME OVERRIDE...
  add "$1" colar train lab/recipes/tiny/grpo.yaml --output "$out/$1" --model.init_from "$from/nll-0/best" --label "$1" \
    --training.max_steps 60 "${@:2}" ${less[@]+"${less[@]}"}
  tried+=("$1")
}
try recipe
try lr-1e-5 --training.learning_rate 1.0e-5
try lr-3e-4 --training.learning_rate 3.0e-4
try lr-1e-3 --training.learning_rate 1.0e-3
try lr-3e-3 --training.learning_rate 3.0e-3
try outputs-32 --training.per_device_train_batch_size 32
try group-4 --grpo.num_generations 4
try no-resampling --grpo.dynamic_sampling 0
try used-4-times --grpo.num_iterations 4
try used-4-times-sequence --grpo.num_iterations 4 --grpo.importance_sampling_level sequence
try kl --grpo.beta 0.04
try dapo --grpo.loss_type dapo
try hot-latents --grpo.latent_temperature 3.0
try soft-mse-narrow --model.init_from "$out/sft-narrow/best"
try soft-mse-wide --model.init_from "$out/sft-wide/best"
# Stops and tokens fixed: what latents explore by themselves, by how wide they are drawn.
alone=(--grpo.temperature 0.0001 --grpo.dynamic_sampling 0)
try latents-alone-nll "${alone[@]}"
try latents-alone-narrow "${alone[@]}" --model.init_from "$out/sft-narrow/best"
try latents-alone-wide "${alone[@]}" --model.init_from "$out/sft-wide/best"
try latents-alone-deterministic "${alone[@]}" --model.init_from "$from/dl-0/best"
# What is lost after the best validation, and what keeps it: as many updates as in table2.sh.
try long-constant --training.max_steps 150
try long-linear --training.max_steps 150 --training.lr_scheduler_type linear
try long-kl --training.max_steps 150 --grpo.beta 0.04
run_all "reinforcing"

python lab/scripts/grpo_stability.py "${tried[@]/#/$out/}" --output "$results"
