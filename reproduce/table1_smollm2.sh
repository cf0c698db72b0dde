#!/usr/bin/env bash
# The core rows of the paper's Table 1 on SmolLM2-135M with an equal small budget: two epochs of 3,000 rows of GSM8k-Aug,
# the CoT weights counted in. Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub. Everything is left in
# runs/arena-smollm2 (or $1). Stopped and run again, it goes on where it was. More rows: ROWS=385000, on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/arena-smollm2}
sets=(--data gsm8k-aug gsm-hard svamp multiarith --skip_malformed --limit 500 --dtype bfloat16 --max_completion_length 16
  --batch_size 64)
rows=(--data.train_size "${ROWS:-3000}")

colar train recipes/arena-smollm2/cot-init.yaml "${rows[@]}" --output "$out/cot-init"
colar train recipes/arena-smollm2/no_cot.yaml "${rows[@]}" --output "$out/no_cot"
for name in cot coconut distill colar; do
  colar train "recipes/arena-smollm2/$name.yaml" "${rows[@]}" --model.init_from "$out/cot-init/best" --output "$out/$name"
done
models=()
for name in cot no_cot coconut distill colar; do models+=("smollm2=$out/$name/best"); done
colar evaluate "${models[@]}" "${sets[@]}" --compression_factor 2 5 --snap true false --max_latents 128 \
  --output "$out/eval/plain"
colar evaluate "${models[@]}" "${sets[@]}" --compression_factor 2 5 --snap true --control zeroed shuffled random \
  --max_latents 128 --output "$out/eval/controls"
colar evaluate "smollm2=$out/cot/best" "${sets[@]}" --max_latents 6 --label control-cut-6 --output "$out/eval/cut"
colar report "$out"/eval/plain "$out"/eval/controls "$out"/eval/cut --nearest colar --title "The arena on SmolLM2-135M" \
  --output "$out/report"
