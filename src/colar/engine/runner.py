"""Forward passes of one model into its cache: a chunk of prefill, or one decode step of every running row.

    prefill  slots 2..3, columns 0..4         decode   slots 0..3, each at its own column

    slot 0   q q q l l                                 q q q l l w
    slot 1   q q l                                     q q l w
    slot 2   w w w w .                                 q q q q w
    slot 3   w w w w w                                 q q q q q w

With `compile` some of them are compiled, and on a CPU linear layers are packed for its matrix units (`PackedLinear`):

    forward pass              embeddings (N, T, D)      graph
    decode, several rows      N > 1, T = 1              one
    prefill, several rows     N > 1, T > 1              another
    decode, one row           N = 1, T = 1              in an engine of one row only: torch specialises a size of 1
    prefill, one row          N = 1, T > 1              none: torch specialises a size of 1

Each graph is compiled when its kind first occurs, which takes about a minute. It serves all sizes, which needs care:
torch compiles in a size that it takes for a constant, and compiles again when the size changes.

Shape suffixes: N rows, T positions, C columns, D width.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as dynamic_shapes
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from colar import progress
from colar.engine.cache import SlotCache, check_attention
from colar.engine.graphs import Graphs, Think, columns_of, rows_of
from colar.methods.base import Method
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.ops.sampling import sample_tokens, token_logps

ATTENTION = "colar_grouped"
"""Name under which transformers finds `grouped_attention`."""


class Runner:
    """A model, its cache and its forward pass: as it is, compiled, or recorded as CUDA graphs."""

    def __init__(
        self, lm: LatentLM, method: Method, compile: bool, max_batch: int, cuda_graphs: bool
    ) -> None:
        check_attention(lm.causal_lm)
        self.lm = packed_copy(lm) if compile and can_pack(lm) else lm
        self.method = method
        self.cache = SlotCache(self.lm.causal_lm)
        self.compiled = CompiledHidden(self.lm) if compile else None
        self.hidden = self.compiled or self.lm.hidden
        # Gathered once for all steps between two trainings.
        self.partial_head = functools.lru_cache(maxsize=1)(self.lm.partial_head)
        self.cuda_graphs = cuda_graphs
        self.graphs: Graphs | None = None
        """While requests are here: an idle engine leaves them, and their cache, to the model's next one."""
        self.max_batch = max_batch
        # A compiled step of one row would be a graph of its own: a row that is alone runs beside a copy of itself.
        self.never_alone = compile and max_batch > 1

    def clock(self) -> float:
        """Seconds, on a clock that stands still while a forward pass is compiled: that is no question's time."""
        return time.perf_counter() - (self.compiled.seconds if self.compiled else 0.0)

    def refresh_weights(self) -> None:
        """Follow weights that were trained since the last requests."""
        pack_again(self.lm)
        self.partial_head.cache_clear()
        if self.cuda_graphs:
            self.graphs = self.graphs or Graphs.of(self.lm)
            self.graphs.refresh(self.lm, self.method)
            self.cache = self.graphs.cache

    def release(self) -> None:
        """Give memory back: no requests are here."""
        if self.graphs is None:
            self.cache.release()
        else:
            self.graphs.give_back(self.lm)
            self.graphs = None
            self.cache = SlotCache(self.lm.causal_lm)

    def think(self, state: ThinkState) -> Thought:
        """A step of thinking of the state's rows."""
        return self._chosen("thoughts", self.method.think, state)

    def answer(self, state: ThinkState) -> Thought:
        """The next token of each row's answer."""
        return self._chosen("answers", answer_token, state)

    def _chosen(self, name: str, think: Think, state: ThinkState) -> Thought:
        if self.graphs is None:
            return think(self.lm, state)
        return self.graphs.think(name, think, self.lm, state, self.max_batch)

    def prefill(self, questions: Sequence[Sequence[int]], slot: int, start: int, length: int) -> Tensor:
        """Feed `length` columns of the questions from column `start` on, into slots from `slot` on.

        Returns the hidden states after the questions' last tokens, (N, D); only a single question may go on beyond
        these columns.
        """
        device = self.lm.device
        n = len(questions)
        lengths = [len(ids) for ids in questions]
        end = min(start + length, max(lengths))

        # Padded on the right, where a row's own next columns come to lie; no row sees beyond its own position.
        #
        #     slot 3     q q q q .
        #     slot 4     q q q q q
        ids_NT = torch.zeros(n, end - start, dtype=torch.int64)
        for row, ids in enumerate(questions):
            part = torch.tensor(ids[start:end], dtype=torch.int64)
            ids_NT[row, : len(part)] = part
        embeds_NTD = self.lm.embed(devices.send(ids_NT, device))
        mask = self.cache.at_prefill(slot, n, start, end - start, embeds_NTD)
        position_NT = torch.arange(start, end, device=device).expand(n, -1)
        # A single question is not compiled: torch specialises a size of 1.
        forward = self.hidden if n > 1 else self.lm.hidden
        hidden_NTD = forward(embeds_NTD, mask, position_NT, self.cache)

        last_N = devices.numbers([min(n_tokens, end) - 1 - start for n_tokens in lengths], device)
        hidden_ND: Tensor = hidden_NTD[torch.arange(n, device=device), last_N]
        return hidden_ND

    def decode(self, embeds_ND: Tensor, position_N: Tensor, span: int) -> Tensor:
        """Feed each row's embedding at its own column, below `span`. Returns the hidden states, (N, D)."""
        n = len(embeds_ND)
        total = max(n, 2) if self.never_alone else n
        if self.graphs is not None:
            total = rows_of(n, self.max_batch)
            span = columns_of(span)
        copies = total - n
        if copies:
            embeds_ND = torch.cat([embeds_ND, embeds_ND[:1].expand(copies, -1)])
            position_N = torch.cat([position_N, position_N[:1].expand(copies)])
        mask = self.cache.at_decode(position_N, span, embeds_ND, copies)
        # On a CPU transformers itself does without copies of keys and values.
        own = grouped_heads(self.lm) if embeds_ND.device.type != "cpu" else contextlib.nullcontext()
        with own:
            fed = (embeds_ND[:, None], mask, position_N[:, None])
            if self.graphs is None:
                hidden_N1D = self.hidden(*fed, self.cache)
            else:
                hidden_N1D = self.graphs.hidden(self.lm.hidden, *fed)
        hidden_ND: Tensor = hidden_N1D[:n, -1]
        return hidden_ND


