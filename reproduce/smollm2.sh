#!/usr/bin/env bash
# SmolLM2-135M on real grade-school mathematics: CoT-SFT, CoLaR-SFT from its weights, the four test sets, and where
# it loses. About two hours on 2 cores. Needs `make smollm2`, and the data: $COLAR_DATA_DIR, else the Hub.
# Everything is left in runs/smollm2-135m (or $1). Stopped and run again, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/smollm2-135m}
common=(--dtype bfloat16 --max_latents 128 --max_completion_length 16)

colar train recipes/smollm2-135m/cot.yaml --output "$out/cot"
colar train recipes/smollm2-135m/colar.yaml --output "$out/colar" --model.init_from "$out/cot/best"
colar evaluate "$out/cot/best" "$out/colar/best" --data gsm8k-aug gsm-hard svamp multiarith --limit 500 \
  --compression_factor 1 2 3 5 --snap false true "${common[@]}" --batch_size 64 --output "$out/report"
colar diagnose "$out/cot/best" "$out/colar/best" --data gsm8k-aug --limit 200 \
  --compression_factor 1 2 3 5 --snap false true "${common[@]}" --output "$out/diagnosis"
colar export "$out/colar/best" "$out/export" --dtype bfloat16
