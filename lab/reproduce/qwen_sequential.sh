#!/usr/bin/env bash
# Qwen2.5-Coder-0.5B on school mathematics: CoT-SFT, SFT by the sequential method, four whole test sets, draws,
# controls and other numbers. It has not been run as a whole: the weights of results/qwen were trained in parts (the
# recipe's header), above a 4-bit copy of the backbone. A day on two cores with AMX (estimate).
# Needs the data ($COLAR_DATA_DIR, else the Hub). Everything is left in runs/qwen2.5-coder-0.5b (or $1).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/qwen2.5-coder-0.5b}
common=(--skip_malformed --dtype bfloat16 --max_latents 128 --max_completion_length 16 --batch_size 32)
colar train lab/recipes/qwen2.5-coder-0.5b/sequential.yaml --output "$out/sequential"

cot=cot="$out/sequential/cot/best"
model=qwen2.5-coder-0.5b="$out/sequential/gated/best"
sets=(gsm8k-aug gsm-hard svamp multiarith)
thresholds=(0 0.8 0.95)
colar evaluate "$cot" "$model" --data "${sets[@]}" --compression_factor 1 "${common[@]}" --output "$out/mathematics"
colar evaluate "$model" --data "${sets[@]}" --compression_factor 2 --confidence_threshold "${thresholds[@]}" "${common[@]}" \
  --output "$out/mathematics"
colar evaluate "$model" --data multiarith --limit 200 --compression_factor 2 --confidence_threshold "${thresholds[@]}" \
  --control halved shuffled "${common[@]}" --output "$out/controls"
drawn=(--decoding sampled --seeds 0 1 2 3 4)
colar evaluate "$cot" "$model" --data "${sets[@]}" --compression_factor 1 "${common[@]}" "${drawn[@]}" --output "$out/draws"
colar evaluate "$model" --data "${sets[@]}" --compression_factor 2 --confidence_threshold 0.8 "${common[@]}" "${drawn[@]}" \
  --output "$out/draws"
base="qwen2.5-coder-0.5b c=1"
gated=("qwen2.5-coder-0.5b c=2 (confidence_threshold="{0.95,0.8}")")
colar report "$out/controls" --output "$out/report-controls"
colar report "$out/mathematics" "$out/draws" --output "$out/report" --pair "$base" cot --pair "${gated[0]}" "$base" \
  --pair "${gated[1]}" "$base" --pair "qwen2.5-coder-0.5b c=2" "$base" \
  --pair "${gated[0]}" cot --pair "${gated[1]}" cot --pair "qwen2.5-coder-0.5b c=2" cot

# Other numbers are computed from the upstream files.
[[ -n ${COLAR_DATA_DIR:-} ]] || exit 0
other=$out/other-numbers
python lab/scripts/other_numbers.py write "$other/data" --data_dir "$COLAR_DATA_DIR"
colar evaluate "$cot" "$model" --data "$other"/data/*.jsonl --compression_factor 1 "${common[@]}" --output "$other"
colar evaluate "$model" --data "$other"/data/*.jsonl --compression_factor 2 --confidence_threshold "${thresholds[@]}" \
  "${common[@]}" --output "$other"
python lab/scripts/other_numbers.py table "$other" --baseline "$base" --output "$other"
colar report "$other" --output "$out/report-other-numbers"
