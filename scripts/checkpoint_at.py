"""A checkpoint folder out of what a run saved to resume from: to look at a model as it was at some step.

    colar train smollm2-135m/colar-generated --training.save_total_limit 99
    python scripts/checkpoint_at.py runs/smollm2-135m/colar-generated 220 runs/at-220
    colar evaluate runs/at-220 ...

The run must have kept that step (`training.save_total_limit`) and have published a best checkpoint, which gives
everything but the weights.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from colar import files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("step", type=int)
    parser.add_argument("output", type=Path, help="folder to write")
    args = parser.parse_args()
    saved, best = args.run / "checkpoints" / f"checkpoint-{args.step}", args.run / "best"
    for folder in (saved, best):
        if not folder.is_dir():
            kept = sorted(path.name for path in saved.parent.glob("checkpoint-*"))
            raise SystemExit(f"there is no {folder} (kept: {', '.join(kept) or 'none'})")
    weights = {path.name for path in saved.glob("*.safetensors")}
    with files.replace_folder(args.output) as partial:
        for path in best.iterdir():
            shutil.copyfile(saved / path.name if path.name in weights else path, partial / path.name)
        info = files.read_json(partial / "colar.json")
        info["run"] |= {"step": args.step, "metrics": {}}
        files.write_json(partial / "colar.json", info)
    print(args.output)


if __name__ == "__main__":
    main()
