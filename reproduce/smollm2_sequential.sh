#!/usr/bin/env bash
# SmolLM2-135M on real grade-school mathematics with the sequential head: CoT-SFT on more rows than there are, CoLaR-SFT
# from its weights in three stages, the four whole test sets, and where it loses. It has not been run to its end:
# results/smollm2-135m-gated/README.md says what of it was. About six hours on 2 cores with AMX, reckoned from that.
# Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub. Everything is left in runs/smollm2-135m (or $1).
# Stopped and run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/smollm2-135m}
common=(--skip_malformed --dtype bfloat16 --max_latents 128 --max_completion_length 16)

before=()
for name in cot-renumbered colar-sequential colar-results colar-gated; do
  colar train "smollm2-135m/$name" --output "$out/$name" ${before[@]+"${before[@]}"}
  before=(--model.init_from "$out/$name/best")
done
cot=cot="$out/cot-renumbered/best"
gated=smollm2-135m="$out/colar-gated/best"
sets=(gsm8k-aug gsm-hard svamp multiarith)
colar evaluate "$cot" "$gated" --data "${sets[@]}" --compression_factor 1 2 5 "${common[@]}" \
  --batch_size 64 --compile --output "$out/report-plain"
colar evaluate "$gated" --data "${sets[@]}" --compression_factor 2 --confidence_threshold 0.9 0.95 0.98 "${common[@]}" \
  --batch_size 64 --compile --output "$out/report-gated"
colar report "$out/report-plain" "$out/report-gated" --output "$out/report"
colar diagnose "$cot" "$gated" --data gsm8k-aug --limit 150 --compression_factor 1 2 5 "${common[@]}" \
  --output "$out/diagnosis"
colar export "$out/colar-gated/best" "$out/export-colar-gated" --dtype bfloat16
