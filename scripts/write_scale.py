"""Write docs/scale.md: tokens a second, memory and communication of three models on 1, 8 and 64 cards.

    python scripts/write_scale.py          about two minutes on a CPU

Computed as `colar plan` computes: from shapes, for a batch of one size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from colar.methods import registry
from colar.model.latent_lm import LoraSettings
from colar.planning import hardware, shapes
from colar.planning.replay import replay
from colar.planning.trace import Work
from colar.training import peak, recompute

ROWS, LENGTH, LABELS = 32, 256, 128
"""Of a batch: rows, positions and labelled positions of a row."""
MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")
CARDS = (1, 8, 64)
TARGET = Path(__file__).parent.parent / "docs" / "scale.md"
GPU = hardware.GPUS["h100"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="only these")
    parser.add_argument("--output", type=Path, default=TARGET, help="file to write")
    args = parser.parse_args()
    lines = []
    examples = []
    for name in args.models:
        shown, example = of_model(name)
        lines += shown
        examples.append(example)
    args.output.write_text(page(lines, examples), encoding="utf-8")
    print(f"wrote {args.output}")


def of_model(name: str) -> tuple[list[str], str]:
    """The rows of a model in the table, and its arithmetic."""
    mode = FakeTensorMode()
    lora = LoraSettings(r=128, lora_alpha=32, target_modules=("q_proj", "v_proj"))
    shape = shapes.find(f"meta-llama/{name}-Instruct")
    lm = shapes.without_memory(shape, registry.build("cot", {}), "bfloat16", lora, mode)
    recompute.enable(lm)
    found = replay(lm, Work([[ROWS, LENGTH]], [ROWS * LABELS], []), True, mode)
    weights, trained = peak.held(lm), peak.trained(lm)
    memory = weights + peak.ADAM_MOMENTS * trained + found.bytes
    seconds = found.flops / (GPU.teraflops * 1e12 * hardware.TRAINING_SHARE)
    rows = []
    for count in CARDS:
        share = hardware.all_reduce_seconds(GPU, count, trained)
        rate = count * ROWS * LENGTH / (seconds + share)
        sent = 2 * (count - 1) / count * trained / 2**20
        rows.append(
            f"| {name} | {count} | {rate:,.0f} | {memory / 2**30:.1f} | {sent:.0f} | {1e3 * share:.1f} "
            f"| {100 * share / (seconds + share):.1f}% |"
        )
    parameters = sum(weight.numel() for weight in lm.parameters())
    # All weights in float32: weights, gradients and two moments.
    whole = 4 * parameters
    full = hardware.all_reduce_seconds(GPU, 8, whole)
    example = (
        f"| {name} | {parameters / 1e6:,.0f} M | {weights / 2**30:.1f} | {trained / 2**20:.0f} "
        f"| {found.bytes / 2**30:.1f} | {found.flops / 1e12:,.0f} | {1e3 * seconds:.0f} "
        f"| {4 * whole / 2**30:.0f} | {1e3 * full:.0f} |"
    )
    return rows, example


def page(lines: list[str], examples: list[str]) -> str:
    """The whole file."""
    limit = f"{hardware.TRAINING_SHARE:.0%}"
    return f"""# What a run takes at scale, on paper

Nothing here was measured on a GPU. `colar plan` computed it from the models' shapes (`python scripts/write_scale.py`):
CoT-SFT with the paper's adapter (q and v, r = 128) on a frozen bfloat16 base, activations recomputed, batches of
{ROWS} rows x {LENGTH} positions a card, half of them labelled, on H100s at {limit} of their peak.

| model | cards | tokens a second | GiB a card | MiB sent a card and update | all-reduce, ms | of the update |
|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(lines)}

## The arithmetic

| model | parameters | weights, GiB | adapter, MiB | batch, GiB | TFLOP | ms | all weights: GiB | their all-reduce, ms |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{chr(10).join(examples)}

- **Products.** Forward 2 N a position, backward 2 N (a frozen weight has no gradient of its own), recomputing 2 N; the
  LM head only where there is a label. ms a batch = TFLOP / ({GPU.teraflops:,.0f} TFLOP/s x {limit}).
- **Memory.** Weights in bfloat16 + the adapter and AdamW's two moments in float32 + the batch. The batch is what its
  layers keep (their inputs), one layer recomputed, and a chunk of logits (256 MiB, three times).
- **Communication.** DDP adds up the adapter's float32 gradients once an update: a ring sends 2 (n - 1) / n of them. Up
  to {hardware.PER_NODE} cards at {GPU.link_gb_per_s:.0f} GB/s, between nodes at {hardware.NETWORK_GB_PER_S:.0f} GB/s
  for each card. That part of it runs beside the backward pass is not counted.
- **All weights.** Float32 weights, gradients and moments are 16 bytes a parameter, before any activation. Where that
  exceeds a card ({GPU.memory_gib:.0f} GiB), weights have to be split between cards (`training.fsdp`): each holds its
  share of the 16 bytes, and gathers 4 bytes a parameter twice an update.

## What would limit 1,000 cards

- **The data, first.** 1,000 cards x {ROWS} rows are 32,000 rows an update: GSM8k-Aug has 12 updates an epoch, MATH less
  than one. The paper's update of 256 rows feeds 8 cards. More cards pay off for sweeps of runs, not for one run.
- **Rows of different lengths.** All cards wait for the longest part. Rows of an update are of like length, which helps
  while the pool that is sorted (at most 50 updates, a quarter of the data) is much larger than an update.
- **Validation.** Processes divide the questions: 500 of them are half a question a card, and the longest chain decides.
- **The start.** Processes divide the first look at all rows and keep it for the next run. Each still reads all of them.
- **The all-reduce, last.** An adapter is small. Its time hardly grows with cards, until its latency (2 n steps of a
  ring, microseconds each) is felt.
"""


if __name__ == "__main__":
    main()
