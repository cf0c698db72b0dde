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
from colar.data.example import Example
from colar.engine.request import GREEDY, Completion, Decoding
from colar.look.calibration import SigmaCalibration, StopCalibration, sigma_of, stop_of
from colar.look.causal import CausalTests, causal_tests
from colar.look.chains import BATCH, answer_all, requests_of
from colar.look.layer_states import AttentionMass, LayerNorms, LogitLens, attention_of, lens_of, norms_of
from colar.look.probe import Probe, probe_of
from colar.look.reference_chain import Kind, Measured, ReferencePass, reference_passes, require_groups
from colar.look.retrieval import directions
from colar.look.retrieval_accuracy import (
    RetrievalAccuracy,
    own_ranks,
    reference_ranks,
    retrieval_accuracy,
    written_ranks,
)
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

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
    causal: CausalTests | None
    """None where it was left out."""


def look_inside(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Any,
    limits: Decoding = GREEDY,
    *,
    look: int = 32,
    seed: int = 0,
    completions: Sequence[Completion] | None = None,
    causal: bool = True,
) -> Inside:
    """Measure the examples that have a reference chain. ValueError where thoughts stand for no tokens of it.

    `completions` are the model's own of all `examples`, if it has answered them already (`chains.requests_of`).
    Without `causal` no thoughts are changed, which takes longest.
    """
    # As indices: `completions` belong to all examples, those without steps too.
    kept = [i for i, example in enumerate(examples) if example.steps]
    own = None if completions is None else [completions[i] for i in kept]
    examples = [examples[i] for i in kept]
    require_groups(lm, method, examples, params)
    if own is None:
        own = answer_all(lm, method, requests_of(examples, params, limits))
    n = len(examples)
    # A list: all measurements but `causal` read the same passes.
    passes = list(progress.track(reference_passes(lm, method, examples, params), "read", n))
    retrieval = _retrieval(lm, passes, own)
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
    changed = None
    if causal:
        looked = own[:look]
        changed = causal_tests(
            lm, method, examples[:look], params, limits, seed=seed, max_batch=BATCH, completions=looked
        )
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
        causal=changed,
    )


def _retrieval(
    lm: LatentLM, passes: Sequence[ReferencePass], completions: Sequence[Completion]
) -> dict[str, RetrievalAccuracy]:
    """All three chains: what is written after a right prefix, the model's own, and the reference's."""
    directions_VD = directions(lm)
    written, own, reference = [], [], []
    for each, completion in zip(passes, completions, strict=True):
        written += written_ranks(each, directions_VD)
        own += own_ranks(lm, each, completion, directions_VD)
        reference += reference_ranks(each, directions_VD)
    return {
        "written": retrieval_accuracy(written),
        "own": retrieval_accuracy(own),
        "reference": retrieval_accuracy(reference),
    }
