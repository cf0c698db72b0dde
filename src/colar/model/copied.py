"""A copy of the backbone that is trained for itself, beside it: a second model between the same embeddings and LM head.

Shape suffixes: P rows, T positions, D width.
"""

from __future__ import annotations

import copy
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from colar.model.latent_lm import LatentLM


class BackboneCopy(nn.Module):
    """All of a backbone but its embedding and its LM head, in float32: embeddings (P, T, D) -> last hidden states.

    It starts from the weights that the backbone has now, those of an adapter added to them, and all of its weights are
    trained, also where the backbone itself is frozen. ValueError for weights of 4 bits.
    """

    def __init__(self, lm: LatentLM) -> None:
        super().__init__()
        if getattr(lm.causal_lm, "is_loaded_in_4bit", False):
            raise ValueError("model.load_in_4bit must be false: a copy of the backbone is trained in float32")
        # Both ends of the vocabulary are left out of the copy: they are most of a small model's weights.
        ends = (lm.causal_lm.get_input_embeddings(), lm.causal_lm.get_output_embeddings())
        twin: Any = copy.deepcopy(lm.lm, {id(end): nn.Identity() for end in ends})
        if isinstance(twin, PeftModel):
            twin = twin.merge_and_unload()
        self.body = twin.base_model.float().requires_grad_(True)

    def forward(self, embeds_PTD: Tensor) -> Tensor:
        """Rows start at position 0 and are padded on the right, where causal attention does not see it."""
        dtype = next(self.body.parameters()).dtype
        output = self.body(inputs_embeds=embeds_PTD.to(dtype), use_cache=False)
        hidden_PTD: Tensor = output.last_hidden_state
        return hidden_PTD.to(embeds_PTD.dtype)
