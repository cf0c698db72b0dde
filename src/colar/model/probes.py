"""Probes of a backbone: embeddings and our masks must give the same results as the backbone itself.

    check_inputs     at load: embeddings in, hidden states and logits out, as training and engine feed and read them
    why_no_trees     before training: rows that share their beginning, as one sequence
    probe            the same comparison for another package (the engine's rows of a cache)

A config does not tell which backbones pass. Gemma 3n looks embeddings up by id, BART takes no positions, ALiBi's bias
follows the column and not the position, Bloom takes no 4-D mask. Such a model would give wrong answers, but no error.

Shape suffixes: B rows, T positions of a row, D width, V vocabulary.
"""

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from colar.model import backbones, masks
from colar.model.head import head_logits
from colar.ops import trees

INPUT_TOKENS = 4
"""Positions of a row of `check_inputs`."""
MASK_TOKENS = 40
"""Positions of a row under a mask, if the model's context allows it: enough for ALiBi's bias to show."""
WINDOW = 8
"""Positions that a layer with a window sees while it is probed."""

Forwards = Callable[[PreTrainedModel], tuple[Tensor, Tensor]]

_FOUND: dict[tuple[Any, ...], str | None] = {}
"""Results of `probe`: an architecture is probed once per process and kind of device, because weights do not matter."""


@torch.no_grad()
def check_inputs(causal_lm: PreTrainedModel) -> None:
    """ValueError for an architecture that computes something else from embeddings than from ids, or nothing at all."""
    # A meta model has no numbers to compare.
    if causal_lm.device.type == "meta":
        return
    try:
        with evaluating(causal_lm), torch.autocast(causal_lm.device.type, enabled=False):
            reason = _why_no_embeddings(causal_lm)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the architecture's own code
        reason = f"cannot compute from embeddings alone ({_first_line(error)}), and latents have no ids"
    if reason is not None:
        raise ValueError(
            f"{type(causal_lm).__name__} {reason}: colar can neither train nor run this backbone"
        )


def _why_no_embeddings(causal_lm: PreTrainedModel) -> str | None:
    """The reason why a backbone cannot be fed embeddings, as a part of a sentence about it; None if it can.

    Beside a row of tokens, the batch has a row of embeddings that belong to no token, like latents.
    """
    ids_BT = _ids_of_rows(causal_lm, 2, INPUT_TOKENS)
    embeds_BTD = causal_lm.get_input_embeddings()(ids_BT)
    theirs_TV = causal_lm(input_ids=ids_BT, use_cache=False).logits[0].float()
    # The second row becomes latents. Both batches have the same shape, so that the first rows are rounded alike.
    embeds_BTD[1] = embeds_BTD.mean(0)
    hidden_BTD = causal_lm.base_model(inputs_embeds=embeds_BTD, use_cache=False).last_hidden_state
    widths = {embeds_BTD.shape[-1], hidden_BTD.shape[-1], causal_lm.config.get_text_config().hidden_size}
    if len(widths) > 1:
        sizes = " and ".join(map(str, sorted(widths)))
        return f"has embeddings and hidden states of different widths ({sizes}), and latents are both"
    if _same(theirs_TV, head_logits(causal_lm, hidden_BTD)[0]):
        return None
    if _same(theirs_TV, causal_lm(inputs_embeds=embeds_BTD, use_cache=False).logits[0].float()):
        return "computes its logits from hidden states in a way that is not known here"
    return (
        "computes something else from the embeddings of tokens than from their ids (per-layer embeddings, as those of "
        "Gemma 3n, are looked up by id), and latents have no ids"
    )


def _same(theirs_TV: Tensor, ours_TV: Tensor) -> bool:
    # Loose enough for bfloat16; a scale or cap that is missing changes logits by far more.
    return torch.allclose(theirs_TV, ours_TV, rtol=1e-2, atol=1e-3 * theirs_TV.abs().max().item())


def why_no_trees(causal_lm: PreTrainedModel) -> str | None:
    """The reason why rows that share their beginning cannot go through one forward; None if they can.

    Compares two such rows, each as a row of its own and as the branches of one sequence (`ops/trees.py`).
    """
    return probe(causal_lm, _through_a_tree)


def probe(causal_lm: PreTrainedModel, forwards: Forwards) -> str | None:
    """The reason why `causal_lm` cannot take masks of ours, or why two forwards of it differ, as the end of a sentence
    about it; None if there is none.

    `forwards` returns hidden states (T, D) computed with our masks, and by the backbone itself.
    """
    reason = masks.why_no_masks(causal_lm)
    if reason is not None or causal_lm.device.type == "meta":
        return reason
    key = (
        forwards.__qualname__,
        type(causal_lm),
        causal_lm.dtype,
        causal_lm.device.type,
        causal_lm.config.get_text_config()._attn_implementation,
        causal_lm.config.to_json_string(),
    )
    if key not in _FOUND:
        _FOUND[key] = _outcome(causal_lm, forwards)
    return _FOUND[key]


