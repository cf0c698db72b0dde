"""RuPLaR: one soft token for each reasoning step, learnt from a prior that a rule makes of the step's tokens (Luo et
al. 2026, "RuPLaR: Efficient Latent Compression of LLM Reasoning Chains with Rule-Based Priors From Multi-Step to
One-Step", arXiv 2605.09346; code xiaocen-luo/RuPLaR).

    step            << 600 * 30 / 100 = 180 >>          operators and numbers count, nothing else
    prior pi        600 * 30 / 100 = 180                0.2, in equal shares
                                     180                0.8 on the result, what follows the last "="
    row             question ###  z_1 .. z_K  ###  answer EOS              z_i = sum over v of pi_i(v) e(v)

    L = L_ce + kl_weight * L_kl + align_weight * L_align
    L_ce    = mean over (###, answer, EOS) of -log p(token | question, z_1 .. z_K, tokens before)
    L_kl    = mean over i of KL(pi_i || p(. | question, z_1 .. z_i-1))
    L_align = mean over i of KL(softmax(h_q) || softmax(h_i))

e is the embedding module's output. h_i is the last hidden state (after the final norm) at z_i, and h_q the one at the
question's last token before the separator; the softmax is over their D values. The prior's soft tokens are fed, so
that one forward trains all of a row. At inference z_i is mixed by the LM head's own probabilities at temperature 1, and
the row is done when the LM head chooses ###.

Of the paper's three priors this is "Mix", its best on average (its Table 1); a step without a result has equal shares.

Departures, from the published code and the paper's Table 1; the paper's text was not read. A token that occurs twice in
a step counts twice; the code counts it once. A step without "=" has no result (in the code, its last number), and one
without numbers keeps all of its tokens, so that the method learns from any text. The code leaves tokens of a prior of
0.01 or less out of L_kl ("KL-Focus"); here all count, because a step of words may have no other. At inference the
`LIKELIEST` tokens are mixed, not the whole vocabulary. If a request is sampled, the stop is drawn; in the code it is
always argmax. Embeddings take gradient where they are fed (the code detaches them). Each loss is averaged within its
row.

Shape suffixes: B rows, T reasoning tokens, K steps, A answer, N likeliest tokens, V vocabulary, D width.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from colar import checks
from colar.data.example import Example
from colar.methods import base, grouping, losses
from colar.methods.base import Batch, NoParams, Row
from colar.methods.thinking import ThinkState, Thought, next_tokens
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged
from colar.ops.sampling import probability
from colar.template.template import Template

OPERATION = r"[0-9+\-*/=.]*[0-9+\-*/=][0-9+\-*/=.]*"
"""Tokens that the rule counts; a full stop alone is not one of them."""
NUMBER = r"[0-9+\-*/=.]*[0-9][0-9+\-*/=.]*"
"""Counted tokens with a digit; a step that has none of them is one of words."""
EQUALS = r"[0-9+\-*/.]*=[0-9+\-*/=.]*"
"""Counted tokens with "=", after which a result follows."""
LIKELIEST = 64
"""Number of tokens that are mixed into a soft token at inference."""


@dataclass(frozen=True)
class RuplarConfig:
    """The prior and the weights of the loss's terms; defaults are the paper's."""

    result_share: float = 0.8
    """Share of the prior that the result has to itself, 0 to 1; the rest is shared by all of the step's tokens."""
    kl_weight: float = 1.0
    """Weight of the divergence from the prior, 0 or more."""
    align_weight: float = 1.0
    """Weight of the alignment of question and thoughts, 0 or more."""

    def __post_init__(self) -> None:
        checks.check_number("method.result_share", self.result_share, 0, 1)
        checks.check_number("method.kl_weight", self.kl_weight, 0)
        checks.check_number("method.align_weight", self.align_weight, 0)


