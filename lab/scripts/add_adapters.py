"""The weights of a checkpoint plus what other training has changed: A + scale * (B - C), as an adapter of A's rank.

    python lab/scripts/add_adapters.py A --plus B --minus C --scale 0.5 --output FOLDER

A and B were trained from C, each on something else ("task vectors", 2212.04089). The three are LoRA checkpoints of one
backbone. The sum of their changes has a higher rank than each: it is cut by singular values, and the share of its
squared norm that is kept is printed. Modules, template and method are A's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colar import files
from colar.model import checkpoint
from colar.model.weights import ADAPTER


def change(up: list[Tensor], down: list[Tensor], rank: int) -> tuple[Tensor, Tensor, float]:
    """The sum of `up[i] @ down[i]` as a product of this rank, and the share of its squared norm that is kept."""
    # The sum has a rank of a few dozens, so that its singular values are those of a small matrix.
    left, left_r = torch.linalg.qr(torch.cat(up, dim=1).double())
    right, right_r = torch.linalg.qr(torch.cat(down).double().T)
    u, s, v = torch.linalg.svd(left_r @ right_r.T)
    root = s[:rank].sqrt()
    kept = float(s[:rank].square().sum() / s.square().sum().clamp(min=torch.finfo(s.dtype).tiny))
    return (left @ u[:, :rank]) * root, root[:, None] * (v[:rank] @ right.T), kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="A")
    parser.add_argument("--plus", type=Path, required=True, help="B")
    parser.add_argument("--minus", type=Path, required=True, help="C")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args = parser.parse_args()
    checkpoint.check_replaceable(args.output)
    terms = []
    backbones = set()
    for folder, scale in ((args.checkpoint, 1.0), (args.plus, args.scale), (args.minus, -args.scale)):
        config = files.read_json(folder / "adapter_config.json")
        terms.append((load_file(folder / ADAPTER), scale * config["lora_alpha"] / config["r"], config))
        backbones.add(files.read_json(folder / "colar.json")["fingerprint"])
    first, _, own = terms[0]
    if len(backbones) > 1 or any(weights.keys() != first.keys() for weights, _, _ in terms):
        raise SystemExit("the adapters are of different backbones, or of different layers")

    added, shares = {}, []
    for name in (name for name in first if ".lora_A." in name):
        other = name.replace(".lora_A.", ".lora_B.")
        up = [weights[other].float() * scale for weights, scale, _ in terms]
        up_r, down_r, kept = change(up, [weights[name].float() for weights, _, _ in terms], own["r"])
        added[other] = (up_r / (own["lora_alpha"] / own["r"])).float().contiguous()
        added[name] = down_r.float().contiguous()
        shares.append(kept)
    with files.replace_folder(args.output) as partial:
        shutil.copytree(args.checkpoint, partial, dirs_exist_ok=True)
        save_file(added, partial / ADAPTER, metadata={"format": "pt"})
    print(f"{sum(shares) / len(shares):.1%} of the squared norm of the changes; wrote {args.output}")


if __name__ == "__main__":
    main()
