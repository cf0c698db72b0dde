"""Whether a backbone computes the same under masks and positions of ours as by itself: a few tokens go both ways.

A config does not say it. BART takes no positions, ALiBi's bias follows the column and not the position, Bloom takes no
mask of four dimensions. Such a model would give wrong answers, and no error.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from colar.model import added_rows, context, masks
from colar.ops import trees

TOKENS = 40
"""Of a row, where the model's context allows it: enough for ALiBi's bias to show."""
WINDOW = 8
"""Positions that a layer with a window sees while it is probed."""

_FOUND: dict[tuple[Any, ...], str | None] = {}
"""What was found. An architecture is asked once in a process, whatever its weights are."""


def trees_differ(lm: PreTrainedModel) -> str | None:
    """What keeps rows that share their beginning from one forward, as the end of a sentence; None where nothing does.

    Two rows share a beginning: each by itself, and as the branches of one sequence (`ops/trees.py`).
    """
    return masks.refusal(lm) or ask(lm, _through_a_tree)


def ask(lm: PreTrainedModel, probe: Callable[[PreTrainedModel], tuple[Tensor, Tensor]]) -> str | None:
    """What is wrong with `lm`, as the end of a sentence about it, by a probe; None where nothing is.

    The probe returns hidden states (T, D) by our way, and by the backbone's own.
    """
    # A model of shapes has no numbers to compare.
    if lm.device.type == "meta":
        return None
    key = (probe.__qualname__, type(lm), lm.dtype, lm.config.to_json_string())
    if key not in _FOUND:
        _FOUND[key] = _outcome(lm, probe)
    return _FOUND[key]


@torch.no_grad()
def _outcome(lm: PreTrainedModel, probe: Callable[[PreTrainedModel], tuple[Tensor, Tensor]]) -> str | None:
    # Dropout would make the two differ.
    was_training = lm.training
    lm.eval()
    try:
        with _narrow(lm.config.get_text_config()):
            ours_TD, theirs_TD = probe(lm)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever it is, it comes from the architecture's own code.
        return f"cannot compute under a mask of ours ({first_line(error)})"
    finally:
        lm.train(was_training)
    apart_T = (ours_TD - theirs_TD).float().norm(dim=1) / theirs_TD.float().norm(dim=1)
    # The median: rounding may send a single token to other experts.
    apart = apart_T.median().item()
    if apart > _tolerance(theirs_TD.dtype):
        return (
            "does not follow the masks and positions that it is given "
            f"(hidden states differ by {apart:.2g} of their norm from those of a row by itself)"
        )
    return None


@contextlib.contextmanager
def _narrow(config: Any) -> Iterator[None]:
    """Give attention a window of `WINDOW` positions inside the block, where it has a larger one.

    Rows of the probes end long before a window of thousands of positions: they would say nothing about it.
    """
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window <= WINDOW:
        yield
        return
    config.sliding_window = WINDOW
    try:
        yield
    finally:
        config.sliding_window = window


def _tolerance(dtype: torch.dtype) -> float:
    """How far hidden states may be apart by rounding alone, as a part of their norm."""
    if dtype.itemsize < 4:
        return 0.05
    # TF32 has as many digits as float16.
    return 1e-4 if torch.get_float32_matmul_precision() == "highest" else 0.01


def _through_a_tree(lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
    embeds_BTD = embeds_of_rows(lm, 2)
    length = embeds_BTD.shape[1]
    shared = length // 4
    embeds_BTD[1, :shared] = embeds_BTD[0, :shared]
    theirs_BTD = lm.base_model(inputs_embeds=embeds_BTD, use_cache=False).last_hidden_state

    # The ids of what is shared; any will do.
    ids_BL = torch.zeros(2, shared, dtype=torch.int64, device=lm.device)
    tree = trees.plan(ids_BL, torch.full((2,), shared), torch.full((2,), length), length)
    assert tree is not None, "two rows with the same ids"
    mask = masks.additive(lm.config.get_text_config(), tree.seen(), tree.behind(), like=embeds_BTD)
    output = lm.base_model(
        inputs_embeds=tree.gather(embeds_BTD), attention_mask=mask, position_ids=tree.places, use_cache=False
    )
    ours_BTD = tree.scatter(output.last_hidden_state)
    # The second row: in the sequence it stands behind the first one's branch.
    return ours_BTD[1], theirs_BTD[1]


def first_line(error: Exception) -> str:
    """An error of other code, short enough for a line of ours."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 120, placeholder=' ...')}"


def embeds_of_rows(lm: PreTrainedModel, count: int) -> Tensor:
    """(count, T, D): embeddings of tokens from all over the vocabulary, T at most `TOKENS`."""
    return added_rows.embed(lm.get_input_embeddings(), ids_of_rows(lm, count, TOKENS))


def ids_of_rows(lm: PreTrainedModel, count: int, most: int) -> Tensor:
    """(count, T): ids from all over the vocabulary, T at most `most`."""
    length = min(most, context.of(lm.config.get_text_config()).length)
    # Any order will do. By a large prime, neighbours are far apart in the vocabulary. From 1 on: 0 is padding in many,
    # which a model might leave out by itself.
    ids = torch.arange(1, 1 + count * length, device=lm.device) * 7919 % added_rows.vocabulary_size(lm)
    return ids.reshape(count, length)