class Ruplar(base.Method):
    name: ClassVar[str] = "ruplar"
    Config: ClassVar[type] = RuplarConfig
    thinks_in_latents: ClassVar[bool] = True

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        counted = set(template.ids_matching(OPERATION))
        numbers = set(template.ids_matching(NUMBER))
        # A step of words alone keeps all of its tokens.
        steps = [
            step if numbers.isdisjoint(step) else [token for token in step if token in counted]
            for step in row.steps
        ]
        return replace(row, steps=[step for step in steps if step])

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce, kl, align: the three terms."""
        prior_BKT, sizes_BK = self.priors(lm, batch)
        counts_B = grouping.count_groups(sizes_BK)
        hidden_BTD = losses.hidden_around(lm, batch, self.mix(lm, batch, prior_BKT), counts_B)
        K, A = prior_BKT.shape[1], batch.answer_ids.shape[1]
        # Predictions are made one position ahead: thoughts from the question's last position on, the answer from the
        # last thought on.
        opening_B = batch.question_lengths - 1
        hidden_BAD = ragged.take_from(hidden_BTD, opening_B + counts_B, A)
        answer_BA = ragged.length_mask(batch.answer_lengths, A)
        ce_B = losses.token_loss(lm, hidden_BAD, batch.answer_ids, answer_BA)
        kl_B = prior_loss(lm, ragged.take_from(hidden_BTD, opening_B, K), batch.chain_ids, prior_BKT)

        question_B1D = ragged.take_from(hidden_BTD, (opening_B - 1).clamp(min=0), 1)
        thoughts_BKD = ragged.take_from(hidden_BTD, opening_B + 1, K)
        apart_BK = divergence(question_B1D, thoughts_BKD)
        align_B = ragged.row_mean(apart_BK, ragged.length_mask(counts_B, K))
        return {"ce": ce_B, "kl": self.config.kl_weight * kl_B, "align": self.config.align_weight * align_B}

    def priors(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The weight of each chain token in each step's prior, (B, K, T) float32, and the steps' sizes, (B, K)."""
        sizes_BK = step_sizes(batch)
        member_BKT = grouping.members(sizes_BK, batch.chain_ids.shape[1])

        equals = devices.constant(lm.template.ids_matching(EQUALS), batch.chain_ids.device)
        equals_BKT = member_BKT & (batch.chain_ids[..., None] == equals).any(-1)[:, None]
        n_equals_BK1 = equals_BKT.sum(-1, keepdim=True)
        # Tokens of the result have all of the step's "=" before them.
        behind_BKT = equals_BKT.cumsum(-1) == n_equals_BK1
        result_BKT = member_BKT & ~equals_BKT & behind_BKT & (n_equals_BK1 > 0)
        n_result_BK1 = result_BKT.sum(-1, keepdim=True)
        result_share_BK1 = torch.where(n_result_BK1 > 0, self.config.result_share, 0.0)
        shared_BKT = member_BKT / sizes_BK[..., None].clamp(min=1)
        result_only_BKT = result_BKT / n_result_BK1.clamp(min=1)
        return (1 - result_share_BK1) * shared_BKT + result_share_BK1 * result_only_BKT, sizes_BK

    def mix(self, lm: LatentLM, batch: Batch, prior_BKT: Tensor) -> Tensor:
        """The soft tokens of these priors, (B, K, D)."""
        chain_BTD = lm.embed(batch.chain_ids)
        prior_BKT = devices.beside(prior_BKT, chain_BTD)
        # Under autocast the product would be taken in bfloat16.
        with torch.autocast(chain_BTD.device.type, enabled=False):
            soft_BKD = prior_BKT @ chain_BTD.float()
        return soft_BKD.to(chain_BTD.dtype)

    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The priors' soft tokens."""
        prior_BKT, sizes_BK = self.priors(lm, batch)
        return self.mix(lm, batch, prior_BKT), sizes_BK

    def thinks_whole_chain(self, params: NoParams) -> bool:
        # A soft token stands for all tokens of a step, but is displayed as the single nearest one.
        return False

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        logits_BV = state.logits()
        chosen_B = next_tokens(state)
        info = {}
        if state.wants_info:
            info["stop_probability"] = probability(lm.template.separator_id, logits_BV)
        soft_BD = soft_token(lm, logits_BV, LIKELIEST)
        return Thought(soft_BD, chosen_B == lm.template.separator_id, torch.full_like(chosen_B, -1), info)


def step_sizes(batch: Batch) -> Tensor:
    """The number of tokens of each step, (B, K); 0 after a row's last one."""
    # The batch's own numbers are meaningless after a row's last step.
    ends_BK = torch.minimum(batch.step_sizes.cumsum(1), batch.chain_lengths[:, None])
    return ends_BK - pad(ends_BK, (1, 0))[:, :-1]


def soft_token(lm: LatentLM, logits_BV: Tensor, n: int) -> Tensor:
    """The embeddings of each row's n likeliest tokens, mixed by their probabilities: (B, D).

    These tokens carry nearly all of a trained model's probability, and mixing the whole vocabulary would read the whole
    embedding table at every step.
    """
    likeliest = logits_BV.topk(min(n, logits_BV.shape[1]))
    probability_BN = (likeliest.values - logits_BV.logsumexp(-1, keepdim=True)).exp()
    weight_BN = probability_BN / probability_BN.sum(-1, keepdim=True)
    embeds_BND = lm.embed(likeliest.indices)
    # The weights are float32, so that half-precision embeddings are summed in float32 too.
    soft_BD: Tensor = (weight_BN[..., None] * embeds_BND).sum(1)
    return soft_BD.to(embeds_BND.dtype)


def prior_loss(lm: LatentLM, hidden_BKD: Tensor, chain_ids: Tensor, prior_BKT: Tensor) -> Tensor:
    """Mean over each row's steps of the divergence of the LM head's distribution from the prior, (B,).

    `hidden_BKD` are the hidden states before each thought, `prior_BKT` the weights of the chain's tokens in its prior.
    """
    # A token may occur twice in a step: its probability is the sum of its weights.
    same_BTT = (chain_ids[:, :, None] == chain_ids[:, None, :]).float()
    mass_BKT = prior_BKT @ same_BTT
    entropy_BK = -torch.where(prior_BKT > 0, prior_BKT * mass_BKT.log(), 0).sum(-1)
    entropy_B = ragged.row_mean(entropy_BK, prior_BKT.sum(-1) > 0)
    labels_BKT = chain_ids[:, None].expand(-1, prior_BKT.shape[1], -1)
    cross_entropy_B = losses.cross_entropy(lm, hidden_BKD, labels_BKT, prior_BKT)
    return cross_entropy_B - devices.beside(entropy_B, cross_entropy_B)


def divergence(question_B1D: Tensor, thoughts_BKD: Tensor) -> Tensor:
    """KL(softmax over D of the question's state || that of each thought), (B, K)."""
    question_B1D = question_B1D.float().log_softmax(-1)
    return (question_B1D.exp() * (question_B1D - thoughts_BKD.float().log_softmax(-1))).sum(-1)
