"""Rank each group's tokens by their cosine with its thought (`paper_figures/ranks.py`), for the figure of retrieval.

    python lab/scripts/rank_thoughts.py seed0=runs/x/best --compression_factor 2 5 --output toy.json

Of each checkpoint at each factor: thoughts of its own chain, thoughts after a right prefix, the reference's latents.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from colar import files
from colar.data import sources
from colar.engine.request import Decoding
from colar.evaluation.evaluate import answer_all
from colar.evaluation.provenance import collect_provenance
from colar.look.diagnosis import requests_of
from colar.look.reference_chain import reference_passes
from colar.look.thought import vocabulary_of
from colar.methods import pretrained, registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paper_figures import ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    parser.add_argument("--compression_factor", nargs="+", type=float, default=[2])
    parser.add_argument("--data", default="arithmetic")
    parser.add_argument("--options", type=json.loads, default={}, help="of the source, as JSON")
    parser.add_argument("--skip_malformed", action="store_true")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max_latents", type=int, default=128)
    parser.add_argument("--max_completion_length", type=int, default=16)
    parser.add_argument("--output", required=True, help="FILE.json")
    args = parser.parse_args()
    decoding = Decoding(max_latents=args.max_latents, max_completion_length=args.max_completion_length)
    examples = sources.load_examples(
        args.data, "test", limit=args.limit, options=args.options, skip_malformed=args.skip_malformed
    )
    systems = []
    for named in args.checkpoints:
        name, _, path = named.partition("=")
        lm, method = pretrained.load_for_inference(path, "float32")
        vocabulary = vocabulary_of(lm)
        for c in args.compression_factor:
            params = registry.make_params(method, {"compression_factor": c})
            completions = answer_all(lm, method, requests_of(examples, params, decoding))
            found: dict[str, list[ranks.Ranks]] = {"own": [], "written": [], "reference": []}
            passes = reference_passes(lm, method, examples, params)
            for each, completion in zip(passes, completions, strict=True):
                found["own"] += ranks.own_ranks(lm, each, completion, vocabulary)
                found["written"] += ranks.written_ranks(lm, each, vocabulary)
                found["reference"] += ranks.reference_ranks(lm, each, vocabulary)
            chains = {chain: {"thoughts": thoughts} for chain, thoughts in found.items()}
            systems.append({"model": name, "params": {"compression_factor": c}, "retrieval": chains})
    asked = {"data": args.data, "split": "test", "limit": args.limit}
    whole = {"asked": asked, "provenance": collect_provenance(), "systems": systems}
    files.write_text(Path(args.output), json.dumps(whole) + "\n")


if __name__ == "__main__":
    main()
