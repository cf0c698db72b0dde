#!/usr/bin/env bash
# SmolLM2-135M on real grade-school mathematics with the sequential head: CoT-SFT on more rows than there are, CoLaR-SFT
# from its weights, the four whole test sets, and where it loses. It has not been run to its end:
# results/smollm2-135m-numbers/README.md has an unfinished run. About four hours on 2 cores with AMX, reckoned from that.
# Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub. Everything is left in runs/smollm2-135m (or $1).
# Stopped and run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/smollm2-135m}
common=(--skip_malformed --dtype bfloat16 --max_latents 128 --max_completion_length 16)

colar train smollm2-135m/cot-renumbered --output "$out/cot-renumbered"
colar train smollm2-135m/colar-sequential --output "$out/colar-sequential" --model.init_from "$out/cot-renumbered/best"
models=(smollm2-135m="$out/cot-renumbered/best" smollm2-135m="$out/colar-sequential/best")
colar evaluate "${models[@]}" --data gsm8k-aug gsm-hard svamp multiarith --compression_factor 1 2 3 5 "${common[@]}" \
  --batch_size 64 --compile --output "$out/report"
colar diagnose "${models[@]}" --data gsm8k-aug --limit 150 --compression_factor 1 2 3 5 "${common[@]}" \
  --output "$out/diagnosis"
for name in cot-renumbered colar-sequential; do
  colar export "$out/$name/best" "$out/export-$name" --dtype bfloat16
done