def answer_token(lm: LatentLM, state: ThinkState) -> Thought:
    """Choose a token of the answer, as a thought that is a token: EOS is done."""
    ids_B = sample_tokens(
        state.logits(), state.temperature, state.top_p, state.uniform(), state.conditions.modes
    )
    # Over the whole vocabulary: only where it is read.
    info = {"logp": token_logps(state.logits(), state.temperature, ids_B)} if state.wants_info else {}
    return Thought(lm.embed(ids_B), ids_B == lm.template.eos_id, ids_B, info)


# Compiled


class CompiledHidden:
    """`lm.hidden` into a `SlotCache`, compiled. If it cannot be compiled, it runs as it is and logs the reason."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.compiled: set[str] = set()
        """The kinds of forward pass that have occurred."""
        self.run: Any = torch.compile(lm.hidden)
        self.gave_up = False
        self.seconds = 0.0
        """Spent on compiling."""
        if not devices.can_compile(lm.device):
            self._give_up("there is no C++ compiler (g++ or clang++)")

    def __call__(self, embeds_NTD: Tensor, mask: Any, position_NT: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states, (N, T, D)."""
        if self.gave_up:
            return self.lm.hidden(embeds_NTD, mask, position_NT, cache)
        rows = "several rows" if embeds_NTD.shape[0] > 1 else "one row"
        kind = f"{'prefill' if embeds_NTD.shape[1] > 1 else 'decode'}, {rows}"

        # A graph that allocates the cache would be of use only once.
        if not cache.allocated:
            self._fill(embeds_NTD, position_NT, cache)
        with grouped_heads(self.lm):
            if kind not in self.compiled:
                self.compiled.add(kind)
                self._compile(kind, embeds_NTD, mask, position_NT, cache)
            forward = self.lm.hidden if self.gave_up else self.run
            hidden: Tensor = forward(embeds_NTD, mask, position_NT, cache)
            return hidden

    def _fill(self, embeds_NTD: Tensor, position_NT: Tensor, cache: SlotCache) -> None:
        """Allocate a new cache, by feeding one position as it is."""
        mapping = cache.mapping
        one_11D = embeds_NTD[:1, :1]
        mask = cache.at_prefill(0, 1, 0, 1, one_11D)
        self.lm.hidden(one_11D, mask, position_NT[:1, :1], cache)
        cache.mapping = mapping

    def _compile(self, kind: str, *fed: Any) -> None:
        """Compile by a first forward pass, which fails or not: the one that follows writes the same again."""
        progress.say(f"compiling {kind}: about a minute, less where it was compiled before")
        _name_sizes(*fed)
        started = time.perf_counter()
        config: Any = dynamic_shapes
        try:
            # Sizes that happen to be equal now are not the same size.
            with config.patch(use_duck_shape=False):
                self.run(*fed)
        except Exception as error:
            # torch's errors are pages long; the first line names the reason.
            first_line = str(error).strip().partition("\n")[0]
            self._give_up(f"{type(error).__name__}: {first_line}")
        else:
            progress.say(f"compiled in {time.perf_counter() - started:.0f} s")
        self.seconds += time.perf_counter() - started

    def _give_up(self, reason: str) -> None:
        progress.say(f"the engine runs without compilation: {reason}")
        self.gave_up = True