@torch.no_grad()
def _outcome(causal_lm: PreTrainedModel, forwards: Forwards) -> str | None:
    try:
        # Under autocast, rounding would be taken for a difference, and `_FOUND` would keep it.
        with (
            evaluating(causal_lm),
            _narrow(causal_lm.config.get_text_config()),
            torch.autocast(causal_lm.device.type, enabled=False),
        ):
            ours_TD, theirs_TD = forwards(causal_lm)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the architecture's own code
        return f"cannot compute under a mask of ours ({_first_line(error)})"
    distance_T = (ours_TD - theirs_TD).float().norm(dim=1) / theirs_TD.float().norm(dim=1)
    # The median, because rounding may send a single token to other experts.
    distance = distance_T.median().item()
    if distance <= _tolerance(causal_lm):
        return None
    return (
        "does not follow the masks and positions that it is given "
        f"(hidden states differ by {distance:.2g} of their norm from those of a row by itself)"
    )


def _tolerance(causal_lm: PreTrainedModel) -> float:
    """The largest difference of hidden states that is taken for rounding, relative to their norm."""
    # Quantised layers of a float32 model compute in a smaller dtype, which is that of their scales.
    dtypes = {
        causal_lm.dtype,
        *(buffer.dtype for buffer in causal_lm.buffers() if buffer.is_floating_point()),
    }
    if min(dtype.itemsize for dtype in dtypes) < 4:
        return 0.05
    # TF32 has a mantissa of as many bits as float16.
    return 1e-4 if torch.get_float32_matmul_precision() == "highest" else 0.01


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block, and restore the mode of each module after it."""
    # Walking through all modules takes milliseconds, and an engine enters this block in every step. Flags are written
    # into the modules' dicts, because `nn.Module.__setattr__` takes ten times as long.
    flags = [vars(module) for module in model.modules() if module.training] if model.training else []
    for flag in flags:
        flag["training"] = False
    try:
        yield
    finally:
        for flag in flags:
            flag["training"] = True


@contextlib.contextmanager
def _narrow(config: Any) -> Iterator[None]:
    """Reduce attention's window to `WINDOW` positions inside the block, if it has a larger one.

    Rows of the probes are much shorter than a window of thousands of positions, and would not test it.
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


def _through_a_tree(causal_lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
    embeds_BTD = embeds_of_rows(causal_lm, 2)
    length = embeds_BTD.shape[1]
    shared = length // 4
    embeds_BTD[1, :shared] = embeds_BTD[0, :shared]
    theirs_BTD = causal_lm.base_model(inputs_embeds=embeds_BTD, use_cache=False).last_hidden_state

    # Ids of the shared beginning: any equal ones will do.
    ids_BL = torch.zeros(2, shared, dtype=torch.int64)
    tree = trees.plan(ids_BL, torch.full((2,), shared), torch.full((2,), length), length)
    assert tree is not None, "two rows with the same ids"
    tree = tree.to(causal_lm.device)
    mask = masks.of_tree(causal_lm.config.get_text_config(), tree, like=embeds_BTD)
    output = causal_lm.base_model(
        inputs_embeds=tree.gather(embeds_BTD), attention_mask=mask, position_ids=tree.places, use_cache=False
    )
    ours_BTD = tree.scatter(output.last_hidden_state)
    # The second row is compared, because it follows the first one's branch in the sequence.
    return ours_BTD[1], theirs_BTD[1]


def embeds_of_rows(causal_lm: PreTrainedModel, count: int) -> Tensor:
    """(count, T, D): embeddings of tokens from all over the vocabulary, T at most `MASK_TOKENS`."""
    embeds: Tensor = causal_lm.get_input_embeddings()(_ids_of_rows(causal_lm, count, MASK_TOKENS))
    return embeds


def _ids_of_rows(causal_lm: PreTrainedModel, count: int, most: int) -> Tensor:
    """(count, T): ids from all over the vocabulary, T at most `most`."""
    length = min(most, backbones.context_of(causal_lm.config.get_text_config()))
    # Multiples of a large prime put neighbours far apart in the vocabulary. Id 0 is not the first, because it is often
    # padding, which a model might mask by itself.
    size = len(causal_lm.get_input_embeddings().weight)
    ids = torch.arange(1, 1 + count * length, device=causal_lm.device) * 7919 % size
    return ids.reshape(count, length)


def _first_line(error: Exception) -> str:
    """The type and text of another library's error, short enough for a line of ours."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 120, placeholder=' ...')}"
