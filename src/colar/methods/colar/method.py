"""CoLaR: compressed latent reasoning (the paper's sections 3.1 and 3.2).

    fed        question  (Thinking speed: 2)  ###   l1   l2   l3   ###   answer
    LM head                                   t1    t2   t3   ###  answer EOS     t_k: the tokens of group k
    latent head                               l1    l2   l3                       mean and spread of the next latent

A row's factor c is drawn when it is encoded, its reasoning embeddings are merged in groups of c
(`ops/compress.py`), and the next latent is learnt at the position before it. Two ways to predict it are in files of
their own: as an embedding (`gaussian.py`, the paper's) or token by token (`sequential.py`, ours). With the paper's,
two heads are trained at the same positions:

    L_comp   = mean over L_c + L_a of -log p(label)                             equation 1
    L_latent = mean over L_c and D of  soft-MSE  E[(mu + sigma eps - e)^2] - alpha * entropy       equation 3
               or of the Gaussian      NLL       (e - mu)^2 / (2 sigma^2) + log sigma              equation 2

Departures. The paper labels a group by one of its tokens, drawn at random (`chain_label: sampled`); our default is
the expectation over that draw, -mean over the group of log p: the same forward, the same gradient on average, none
of its noise, and far fewer rows to learn from (lab/LOG.md). The expectation in soft-MSE has a closed form too,
(mu - e)^2 + sigma^2 (its sigma settles at sqrt(alpha / 2)). The NLL has the square that the paper's formula
misses, the last group is scaled by its own size, and c is drawn per row, not per batch. Targets are detached
and divided by sigma_e, the standard deviation of the embedding module's output, and the embeddings are frozen:
they are the targets. c need not be whole (`ops/groups.py`).

Shape suffixes: B rows, T reasoning tokens, K latents, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from colar.data.example import Example
from colar.methods import base
from colar.methods.base import Batch, Row, ThinkState, Thought
from colar.methods.colar import merging, shortlist
from colar.methods.colar.config import ColarConfig, ColarParams, Deck
from colar.methods.colar.fed import Fed
from colar.methods.colar.gaussian import LatentPredictor
from colar.methods.colar.sequential import TokenPredictor
from colar.methods.efforts import spread
from colar.methods.rollouts import LatentLogprob, Rollouts, Scores
from colar.model.latent_lm import LatentLM
from colar.ops import groups
from colar.template.template import Template


class Colar(base.Method):
    name: ClassVar[str] = "colar"
    Config: ClassVar[type] = ColarConfig
    draws: ClassVar[bool] = True
    latent: ClassVar[bool] = True
    Params: ClassVar[type] = ColarParams
    measured: ClassVar[frozenset[str]] = frozenset({"shortlist_ids", "sigma_e"})
    removed: ClassVar[Mapping[str, Any]] = {"own_latents": 0.0}

    @property
    def predictor(self) -> LatentPredictor | TokenPredictor:
        """How the next latent is predicted: `method.head`."""
        # Made at each use: `prepare` replaces the config, and a kept predictor would have the old one.
        return (
            TokenPredictor(self.config) if self.config.head == "sequential" else LatentPredictor(self.config)
        )

    @property
    def unrolled(self) -> bool:
        # Where groups end before unsure tokens, the model is asked first how sure it is.
        return any(self.config.confidence_thresholds)

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        return self.predictor.modules(lm)

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        if not self.predictor.trains_embeddings:
            lm.freeze_embeddings()
        if self.config.sigma_e is None:
            self.config = dataclasses.replace(self.config, sigma_e=lm.embedding_std())
        return self._with_shortlist(lm, list(examples)) if self.config.shortlist else examples

    def _with_shortlist(self, lm: LatentLM, examples: list[Example]) -> list[Example]:
        """Count the shortlist in the examples; one that came with the config is kept, and what it lacks is said."""
        known = self.config.shortlist_ids
        if known is None:
            counted = shortlist.count(lm.template, examples)
            self.config = dataclasses.replace(self.config, shortlist_ids=counted)
        else:
            shortlist.warn_of_others(lm.template, examples, known)
        return examples

    def prompt(self, params: ColarParams) -> str:
        return f"(Thinking speed: {params.compression_factor:g})"

    def trained(self, params: ColarParams) -> str | None:
        warnings = []
        c, factors = params.compression_factor, self.config.factors
        # A pretrained model's chains interpolate between its factors, a small model's do not (results/toy/factors): the
        # caller is warned.
        if c not in factors:
            warnings.append(f"compression_factor {c:g} was not trained (trained: {factors}): expect less")
        own = self.predictor.check(params)
        if own:
            warnings.append(own)
        return "; ".join(warnings) or None

    # Serving

    def choices(self) -> Mapping[str, Sequence[Any]]:
        return {
            "compression_factor": self.config.factors.offered(),
            "snap": self.predictor.snaps,
            "confidence_threshold": sorted(set(self.config.confidence_thresholds)),
        }

    def efforts(self) -> Mapping[str, Mapping[str, Any]]:
        return spread("compression_factor", self.config.factors.offered())

    # Learning

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        (row,) = self.encode_draws(template, example, rng, epoch, 1)
        return row

    def encode_draws(
        self, template: Template, example: Example, rng: Random, epoch: float, n: int
    ) -> list[Row]:
        factors = self.config.factors.draw_several(rng, n)
        thresholds = Deck(self.config.confidence_thresholds)
        return [self._encode(template, example, rng, c, thresholds) for c in factors]

    def _encode(self, template: Template, example: Example, rng: Random, c: float, thresholds: Deck) -> Row:
        seed = rng.getrandbits(62)
        # Drawn last, and only where there is a choice: rows without thresholds stay what they were.
        choice = len(thresholds.values) > 1
        threshold = thresholds.draw(rng) if choice else thresholds.values[0]
        params = ColarParams(c, confidence_threshold=threshold)
        return base.encode_row(template, example, params, self.prompt(params), seed)

    def thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        fed = self._fed(lm, batch)
        return fed.latents_BKD, fed.counts_B

    def group_sizes(self, lm: LatentLM, batch: Batch) -> Tensor:
        return self._fed(lm, batch).sizes_BK

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        return self.predictor.loss(lm, batch, self._fed(lm, batch))

    def _fed(self, lm: LatentLM, batch: Batch) -> Fed:
        """The latents of the rows' chains."""
        # Latents that are targets must not be moved by the loss; those that are inputs alone may.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.predictor.trains_embeddings):
            return self._grouped(lm, batch)

    def _grouped(self, lm: LatentLM, batch: Batch) -> Fed:
        c_B = batch.params["compression_factor"]
        phase_B = self.predictor.phase(batch.seeds)
        return self._merged(lm, batch, self._sizes(lm, batch, c_B, phase_B))

    def _sizes(self, lm: LatentLM, batch: Batch, c_B: Tensor, phase_B: Tensor) -> Tensor:
        """The tokens of each group, (B, K)."""
        predictor = self.predictor
        lengths_B = batch.chain_lengths
        units = predictor.units(lm)
        gated = bool((batch.params["confidence_threshold"] > 0).any())
        if units.plain and not gated:
            return groups.sizes(lengths_B, c_B, phase_B)
        bounds_BT = units.bounds(batch.chain_ids, predictor.numbers(c_B))
        if gated and isinstance(predictor, TokenPredictor):
            # A first pass says how far the model is sure; the loss feeds groups that end there.
            bounds_BT = torch.minimum(bounds_BT, predictor.bounds(lm, batch))
        unit_BT = None if units.plain else units.lengths(batch.chain_ids, predictor.numbers(c_B))
        return groups.cut_sizes(lengths_B, c_B, phase_B, bounds_BT, unit_BT)

    def _merged(self, lm: LatentLM, batch: Batch, sizes_BK: Tensor) -> Fed:
        units = self.predictor.units(lm)
        latents_BKD = merging.merge_chains(lm, batch.chain_ids, sizes_BK, self.config.merge, units)
        return Fed(latents_BKD, sizes_BK)

    # Reinforcement

    @property
    def explores(self) -> bool:
        """Whether latents are drawn (at a latent_temperature above 0)."""
        return bool(self.config.head != "deterministic")

    @property
    def has_density(self) -> bool:
        return self.predictor.has_density

    def logps(self, lm: LatentLM, rollouts: Rollouts, latent_logprob: LatentLogprob) -> Scores:
        return self.predictor.logps(lm, rollouts, latent_logprob)

    def sampled_logps(
        self, info: Mapping[str, Tensor], stopped: Tensor, latent_logprob: LatentLogprob
    ) -> Tensor:
        return self.predictor.sampled_logps(info, stopped, latent_logprob)

    # Thinking

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return self.predictor.think(lm, state)
