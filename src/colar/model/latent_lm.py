"""`LatentLM`: a Hugging Face causal LM, split where latents go in and come out.

    ids --embed--> embeddings --hidden--> last hidden states --logits--> vocabulary
                      ^  latents enter here       |
                      '------ method modules <----'   (a latent head, a projection ...)

The backbone is trained in full or through LoRA (peft). The modules of its method live in `extra`, outside the Hugging
Face model, and are saved beside it (`checkpoint.py`).

    LatentLM
      .lm             PeftModel or PreTrainedModel: the one that is trained and saved
      .causal_lm      the PreTrainedModel inside it, adapter layers included: the one that computes
      .extra          the method's modules
      .template       text to ids (`template/template.py`), with the tokenizer

Shape suffixes: B rows, T positions, D width, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from colar.model import masks, probes
from colar.model.backbones import Backbone, context_of
from colar.model.head import PartialHead, ValuesOf, default_chunk_bytes, head_logits, in_chunks, positions_of
from colar.model.lora import LoraSettings, adapted_weights, with_adapter
from colar.ops import devices, trees
from colar.template.template import Template, TemplateConfig


class LatentLM(nn.Module):
    """A causal LM that also reads and writes embeddings. Build it with `from_backbone` or `checkpoint.load`."""

    def __init__(self, backbone: Backbone, template: Template, lora: LoraSettings | None = None) -> None:
        super().__init__()
        self.name = backbone.name
        self.tokenizer: PreTrainedTokenizerBase = backbone.tokenizer
        self.template = template
        self.fingerprint = backbone.fingerprint
        self.backbone_seed = backbone.seed
        self.lm: PreTrainedModel | PeftModel = backbone.lm
        self.quantization: str | None = None
        """int8 or int4 if its linears were quantised for inference (`quantized.py`)."""
        self.loaded_attention: str = self.config._attn_implementation
        """The attention implementation at load: training may have replaced it by one that the engine cannot use."""
        template.limit_to(self.vocabulary_size)
        probes.check_inputs(backbone.lm)
        if lora is not None:
            self.lm = with_adapter(backbone.lm, lora)
        self.extra = nn.ModuleDict()
        """The modules of the method."""
        self.training_only: frozenset[str] = frozenset()
        """Names of the method's modules that a published checkpoint leaves out."""
        self.chunk_bytes: int | None = None
        """Bytes of a chunk's logits (`head.py`); None: the default for the head and its device."""
        self.idle_graphs: Any = None
        """CUDA graphs of this model that no engine uses now (`engine/graphs.py`)."""

    @classmethod
    def from_backbone(
        cls, backbone: Backbone, template: TemplateConfig | None = None, lora: LoraSettings | None = None
    ) -> "LatentLM":
        """Wrap a fresh backbone. ValueError if the template does not fit its tokenizer."""
        return cls(backbone, Template(template or TemplateConfig(), backbone.tokenizer), lora)

    # Parts

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The Hugging Face model, inside its adapter if there is one."""
        return self.lm.get_base_model() if isinstance(self.lm, PeftModel) else self.lm

    @property
    def config(self) -> Any:
        """The text model's transformers config."""
        return self.causal_lm.config.get_text_config()

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.lm, PeftModel)

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.causal_lm.device
        return device

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the embedding, spare ids included."""
        return len(self.causal_lm.get_input_embeddings().weight)

    @property
    def context(self) -> int:
        """The most positions of a row."""
        return context_of(self.config)

    # Computation

    def embed(self, ids: Tensor) -> Tensor:
        """The embedding module's output, any scaling inside it (Gemma) included: (...,) -> (..., D)."""
        embeds: Tensor = self.causal_lm.get_input_embeddings()(devices.send(ids, self.device))
        return embeds

    def hidden(
        self,
        embeds_BTD: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Last hidden states after the final norm, (B, T, D).

        Without mask and positions, rows start at position 0 and are padded on the right, where causal
        attention keeps padding from being seen. A `cache` is extended in place.
        """
        hidden: Tensor = self._forward(embeds_BTD, attention_mask, position_ids, cache).last_hidden_state
        return hidden

    def hidden_of_rows(self, embeds_BTD: Tensor, starts: tuple[Tensor, Tensor], lengths_B: Tensor) -> Tensor:
        """`hidden` of right-padded rows, (B, T, D), with the beginnings that rows share computed once.

        `starts` are the ids (B, L) that rows begin with, and their number in each row (B,); `lengths_B` are the rows'
        whole lengths. Rows of equal ids must have equal embeddings there. Values in a row's padding are meaningless.
        """
        if self.why_no_trees() is not None:
            return self.hidden(embeds_BTD)
        tree = trees.plan(*starts, lengths_B, embeds_BTD.shape[1])
        if tree is None:
            return self.hidden(embeds_BTD)
        tree = tree.to(embeds_BTD.device)
        mask = masks.of_tree(self.config, tree, like=embeds_BTD)
        return tree.scatter(self.hidden(tree.gather(embeds_BTD), mask, tree.places))

    def why_no_trees(self) -> str | None:
        """The reason why rows cannot share a sequence, as the end of a sentence about the backbone, or None."""
        # The attention implementation may have changed since the probe.
        return self._tree_probe or masks.why_no_masks(self.causal_lm)

    @functools.cached_property
    def _tree_probe(self) -> str | None:
        # Not at every load, because only training has such rows, and the probe takes seconds.
        return probes.why_no_trees(self.causal_lm)

    def layers(
        self,
        embeds_BTD: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, ...]:
        """The output of each of the backbone's layers, (B, T, D) each; the last is `hidden`'s result."""
        output = self._forward(embeds_BTD, attention_mask, position_ids, cache, output_hidden_states=True)
        # The first hidden states are the embeddings, the last have been through the final norm.
        return tuple(output.hidden_states[1:])

    def _forward(
        self,
        embeds_BTD: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        **wanted: bool,
    ) -> Any:
        # The base model, without its LM head: logits are computed later, at the positions that need them.
        return self.causal_lm.base_model(
            inputs_embeds=embeds_BTD,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
            **wanted,
        )

    def logits(self, hidden: Tensor, part: PartialHead | None = None) -> Tensor:
        """(..., D) -> (..., V) float32, as the backbone's own forward would give them; (..., S) of a partial head."""
        return head_logits(self.causal_lm, hidden, part)

    def reduce_logits(
        self, reduce: ValuesOf, hidden_XD: Tensor, *columns: Tensor, part: PartialHead | None = None
    ) -> tuple[Tensor, ...]:
        """`reduce(logits(hidden_XD, part), *columns)`, with the logits of one chunk in memory at a time (`head.py`).

        `columns` are (X, ...), without gradient. `reduce` returns tensors (X,), and is called on a chunk at a time.
        """

        def values_of(hidden_CD: Tensor, *chunk: Tensor) -> tuple[Tensor, ...]:
            return reduce(self.logits(hidden_CD, part), *chunk)

        # A part without weights of its own is selected from the logits of the whole vocabulary.
        count = self.vocabulary_size if part is None or part.weight_SD is None else len(part.ids_S)
        chunk_bytes = self.chunk_bytes or default_chunk_bytes(self.causal_lm.get_output_embeddings())
        return in_chunks(values_of, hidden_XD, columns, positions_of(chunk_bytes, count))

    def partial_head(self, ids: tuple[int, ...]) -> PartialHead:
        """The LM head's weights of these ids (ascending), for `logits`. ValueError for an id outside the vocabulary."""
        size = self.vocabulary_size
        if not ids or ids[-1] >= size:
            raise ValueError(f"ids must be in the model's vocabulary of {size}, got {ids[-1:] or 'none'}")
        return PartialHead.gather(self.causal_lm.get_output_embeddings(), ids, self.device)

    def embedding_table(self) -> Tensor:
        """The embedding module's output for every id, (V, D)."""
        embedding = self.causal_lm.get_input_embeddings()
        # A plain embedding returns its weights unchanged: the table is not copied. A subclass may scale them (Gemma).
        if type(embedding) is nn.Embedding:
            weight: Tensor = embedding.weight
            return weight
        return self.embed(torch.arange(self.vocabulary_size, device=self.device))

    @torch.no_grad()
    def embedding_std(self) -> float:
        """sigma_e: standard deviation of the embedding module's output over the whole vocabulary."""
        total = squares = 0.0
        count = 0
        # In pieces and in float64: a vocabulary of 250,000 at once would need gigabytes.
        for ids in torch.split(torch.arange(self.vocabulary_size, device=self.device), 8192):
            values = devices.to_float64(self.embed(ids))
            total += values.sum().item()
            squares += values.square().sum().item()
            count += values.numel()
        mean = total / count
        return float((squares / count - mean**2) ** 0.5)

    # Training

    def decoder_layers(self) -> list[nn.Module]:
        """The backbone's stack of layers. ValueError if it has none."""
        # Families name the list differently (layers, h, blocks), so it is recognised by its length.
        count = self.config.num_hidden_layers
        for module in self.causal_lm.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise ValueError(
            f"{type(self.causal_lm).__name__} has no list of {count} layers, which training.compile and training.fsdp "
            "need: train with both false"
        )

    def add_modules(self, modules: Mapping[str, nn.Module], training_only: bool = False) -> None:
        """Register a method's modules, in float32 as they are made, on the backbone's device; they are trained too.

        A published checkpoint leaves out `training_only` modules.
        """
        for name, module in modules.items():
            self.extra[name] = module.to(self.device)
        if training_only:
            self.training_only |= modules.keys()

    def merge(self) -> None:
        """Fold the adapter into the weights that it adapts (rounded to their dtype), for inference.

        A step then costs no more than the backbone's. A checkpoint saved after the merge holds all weights. Without an
        adapter nothing is done.
        """
        if isinstance(self.lm, PeftModel):
            # Weights read from a file are mapped into memory. Writing into them copies them page by page, which takes
            # eight times as long as copying them first.
            for weight in adapted_weights(self.lm):
                weight.data = weight.data.clone()
            self.lm = self.lm.merge_and_unload()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Switch dropout off inside the block, and restore the model's mode after it."""
        return probes.evaluating(self)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Fold the adapter into the weights inside the block, and put them back bit for bit after it.

        4-bit weights are not merged, because rounding to 4 bits again would lose most of the adapter.
        """
        if not isinstance(self.lm, PeftModel) or getattr(self.causal_lm, "is_loaded_in_4bit", False):
            yield
            return
        weights = adapted_weights(self.lm)
        # At most half of a GPU's room, because the caller's answers need a cache.
        needed = sum(weight.nbytes for weight in weights)
        place = self.device if 2 * needed <= devices.room(self.device) else torch.device("cpu")
        copies = [weight.data.to(place, copy=True) for weight in weights]
        try:
            # In place, because CUDA graphs read weights at fixed addresses.
            self.lm.merge_adapter()
            yield
        finally:
            # peft unmerges by subtraction, which leaves a rounding error of their dtype in the weights, and a larger
            # one each time. So the copies are written over the result.
            self.lm.unmerge_adapter()
            for weight, before in zip(weights, copies, strict=True):
                weight.data.copy_(before)

    def freeze_embeddings(self) -> None:
        """Stop training the input embeddings.

        Latent targets are sums of these embeddings, which must not move while the targets are learnt. If embeddings are
        tied, this freezes the LM head as well. ValueError if an adapter trains them.
        """
        embedding = self.causal_lm.get_input_embeddings()
        if isinstance(embedding, LoraLayer):
            raise ValueError(
                "model.lora.target_modules: latents are learnt as sums of input embeddings, which an adapter of the "
                "embedding would move: leave it out"
            )
        # Under any other adapter the base is frozen anyway.
        if not self.has_adapter:
            embedding.weight.requires_grad_(False)
