"""What every method computes, as JSON: losses of ten updates, engine outputs, updates of GRPO.

Run it before and after a refactor:

    python scripts/golden.py before.json          # at the old commit
    python scripts/golden.py after.json           # at the new one
    python scripts/golden.py --compare before.json after.json

Tiny random models of the test suite's families, one thread, fixed seeds: equal code gives equal numbers. Losses are
compared to 1e-6 (a refactor may sum in another order), everything else exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import EXAMPLES, FAMILIES, liven, tiny_lm  # noqa: E402

from colar import files, progress  # noqa: E402
from colar.engine.engine import Engine  # noqa: E402
from colar.engine.request import Decoding, Request  # noqa: E402
from colar.methods import registry  # noqa: E402
from colar.methods.base import Batch  # noqa: E402
from colar.methods.pretrained import attach  # noqa: E402
from colar.model.latent_lm import LatentLM  # noqa: E402

UPDATES = 10
TOLERANCE = 1e-6
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in registry.METHODS},
    "colar-paper": ("colar", {"chain_label": "sampled", "latent_loss": "nll", "stop": "argmax"}),
    "colar-deterministic": ("colar", {"head": "deterministic", "merge": "mean"}),
    "sequential-ordered": (
        "sequential",
        {
            "merge": "ordered",
            "compression_factors": (1, 1.5, 2.75, 4),
            "confidence_thresholds": (0, 0.5),
            "lookahead_weight": 0.2,
            "shortlist": True,
        },
    ),
    "sequential-equations": (
        "sequential",
        {
            "merge": "ordered",
            "grouping": "equations",
            "confidence_thresholds": (0, 0.5),
            "shortlist": True,
        },
    ),
    "icot-begun": ("icot", {"removed_per_epoch": 1.0, "remove_all_at": 3}),
}
"""Name -> method and the values of its config."""
SPEEDS = {"colar": (1, 2, 5, 3), "sequential": (1, 2, 4, 3)}
DECODINGS = {
    "greedy": Decoding(max_latents=6, max_completion_length=5),
    "sampled": Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=5),
}
GRPO = """
output: {folder}/grpo-{method}
model: {{init_from: {folder}/sft-{method}/best}}
data: {{train_size: 64, validation_size: 8, seed: 3}}
method: {{name: {method}}}
grpo: {{num_generations: 4, max_latents: 40, max_completion_length: 4, compression_factors: [2, 3], dynamic_sampling: 1,
  reward_funcs: [accuracy, length_penalty]}}
training: {{max_steps: 4, per_device_train_batch_size: 16, learning_rate: 0.001, logging_steps: 1, report_to: none}}
validation: {{page_size: 0, limits: {{max_latents: 12, max_completion_length: 4}}}}
"""
SFT = """
output: {folder}/sft-{method}
data: {{train_size: 160, validation_size: 8}}
method: {{name: {method}}}
training: {{per_device_train_batch_size: 16, learning_rate: 0.001, logging_steps: 1, report_to: none}}
validation: {{page_size: 0, limits: {{max_latents: 12, max_completion_length: 4}}}}
"""


def losses(lm: LatentLM, method: Any) -> list[dict[str, float]]:
    """Each term of the loss at ten updates, epoch by epoch, so that curricula move."""
    lm.train()
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=1e-3)
    examples = list(method.prepare(lm, [e for e in EXAMPLES if e.steps]))
    found = []
    for update in range(UPDATES):
        epoch = float(update)
        rows = [method.encode(lm.template, e, Random(f"{update}/{e.id}"), epoch) for e in examples]
        terms = method.loss(lm, Batch.collate(rows))
        total = sum(term.mean() for name, term in terms.items() if not name.startswith("_"))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found.append({name: float(term.detach().mean()) for name, term in terms.items()})
    lm.eval()
    return found


def answers(lm: LatentLM, method: Any) -> list[dict[str, Any]]:
    """What the engine says to every question, greedy and sampled, at several speeds where there are any."""
    speeds = [{"compression_factor": c} for c in SPEEDS.get(method.name, ())] or [{}]
    requests = []
    for mode, decoding in DECODINGS.items():
        for i, example in enumerate(EXAMPLES):
            params = registry.make_params(method, speeds[i % len(speeds)])
            requests.append(
                Request(
                    f"{mode}/{example.id}", example.question, params, decoding, i, i % 3, keep_latents=True
                )
            )
    found = []
    for done in Engine(lm, method, max_batch=4).generate(requests):
        record = {
            name: getattr(done, name) for name in ("token_ids", "thought_ids", "reason", "forward_passes")
        }
        record["token_logps"] = done.token_logps
        record["latents"] = [] if done.latents is None else done.latents.double().sum(-1).tolist()
        found.append({"id": done.request.id, **record})
    return found


def runs(variants: Sequence[str]) -> dict[str, Any]:
    """Logged losses of a small SFT run and of GRPO from it, through recipes: of the methods that are among these."""
    from colar import recipe

    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for method, ending in (("colar", ""), ("sequential", "-sequential")):
            if method not in variants:
                continue
            for name, text in (("sft", SFT), ("grpo", GRPO)):
                path = Path(folder) / f"{name}-{method}.yaml"
                path.write_text(text.format(folder=folder, method=method))
                result = recipe.run(recipe.load(path))
                rows = [row for row in result.history if "loss" in row]
                names = ("loss", "ce", "latent", "reward", "latents/mean_length", "sampling/logp_difference")
                made[name + ending] = [{key: row[key] for key in names if key in row} for row in rows]
    return made


def measure(families: Sequence[str], variants: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"losses": {}, "answers": {}}
    for family in families:
        for variant in progress.track(variants, family):
            name, config = VARIANTS[variant]
            # Groups of equations need a tokenizer with a token for each digit.
            digits = config.get("grouping") == "equations"
            torch.manual_seed(0)
            lm, method = tiny_lm(family, scale=0.1, digits=digits), registry.build(name, config)
            attach(lm, method, 1)
            found["losses"][f"{family}/{variant}"] = losses(lm, method)
            lm, method = liven(tiny_lm(family, digits=digits)), registry.build(name, config)
            attach(lm, method, 1)
            method.prepare(lm, EXAMPLES)
            found["answers"][f"{family}/{variant}"] = answers(lm, method)
    return found | {"runs": runs(variants)}


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Every place in which two measurements differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in before.keys() & after.keys():
            found += differences(before[key], after[key], f"{where}/{key}")
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        found = []
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            found += differences(one, other, f"{where}[{i}]")
        return found
    if isinstance(before, float) and isinstance(after, float):
        same = math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return [] if same else [f"{where}: {before!r} and {after!r}"]
    return [] if before == after else [f"{where}: {before!r} and {after!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="one to write, or two with --compare")
    parser.add_argument(
        "--compare", action="store_true", help="print how two files differ; exit code 1 if they do"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="only these")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="only these"
    )
    args = parser.parse_args()
    if not args.compare:
        print(files.write_json(args.files[0], measure(args.families, args.variants)))
        return
    before, after = (json.loads(Path(name).read_text()) for name in args.files)
    for section in before.keys() & after.keys():
        for name in sorted(before[section].keys() ^ after[section].keys()):
            print(f"{section}/{name} is in one only")
    found = differences(before, after)
    print("\n".join(found[:20]) or "the same numbers")
    print(f"{len(found)} differences", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
