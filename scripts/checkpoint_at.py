"""Make a checkpoint folder from the state that a run resumes from: the model as it was at some step.

    colar train smollm2-135m/colar-generated --training.save_total_limit 99
    python scripts/checkpoint_at.py runs/smollm2-135m/colar-generated 220 runs/at-220
    colar evaluate runs/at-220 ...

The run must have kept that step (`training.save_total_limit`) and have published a best checkpoint: all files but the
weights come from it.
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
    saved = args.run / "checkpoints" / f"checkpoint-{args.step}"
    best = args.run / "best"
    for folder in (saved, best):
        if not folder.is_dir():
            kept = sorted(path.name for path in saved.parent.glob("checkpoint-*"))
            raise SystemExit(f"there is no {folder} (kept: {', '.join(kept) or 'none'})")
    weights = {path.name for path in saved.glob("*.safetensors")}
    with files.replace_folder(args.output) as partial:
        for path in best.iterdir():
            source = saved / path.name if path.name in weights else path
            shutil.copyfile(source, partial / path.name)
        # The metrics of the best checkpoint are not those of this step.
        info = files.read_json(partial / "colar.json")
        info["run"]["step"] = args.step
        info["run"]["metrics"] = {}
        files.write_json(partial / "colar.json", info)
    print(args.output)


if __name__ == "__main__":
    main()
