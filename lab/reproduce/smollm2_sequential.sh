#!/usr/bin/env bash
# SmolLM2-135M on real grade-school mathematics with the sequential method: CoT-SFT on more rows than there are, SFT from
# its weights in two stages and a third for c = 3 and 5, CoT once more from the first of them as the baseline and
# for longer, reinforcement of both (of CoLaR in three stages) and more SFT as its control, the four whole test sets,
# votes over draws, and where it loses. It has not been run as a whole: results/smollm2/README.md says what of it was.
# About eighteen hours on 2 cores, reckoned: nine for SFT and its
# test sets; the three stages took 130, 96 and 106 minutes and CoT's reinforcement 84, each on one core of an EPYC in float32.
# Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub. Everything is left in runs/smollm2-135m (or $1).
# Stopped and run again, it resumes. Committed answers were made with compiled decode steps (`--compile`, commit c901c920), and
# with thresholds that end groups in results alone, not in operands (up to commit 272dd8c5).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/smollm2-135m}
common=(--skip_malformed --dtype bfloat16 --max_latents 128 --max_completion_length 16)

lab=lab/recipes/smollm2-135m
rows() { echo "runs/renumbered/gsm8k-aug-$1-$2.jsonl"; }  # VERSIONS SEED; the recipes below name these files
for made in "4 0" "4 1" "4 8" "4 9" "4 10" "3 2"; do
  read -r versions seed <<< "$made"
  file=$(rows "$versions" "$seed")
  [[ -f $file ]] || python lab/scripts/renumber_rows.py gsm8k-aug --versions "$versions" --seed "$seed" --output "$file"
done
colar train smollm2-135m/sequential --output "$out/sequential" --data.train_size null --data.validation_source gsm8k-aug \
  --stages.cot.data.source "$(rows 4 0)" --stages.equations.data.source "$(rows 4 1)" --stages.gated.data.source "$(rows 4 8)"
equations=$out/sequential/equations/best
sft=$out/sequential/gated/best
colar train $lab/colar-speeds.yaml --output "$out/colar-speeds" --model.init_from "$sft"
colar train $lab/colar-speeds-continued.yaml --output "$out/colar-speeds-continued" --model.init_from "$out/colar-speeds/best"
colar train $lab/cot-more.yaml --output "$out/cot-more" --model.init_from "$equations"
colar train $lab/cot-continued.yaml --output "$out/cot-continued" --model.init_from "$out/cot-more/best"
float32=(--model.dtype float32 --training.bf16 false)  # as reinforcement was trained
colar train smollm2-135m/grpo --output "$out/grpo" --model.init_from "$sft" "${float32[@]}"
colar train $lab/grpo-sequential-renumbered.yaml --output "$out/grpo/renumbered" --model.init_from "$out/grpo/decaying/best" "${float32[@]}"
colar train $lab/colar-continued.yaml --output "$out/colar-continued" --model.init_from "$sft"
colar train $lab/grpo-cot.yaml --output "$out/grpo-cot" --model.init_from "$out/cot-more/best" \
  --training.lr_scheduler_type linear --training.max_steps 100 --training.eval_steps 100 "${float32[@]}"

cot=cot="$out/cot-more/best"
colar=smollm2-135m="$sft"
sets=(gsm8k-aug gsm-hard svamp multiarith)
colar evaluate "$cot" "$colar" --data "${sets[@]}" --compression_factor 1 2 "${common[@]}" \
  --batch_size 64 --output "$out/report-plain"
colar evaluate cot="$out/cot-continued/best" --data "${sets[@]}" "${common[@]}" --batch_size 64 --output "$out/report-cot-continued"
colar evaluate "$colar" --data "${sets[@]}" --compression_factor 2 --confidence_threshold 0.3 0.5 0.8 0.95 "${common[@]}" \
  --batch_size 64 --output "$out/report-gated"
colar evaluate cot="$out/grpo-cot/best" --data "${sets[@]}" "${common[@]}" --dtype float32 --batch_size 64 --output "$out/report-grpo-cot"
for name in grpo/constant grpo/decaying grpo/renumbered colar-continued; do
  colar evaluate smollm2-135m="$out/$name/best" --data "${sets[@]}" --compression_factor 2 "${common[@]}" \
    --confidence_threshold 0 0.5 0.8 0.95 --dtype float32 --batch_size 64 --output "$out/report-${name#grpo/}"
done
colar evaluate smollm2-135m="$out/colar-speeds/best" --data "${sets[@]}" --compression_factor 1 2 3 5 "${common[@]}" \
  --batch_size 64 --output "$out/report-speeds"
colar evaluate smollm2-135m="$out/colar-speeds-continued/best" --data "${sets[@]}" --compression_factor 3 5 "${common[@]}" \
  --batch_size 64 --output "$out/report-speeds-continued"
draws=(--data multiarith svamp --decoding sampled --seeds 0 1 2 3 4 5 6 7 "${common[@]}" --batch_size 64)
colar evaluate "$cot" "${draws[@]}" --output "$out/report-votes-cot"
colar evaluate cot="$out/grpo-cot/best" "${draws[@]}" --dtype float32 --output "$out/report-votes-grpo-cot"
colar evaluate "$colar" "${draws[@]}" --compression_factor 2 --confidence_threshold 0 0.8 --output "$out/report-votes"
for name in grpo/decaying colar-continued; do
  colar evaluate smollm2-135m="$out/$name/best" "${draws[@]}" --compression_factor 2 --confidence_threshold 0 0.8 --dtype float32 \
    --output "$out/report-votes-${name#grpo/}"
done
colar evaluate "$colar" --data multiarith --compression_factor 2 --confidence_threshold 0 0.8 --control halved shuffled "${common[@]}" \
  --batch_size 64 --output "$out/report-controls"
colar report "$out"/report-{plain,cot-continued,gated,grpo-cot,constant,decaying,renumbered,colar-continued,speeds,speeds-continued,votes,votes-cot,votes-grpo-cot,votes-decaying,votes-colar-continued,controls} --output "$out/report"
colar inspect "$cot" "$colar" --data gsm8k-aug --limit 100 --compression_factor 1 2 "${common[@]}" \
  --output "$out/inspect.html"
colar export "$sft" "$out/export-colar" --dtype bfloat16