def _name_sizes(embeds_NTD: Tensor, mask: Any, position_NT: Tensor, cache: SlotCache) -> None:
    """Tell torch which sizes vary: it would find out by compiling again and again."""
    mark = torch._dynamo.maybe_mark_dynamic
    mapping = cache.mapping

    # N and T, where they are more than 1: a size of 1 stays a constant, which makes its kind of forward pass.
    varying = [dimension for dimension, size in enumerate(position_NT.shape) if size > 1]
    for tensor_NT in (embeds_NTD, position_NT, mapping.columns):
        mark(tensor_NT, varying)
    if 0 in varying:
        mark(mapping.rows, 0)

    # Columns read, the first slot (the size of `before`), and how many slots and columns there are.
    mark(mapping.seen, 0)
    mark(mapping.before, 0)
    for layer in cache.layers:
        mark(layer.keys, [0, 2])
        mark(layer.values, [0, 2])

    # N and T are dimensions 0 and 2 of a mask, C is 3.
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    for mask_N1TC in masks:
        mark(mask_N1TC, [2 * dimension for dimension in varying] + [3])


# Attention


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as SDPA does, with less copying: query heads that share a key head become queries of that head.

    transformers does the same in a plain step on a CPU, but copies keys and values for each query head in a compiled
    one. Its older versions do so in all steps on a GPU, and so does SDPA's own `enable_gqa`, whose kernels for a mask
    have no such heads. Returns (N, T, heads, d), and no attention weights.
    """
    #     query   (N, 6 heads, T, d)   ->   (N, 2 heads, 3 T, d)
    #     key     (N, 2 heads, C, d)        as it is, and the values too
    n, heads, length, width = query.shape
    key_heads = key.shape[1]
    shared = heads // key_heads
    grouped = query.reshape(n, key_heads, shared * length, width)
    # A query's mask goes with it. That of a single position serves any number of queries.
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, shared, 1)
    out = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=kwargs.get("scaling")
    )
    return out.reshape(n, heads, length, width).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)


@contextlib.contextmanager
def grouped_heads(lm: LatentLM) -> Iterator[None]:
    """Use `grouped_attention` instead of sdpa inside the block."""
    config = lm.config
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


# Linear layers whose weights are laid out for a CPU's matrix units

PACK_FOR = 16
"""Rows that the packed layout is chosen for; any number can be computed with it."""
SAMPLE = 4096
"""Numbers of a weight that are compared to detect that it has changed."""
OPERATION = "colar::packed_linear"
"""An operation of our own, which a compiled graph calls as it is."""


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, width: int) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


# torch.compile traces with tensors that have a shape and no numbers: this is the operation on those.
def _shape(x: Tensor, packed: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


_library: Any = torch.library
_library.define(OPERATION, "(Tensor x, Tensor packed, Tensor? bias, SymInt width) -> Tensor")
_library.impl(OPERATION, "CompositeExplicitAutograd", _packed_linear)
_library.register_fake(OPERATION, _shape)


class PackedLinear(nn.Module):
    """Computes the same as `linear`, without gradient. The weight is shared, the packed copy is this module's own.

    A plain linear layer rearranges the weights that it reads on every call, which at a few rows takes a third of its
    time. oneDNN can be given them rearranged, at the price of a second copy (results/speed/generate has figures).
    """

    computes_linear = True
    """Its weight and bias are all of it (`model/head.py`)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.pack()

    def pack(self) -> None:
        """Copy the weight as it is now."""
        self.version, self.sample = self._state()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACK_FOR)

    def outdated(self) -> bool:
        """True if the weight has been changed since it was packed."""
        version, sample = self._state()
        return self.version != version or not torch.equal(self.sample, sample)

    def _state(self) -> tuple[int, Tensor]:
        """The count of in-place changes, and numbers from all over the weight: fused optimisers do not count theirs."""
        version = 0 if self.weight.is_inference() else self.weight._version
        flat = self.weight.detach().flatten()
        return version, flat[:: max(1, len(flat) // SAMPLE)].clone()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.colar.packed_linear(x, self.packed, self.bias, self.out_features)
        return y


def can_pack(lm: LatentLM) -> bool:
    """True for bfloat16 weights on a CPU whose oneDNN computes in bfloat16: nothing else gains by packing."""
    dtype = lm.causal_lm.get_input_embeddings().weight.dtype
    return lm.device.type == "cpu" and dtype == torch.bfloat16 and devices.computes_bfloat16(lm.device)


def packed_copy(lm: LatentLM) -> LatentLM:
    """Copy `lm` with packed linear layers, in eval mode. Parameters and buffers are shared; `lm` stays as it is."""
    shared: tuple[Any, ...] = (*lm.parameters(), *lm.buffers(), lm.tokenizer, lm.template)
    # deepcopy takes what is in its memo for copied already: the copy has these very objects.
    twin = copy.deepcopy(lm, {id(value): value for value in shared}).eval()
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            # A quantised weight is a tensor of its own kind.
            if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
                continue
            if child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child))
    return twin


def pack_again(twin: LatentLM) -> None:
    """Pack the weights again that have been trained since."""
    for module in twin.modules():
        if isinstance(module, PackedLinear) and module.outdated():
            module.pack()
