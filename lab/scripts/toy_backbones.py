"""The toy model in four sizes, untrained: a folder for each size and seed, that a recipe names as its backbone.

    python lab/scripts/toy_backbones.py --seeds 0 1 2 --output runs/figures/backbones

Width and depth grow, the rest is `tiny`'s: tokenizer, heads of attention, inner width of 2.5 times the width, and
weights drawn with 0.7 / sqrt(width). Writes FOLDER/SIZE-SEED, and a file with the number of parameters of each size.
Folders that are there stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from colar import files
from colar.model import backbones

SIZES = {"0.1m": (48, 3), "0.4m": (96, 3), "1.8m": (192, 4), "6m": (288, 6)}
"""Width and layers."""


def build(width: int, layers: int, seed: int) -> LlamaForCausalLM:
    """Fresh weights drawn from `seed`."""
    like = backbones.load("tiny").lm.config
    config = LlamaConfig(**like.to_dict() | {
        "hidden_size": width,
        "intermediate_size": width * 5 // 2,
        "num_hidden_layers": layers,
        "head_dim": width // like.num_attention_heads,
        "initializer_range": backbones.TINY_INIT_STD * (like.hidden_size / width) ** 0.5,
    })  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="of the model")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the weights")
    parser.add_argument("--output", type=Path, required=True, help="folder for all of them")
    parser.add_argument("--parameters", type=Path, help="file for their numbers (FOLDER/parameters.json)")
    args = parser.parse_args()
    output = files.require_writable(args.output)
    disable_progress_bar()
    parameters = {}
    for name in args.sizes:
        width, layers = SIZES[name]
        for seed in args.seeds:
            lm = build(width, layers, seed)
            parameters[name] = lm.num_parameters()
            folder = output / f"{name}-{seed}"
            if not folder.exists():
                with files.replace_folder(folder) as partial:
                    lm.save_pretrained(partial)
                    backbones.tiny_tokenizer().save_pretrained(partial)
    files.write_json(args.parameters or output / "parameters.json", parameters)
    print(f"wrote {output}: " + ", ".join(f"{name} {size:,}" for name, size in parameters.items()))


if __name__ == "__main__":
    main()
