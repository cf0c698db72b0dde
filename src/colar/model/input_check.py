"""A probe of what colar feeds a backbone and reads from it, at load: embeddings in, hidden states and logits out.

A few tokens go through the backbone's own forward as ids, and through ours as embeddings, in the dtype that is used.
Beside them goes a row of embeddings that are no token's, as latents are. A mistake would otherwise show only as a low
accuracy after training, or as an error of the first latent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from colar.model import mask_check

TOKENS = 4
"""Positions of a row."""


@torch.no_grad()
def check(lm: PreTrainedModel, head_logits: Callable[[PreTrainedModel, Tensor], Tensor]) -> None:
    """ValueError for an architecture that computes something else from embeddings than from ids, or nothing at all.

    `head_logits` makes logits of hidden states as colar does.
    """
    # A model of shapes has no numbers to compare.
    if lm.device.type == "meta":
        return
    # Dropout would make the two differ.
    was_training = lm.training
    lm.eval()
    try:
        reason = _refusal(lm, head_logits)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # It comes from the architecture's own code.
        reason = (
            f"cannot compute from embeddings alone ({mask_check.first_line(error)}), and latents have no ids"
        )
    finally:
        lm.train(was_training)
    if reason is not None:
        raise ValueError(f"{type(lm).__name__} {reason}: colar can neither train nor run this backbone")


def _refusal(lm: PreTrainedModel, head_logits: Callable[[PreTrainedModel, Tensor], Tensor]) -> str | None:
    """What keeps a backbone from being fed embeddings, as a part of a sentence about it; None where nothing does."""
    ids_BT = mask_check.ids_of_rows(lm, 2, TOKENS)
    embeds_BTD = lm.get_input_embeddings()(ids_BT)
    theirs_TV = lm(input_ids=ids_BT, use_cache=False).logits[0].float()
    # The second row becomes latents. Both batches have the same shape, so that the first rows differ by no rounding.
    embeds_BTD[1] = embeds_BTD.mean(0)
    hidden_BTD = lm.base_model(inputs_embeds=embeds_BTD, use_cache=False).last_hidden_state
    widths = {embeds_BTD.shape[-1], hidden_BTD.shape[-1], lm.config.get_text_config().hidden_size}
    if len(widths) > 1:
        sizes = " and ".join(map(str, sorted(widths)))
        return f"has embeddings and hidden states of different widths ({sizes}), and latents are both"
    if _same(theirs_TV, head_logits(lm, hidden_BTD)[0]):
        return None
    if _same(theirs_TV, lm(inputs_embeds=embeds_BTD, use_cache=False).logits[0].float()):
        return "computes its logits from hidden states in a way that is not known here"
    return (
        "computes something else from the embeddings of tokens than from their ids (per-layer embeddings, as those of "
        "Gemma 3n, are looked up by id), and latents have no ids"
    )


def _same(theirs_TV: Tensor, ours_TV: Tensor) -> bool:
    # Loose enough for bfloat16; a scale or cap that is missing changes logits by far more.
    return torch.allclose(theirs_TV, ours_TV, rtol=1e-2, atol=1e-3 * theirs_TV.abs().max().item())
