#!/usr/bin/env bash
# `colar train auto` on 2,000 word problems of the toy in a file: minutes on two CPU cores, to the table of all speeds.
# results/toy/auto is such a run. Everything is left in runs/auto (or $1). Stopped and run again, it resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/auto}
colar data prepare arithmetic --splits train --limit 2000 --output "$out/rows"
colar train auto --model tiny --data "$out/rows/train.jsonl" --output "$out/run"
