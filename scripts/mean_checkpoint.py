"""Make a checkpoint whose weights are the mean of several: of stages or moments of one training.

    python scripts/mean_checkpoint.py runs/a/best runs/b/best --output runs/mean
    colar evaluate runs/mean ...

All files but the weights come from the first. Maps of places and digits are stored as two factors, which every training
that starts from a checkpoint takes apart anew: their products are averaged. The factors of a LoRA adapter stay what
they are from stage to stage, and each is averaged by itself; adapters of other starts would not go together.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from colar import files
from colar.methods.colar.merging import PlaceMaps

UP, DOWN = "_maps.up", "_maps.down"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoints", nargs="+", type=Path, help="checkpoint folders of one method and shape"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--label", default="mean", help="part of its name in tables (default: mean)")
    args = parser.parse_args()
    first = args.checkpoints[0]
    for folder in args.checkpoints:
        if not (folder / "colar.json").is_file():
            raise SystemExit(f"{folder} is no checkpoint: it has no colar.json")
    with files.replace_folder(args.output) as partial:
        for path in first.iterdir():
            if path.suffix == ".safetensors":
                states = [load_file(folder / path.name) for folder in args.checkpoints]
                with safe_open(path, "pt") as stored:
                    metadata = stored.metadata()
                save_file(mean(states, path.name), partial / path.name, metadata)
            else:
                shutil.copyfile(path, partial / path.name)
        # The first one's metrics and label are not those of the mean.
        info = files.read_json(partial / "colar.json")
        info["run"]["metrics"] = {}
        info["run"]["label"] = args.label
        files.write_json(partial / "colar.json", info)
    print(args.output)


def mean(states: Sequence[dict[str, Tensor]], what: str) -> dict[str, Tensor]:
    """The mean of each weight, in float32 and then in its own dtype. SystemExit where the names or shapes differ."""
    shapes = [{name: value.shape for name, value in state.items()} for state in states]
    if any(each != shapes[0] for each in shapes):
        raise SystemExit(f"{what}: the checkpoints have other weights, or weights of other shapes")
    found = {}
    for name, value in states[0].items():
        found[name] = torch.stack([state[name].float() for state in states]).mean(0).to(value.dtype)
    for name in list(found):
        if name.endswith(UP):
            other = name.removesuffix(UP) + DOWN
            products = torch.stack([state[name].float() @ state[other].float() for state in states])
            width, rank = found[name].shape[1:]
            maps = PlaceMaps(width, len(products[0]) + 1, rank)
            maps.start_from({"maps": torch.eye(width) + products.mean(0)})
            found[name] = maps.up.detach().to(found[name].dtype).contiguous()
            found[other] = maps.down.detach().to(found[other].dtype).contiguous()
    return found


if __name__ == "__main__":
    main()
