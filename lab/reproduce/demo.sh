#!/usr/bin/env bash
# The demo: CoT from scratch, then from its weights, on as many rows each, the paper's method (`colar`) and ours
# (`sequential`). Beside them a no_cot control with as many rows as CoT and one of the two
# together; then the table, on problems that none of them has seen. Everything is left in runs/demo (or $1). Stopped and
# run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/demo}
mkdir -p "$out"

# Small matrices: more than four threads do not help. While two trainings run, each gets half.
cores=$(python3 -c 'import os; print(min(os.cpu_count() or 1, 4))')
half=$(((cores + 1) / 2))

echo "training no_cot (the control) in the background: $out/no_cot.log" >&2
OMP_NUM_THREADS=$half colar train lab/recipes/tiny/no_cot.yaml --output "$out/no_cot" >"$out/no_cot.log" 2>&1 &
control=$!
trap 'kill $control 2>/dev/null || true' EXIT
echo "training cot" >&2
OMP_NUM_THREADS=$half colar train tiny/cot --output "$out/cot" >/dev/null
# By then the control is nearly done, and each of the two gets half of the machine.
echo "training colar (the paper's head) in the background: $out/colar.log" >&2
OMP_NUM_THREADS=$half colar train tiny/colar --data.train_size 34000 --output "$out/colar" \
  --model.init_from "$out/cot/best" >"$out/colar.log" 2>&1 &
paper=$!
trap 'kill $control $paper 2>/dev/null || true' EXIT
echo "training sequential (ours)" >&2
OMP_NUM_THREADS=$half colar train tiny/sequential --output "$out/sequential" --model.init_from "$out/cot/best" >/dev/null
echo "waiting for colar and no_cot" >&2
wait $paper || { tail -n 5 "$out/colar.log" >&2; exit 1; }
wait $control || { tail -n 5 "$out/no_cot.log" >&2; exit 1; }
trap - EXIT

# Each is named by its folder. What is printed last is a screenful: of the report its first table (report.md has all), and two problems.
OMP_NUM_THREADS=$cores colar evaluate "$out/cot/best" "$out/sequential/best" "$out/colar/best" "$out/no_cot/best" --label "" --data arithmetic --limit 512 \
  --compression_factor 1 2 3 4 5 --max_latents 64 --max_completion_length 8 --batch_size 256 --output "$out/report" \
  >"$out/tables.txt"
sed '/^Paired differences/,$d' "$out/tables.txt"
echo "Two of the test problems at c = 2 and c = 5 (sequential); for each thought its tokens, and those nearest to it:"
colar data prepare arithmetic --splits test --limit 2 --output "$out/problems" >/dev/null
colar generate "$out/sequential/best" --input "$out/problems/test.jsonl" --compression_factor 2 5 --show-latents \
  --max_latents 64 --max_completion_length 8 2>/dev/null
echo
echo "table    $out/report/report.md"
echo "picture  $out/report/accuracy_vs_length.png"
echo "page     $out/sequential/inspect.html"
