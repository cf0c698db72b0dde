"""SIM-CoT: Coconut whose latents are supervised step by step (Wei et al. 2025, "SIM-CoT: Supervised Implicit
Chain-of-Thought"; formulas from the authors' code, InternLM/SIM-CoT at f3ae967, `Coconut/coconut.py`).

    stage 2    question ###   h1 h2 h3 h4   | t6        ###  answer EOS         as Coconut, n_latents_per_step = 2
    decoder       h1 h2 t1 t2 t3 EOS                                            the first step, from its latents
                  h3 h4 t4 t5 EOS                                               the second

In training an auxiliary decoder, a copy of the model, reads the latents of each replaced step as a prefix of
embeddings, and writes the step. Coconut learns from the answer and the remaining steps alone; here the latents of a
step have to hold that step, so that many latents do not become alike.

    L = L_Coconut + decoder_weight * L_decoder
    L_decoder = mean over texts g of  mean over (tokens of text g, EOS) of -log q(token | its latents, tokens before)

q is the decoder. The gradient reaches it and, through the latents, the model. Each n_latents_per_step latents have a
text: step g, or the answer if the row has no step g; in the last stage the last text has all remaining steps. Thinking
is Coconut's and needs no decoder, so a published checkpoint does not hold it.

Departures. Those of `coconut.py`. A step's cross-entropy is a mean over its tokens, as in the code for CODI; the code
for Coconut sums them. The decoder starts from the weights that training starts from, CoT-SFT's in the recipes; the
code's starts from the pretrained model. It reads the model's embeddings, as in the code, and shares the model's LM
head, where the code's has one of its own: under LoRA the head is frozen, and the decoder's layers are trained in full.
The code goes through the curriculum twice, at first without the decoder; here one run has it from the start. SIM-CoT on
CODI, which the paper has for Llama, is not implemented.

Shape suffixes: B rows, G texts of a row, P texts of all rows, C latents of a text, K latents, N tokens of a text, T
positions of the decoder, X tokens of all texts, D width.
"""

import copy
import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor, nn

from colar import checks
from colar.data.example import Example
from colar.methods import grouping, losses
from colar.methods.base import Batch, Row
from colar.methods.coconut import Coconut, CoconutConfig
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.template.template import Template


@dataclass(frozen=True)
class SimCotConfig(CoconutConfig):
    """Coconut's curriculum and the decoder's weight; defaults are those of the code's GSM8k run (GPT-2)."""

    n_stages: int = 5
    """Stages in which a step more is replaced, 1 or more; one more follows, in which no steps are left."""
    decoder_weight: float = 1.0
    """Weight of the decoder's cross-entropy, 0 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_number("method.decoder_weight", self.decoder_weight, 0)


class SimCot(Coconut):
    name: ClassVar[str] = "sim_cot"
    Config: ClassVar[type] = SimCotConfig

    def training_modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        return {"step_decoder": BackboneCopy(lm)}

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        steps = template.steps(example.steps)
        replaced = steps[: len(steps) - len(row.steps)]
        n_texts = row.n_latents // self.config.n_latents_per_step
        return replace(row, latent_texts=texts_of(replaced, n_texts, row.answer[1:], template.eos_id))

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: Coconut's; decoder: the cross-entropy of each text, given its latents."""
        ce_B, fed_BKD = self.ce_and_latents(lm, batch)
        return {"ce": ce_B, "decoder": self.config.decoder_weight * self._decoder_loss(lm, batch, fed_BKD)}

    def positions(self, batch: Batch) -> Tensor:
        # The decoder reads the latents once more, and the texts after them.
        return batch.positions() + batch.n_latents + batch.text_sizes.sum(1)

    def _decoder_loss(self, lm: LatentLM, batch: Batch, fed_BKD: Tensor) -> Tensor:
        """The decoder's cross-entropy, a mean over a row's texts, (B,)."""
        C = self.config.n_latents_per_step
        # Rows taken from a batch keep its padded width, but may have fewer latents.
        G = fed_BKD.shape[1] // C
        sizes_BG = batch.text_sizes[:, :G]
        ids_BGN, real_BGN = grouping.tokens_of_groups(batch.text_ids, sizes_BG)
        # A row has no latents after those of its last text.
        there_BG = sizes_BG > 0
        latents_PCD = ragged.take_masked(fed_BKD.reshape(-1, G, C, lm.width), there_BG)
        ids_PN, real_PN = (ragged.take_masked(values, there_BG) for values in (ids_BGN, real_BGN))

        # Every text has the same number of latents before it, and padding only after it.
        N = ids_PN.shape[1]
        padded_PN = nn.functional.pad(ids_PN, (0, ragged.round_up(C + N) - C - N))
        hidden_PTD = lm.extra["step_decoder"](torch.cat([latents_PCD, lm.embed(padded_PN)], dim=1))
        # The last latent predicts the text's first token.
        hidden_PND = hidden_PTD[:, C - 1 : C - 1 + N]
        loss_P = losses.token_loss(lm, hidden_PND, ids_PN, real_PN)
        return ragged.row_mean(ragged.put_masked(loss_P, there_BG), there_BG)


class BackboneCopy(nn.Module):
    """A backbone without its embedding and its LM head, in float32: embeddings (P, T, D) -> last hidden states.

    It starts from the backbone's current weights, with an adapter merged into them, and all of its weights are trained,
    even if the backbone itself is frozen. ValueError for weights of 4 bits.
    """

    def __init__(self, lm: LatentLM) -> None:
        super().__init__()
        if getattr(lm.causal_lm, "is_loaded_in_4bit", False):
            raise ValueError("model.load_in_4bit must be false: a copy of the backbone is trained in float32")
        # Embedding and LM head are left out of the copy, because they are most of a small model's weights.
        ends = (lm.causal_lm.get_input_embeddings(), lm.causal_lm.get_output_embeddings())
        twin: Any = copy.deepcopy(lm.lm, {id(end): nn.Identity() for end in ends})
        if isinstance(twin, PeftModel):
            twin = twin.merge_and_unload()
        self.body = twin.base_model.float().requires_grad_(True)

    def forward(self, embeds_PTD: Tensor) -> Tensor:
        """Rows start at position 0 and are padded on the right, where causal attention does not see the padding."""
        dtype = next(self.body.parameters()).dtype
        output = self.body(inputs_embeds=embeds_PTD.to(dtype), use_cache=False)
        hidden_PTD: Tensor = output.last_hidden_state
        return hidden_PTD.to(embeds_PTD.dtype)


def texts_of(replaced: list[list[int]], n_texts: int, answer: list[int], eos_id: int) -> list[list[int]]:
    """The texts that the latents stand for, each ending with EOS, as `answer` does.

    Each text is one step, the last text all remaining steps; the answer if no step is left.
    """
    texts = []
    for i in range(n_texts):
        steps = replaced[i:] if i == n_texts - 1 else replaced[i : i + 1]
        text = [*itertools.chain.from_iterable(steps)]
        texts.append([*text, eos_id] if text else answer)
    return texts
