"""A model of a known shape with random weights, as a folder that any benchmark takes for its backbone: speed is that of
the trained one.

    python lab/benchmarks/shapes.py llama-3.2-1b runs/llama-shape
    python lab/benchmarks/generate.py --backbone runs/llama-shape

The tokenizer is another backbone's, whose ids are all below the shape's vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colar import files
from colar.model import backbones

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "smollm2-135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    # To try a command: no model has it.
    "small": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("output", type=Path, help="folder of the model")
    parser.add_argument("--tokenizer", default="tiny", help="the backbone whose tokenizer it has")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[args.shape], tie_word_embeddings=True, max_position_embeddings=8192)
    # Drawn in float32, a billion weights would take twice the memory.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    tokenizer = backbones.load(args.tokenizer).tokenizer
    with files.replace_folder(args.output) as partial:
        lm.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(args.output)


if __name__ == "__main__":
    main()
