"""Everything that is measured of what a model thinks, at one value of its params: numbers for a page, or for JSON.

retrieval   thoughts read as tokens (`retrieval_accuracy.py`)       all questions
stop sigma  are they what they say (`calibration.py`)               all questions
probes      the running result of each step (`probe.py`)            all questions
norms lens  layer by layer (`layer_states.py`)                      the first `look`
attention   where thoughts look (`attention.py`)                    the first `look`
causal      one thought changed (`causal.py`)                       the first `look`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colar import progress
from colar.analysis.attention import AttentionMass, attention_of
from colar.analysis.calibration import SigmaCalibration, StopCalibration, sigma_of, stop_of
from colar.analysis.causal import CausalTests, causal_tests
from colar.analysis.layer_states import LayerNorms, LogitLens, lens_of, norms_of
from colar.analysis.measured import Measured
from colar.analysis.probe import Probe, probe_of
from colar.analysis.reference_chain import Kind, require_groups
from colar.analysis.reference_pass import ReferencePass, reference_passes
from colar.analysis.retrieval import directions
from colar.analysis.retrieval_accuracy import (
    RetrievalAccuracy,
    own_ranks,
    reference_ranks,
    retrieval_accuracy,
    written_ranks,
)
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, Decoding, Request, fold
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

BATCH = 32
TABLE_KINDS: tuple[Kind, ...] = ("bracket", "sign", "operand", "result")
TABLE_MEASURES = ("top1", "top5", "in_set")
"""The retrieval table: four kinds of token, three measures, of thoughts written after a right prefix."""


@dataclass(frozen=True)
class Inside(Measured):
    """All measurements; None for what the head does not have."""

    n: int
    n_looked: int
    """Questions of the measurements that take the first `look`."""
    retrieval: dict[str, RetrievalAccuracy]
    """By the chain that is read: written, own, reference."""
    stop: StopCalibration | None
    sigma: SigmaCalibration | None
    probes: list[Probe]
    norms: LayerNorms
    lens: LogitLens
    attention: AttentionMass
    causal: CausalTests

    def retrieval_table(self) -> dict[str, dict[str, float | None]]:
        """The table's twelve numbers, by kind and measure."""
        by_kind = self.retrieval["written"].by_kind
        table: dict[str, dict[str, float | None]] = {}
        for kind in TABLE_KINDS:
            table[kind] = {name: getattr(by_kind[kind], name) for name in TABLE_MEASURES}
        return table


def look_inside(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Any,
    limits: Decoding = GREEDY,
    *,
    look: int = 32,
    seed: int = 0,
) -> Inside:
    """Measure the examples that have a reference chain. ValueError where thoughts stand for no tokens of it."""
    examples = [example for example in examples if example.steps]
    require_groups(lm, method, examples, params)
    n = len(examples)
    passes = list(progress.track(reference_passes(lm, method, examples, params), "read", n))
    retrieval = _retrieval(lm, method, passes, params, limits)
    first = passes[:look]
    with progress.bar("measure", 5) as bar:
        bar.note("probes")
        probes = []
        for layer in (lm.config.num_hidden_layers // 2, None):
            probes.append(probe_of(lm, passes, layer, seed))
            bar.advance()
        bar.note("layers")
        norms = norms_of(lm, first)
        bar.advance()
        lens = lens_of(lm, first)
        bar.advance()
        bar.note("attention")
        attention = attention_of(lm, first)
        bar.advance()
    causal = causal_tests(lm, method, examples[:look], params, limits, seed=seed, max_batch=BATCH)
    return Inside(
        n=n,
        n_looked=len(first),
        retrieval=retrieval,
        stop=stop_of(passes),
        sigma=sigma_of(method, passes),
        probes=probes,
        norms=norms,
        lens=lens,
        attention=attention,
        causal=causal,
    )


def _retrieval(
    lm: LatentLM, method: Method, passes: Sequence[ReferencePass], params: Any, limits: Decoding
) -> dict[str, RetrievalAccuracy]:
    """All three chains: what is written after a right prefix, the model's own, and the reference's."""
    requests = []
    for each in passes:
        example = each.example
        requests.append(
            Request(example.id, example.question, params, limits, each.row.seed, keep_latents=True)
        )
    directions_VD = directions(lm)
    own = []
    completions = fold(lm, Engine(lm, method, BATCH).stream(requests))
    for completion in progress.track(completions, "think", len(requests)):
        # A new engine numbers its requests from 0, in their order; they finish in another.
        own.append((completion.number, own_ranks(lm, passes[completion.number], completion, directions_VD)))
    written, reference, in_order = [], [], []
    for each in passes:
        written += written_ranks(each, directions_VD)
        reference += reference_ranks(each, directions_VD)
    for _, ranks in sorted(own, key=lambda numbered: numbered[0]):
        in_order += ranks
    return {
        "written": retrieval_accuracy(written),
        "own": retrieval_accuracy(in_order),
        "reference": retrieval_accuracy(reference),
    }
