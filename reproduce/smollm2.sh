#!/usr/bin/env bash
# SmolLM2-135M on real grade-school mathematics: CoT-SFT, CoLaR-SFT from its weights, the four test sets, and where
# it loses (smollm2-135m-pairs at commit b0a26a2). About five hours on 2 cores. Needs `make smollm2`, and the data:
# $COLAR_DATA_DIR, else the Hub. Everything is left in runs/smollm2-135m (or $1). Stopped and run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/smollm2-135m}
sets=(gsm8k-aug gsm-hard svamp multiarith)
common=(--skip_malformed --dtype bfloat16 --max_latents 128 --max_completion_length 16)

colar train smollm2-135m/cot --output "$out/cot"
colar train smollm2-135m/cot-generated --output "$out/cot-generated" --model.init_from "$out/cot/best"
# All speeds in one model, and c = 1 and 2 in another.
for name in colar-generated colar-pairs; do
  colar train "smollm2-135m/$name" --output "$out/$name" --model.init_from "$out/cot-generated/best"
  models=(cot="$out/cot-generated/best" colar="$out/$name/best")
  colar evaluate "${models[@]}" --data "${sets[@]}" --limit 500 --compression_factor 1 2 3 5 --snap true \
    "${common[@]}" --batch_size 64 --compile --output "$out/report${name#colar}"
  colar diagnose "${models[@]}" --data gsm8k-aug --limit 100 --compression_factor 1 2 5 --snap true "${common[@]}" \
    --output "$out/diagnosis${name#colar}"
done
colar export "$out/colar-pairs/best" "$out/export" --dtype bfloat16
