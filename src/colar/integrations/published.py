"""Published checkpoints of other projects as checkpoint folders of ours (`colar import`).

    file --names--> tensors of the model, and of the method's modules --shapes--> the backbone with them --> folder

`published_formats.py` says what each format is, and reads files without running any code of theirs.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AddedToken

from colar import progress
from colar.integrations.published_formats import (
    CheckpointLayout,
    File,
    Options,
    Settings,
    read,
    recognise,
    some,
)
from colar.methods import pretrained, registry
from colar.model import backbones, checkpoint
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM
from colar.model.lora import LoraSettings
from colar.template.template import Borders, Template

BUFFER = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Tensors that are computed, not learnt: earlier versions of transformers saved them."""


def convert(path: str | Path, backbone: str, output: str | Path, options: Options) -> None:
    """Write the published checkpoint at `path` (a file, a folder or a Hub id) as a checkpoint folder.

    ValueError, before anything is written, for pickled code, tensors that are missing or do not fit `backbone`, a
    format that is not known, and an `output` that holds other things.
    """
    checkpoint.check_replaceable(output)
    file = read(path)
    name, repository, layout = recognise(file, options)
    parts = Parts.of(file, layout)
    settings = layout.settings(file, options, backbone)
    method = registry.build(layout.method, settings.config)
    method.default_params, method.default_limits = settings.params, settings.limits
    lm = build_model(file, layout, parts, settings, backbone)
    pretrained.attach(lm, method, seed=0)
    _fill(lm.extra.state_dict(), parts.modules, [], file, parts.names)
    for line in parts.left_out:
        progress.say(line)
    if layout.markers:
        lm.merge()
    run = {"imported": {"format": name, "repository": repository, "file": file.path.name}}
    origin = f"\n## Origin\n\n`{file.path.name}`, imported from the format `{name}` of {repository}.\n"
    text = pretrained.card_of(lm, method, run) + origin
    pretrained.save_pretrained(lm.eval(), method, output, run, text)
    progress.say(f"wrote {output} (format {name}, method {method.name})")


@dataclass(frozen=True)
class Parts:
    """A file's tensors: those of the model by their names in it, those of the modules by their names here."""

    model: dict[str, Tensor]
    modules: dict[str, Tensor]
    names: dict[str, str]
    """Names in the file, of both."""
    left_out: list[str]

    @classmethod
    def of(cls, file: File, layout: CheckpointLayout) -> "Parts":
        """ValueError names the tensors of the method's modules that the file lacks."""
        model, modules, names, others = {}, {}, {}, []
        for name, value in file.tensors.items():
            layer, _, kind = name.rpartition(".")
            own = name.removeprefix(layout.model)
            if own != name:
                model[own] = value
            elif layer in layout.layers:
                own = f"{layout.layers[layer]}.{kind}"
                modules[own] = value
            else:
                others.append(name)
            names[own] = name
        wanted = [f"{each}.{kind}" for each in layout.layers for kind in ("weight", "bias")]
        missing = [
            name for name in wanted if name not in file.tensors and not name.startswith(layout.optional)
        ]
        if missing:
            raise ValueError(f"{file.path} lacks {some(missing)}, which models of {layout.repository} have")
        return cls(model, modules, names, _left_out(others, layout))


def _left_out(names: list[str], layout: CheckpointLayout) -> list[str]:
    """A line for each group of tensors that is not imported."""
    lines = []
    for prefix, what in layout.left_out.items():
        own = [name for name in names if name.startswith(prefix)]
        names = [name for name in names if not name.startswith(prefix)]
        if own:
            lines.append(f"left out: {prefix}* ({what}; tensors: {len(own)})")
    if names:
        lines.append(f"warning: not imported, as nothing here computes with them: {some(names)}")
    return lines


def build_model(
    file: File, layout: CheckpointLayout, parts: Parts, settings: Settings, backbone: str
) -> LatentLM:
    """The backbone with the file's weights, its adapter not merged yet. ValueError names what does not fit."""
    lora = _lora(parts.model, settings.lora_alpha)
    if lora is None and not layout.markers:
        raise ValueError(
            f"{file.path} holds no LoRA weights (do_lora: false): such models cannot be imported"
        )
    base = backbones.load(backbone)
    if layout.markers:
        _add_markers(base, file, layout, parts, lora is not None)
    adds_bos = list(base.tokenizer("1")["input_ids"])[:1] == [base.tokenizer.bos_token_id]
    borders = Borders(layout.closing, bool(layout.markers) and adds_bos, layout.answer)
    try:
        template = Template(layout.template, base.tokenizer, borders=borders)
    except ValueError as error:
        raise ValueError(f"{backbone} is not the backbone of {file.path}: {error}") from error
    lm = LatentLM(base, template, lora)
    _warn_of_prompt(lm, layout)

    own = lm.lm.state_dict()
    required = [name for name in own if lora is None or ".lora_" in name]
    _fill(own, parts.model, required, file, {name: layout.model + name for name in own} | parts.names)
    first = lm.vocabulary_size - len(layout.markers)
    for i, marker in enumerate(layout.markers):
        # Where the embedding has spare rows, the tokenizer's new ids are not the last rows.
        token_id = base.tokenizer.convert_tokens_to_ids(marker)
        for module in (lm.causal_lm.get_input_embeddings(), lm.causal_lm.get_output_embeddings()):
            module.weight.data[token_id] = module.weight.data[first + i].clone()
    return lm


def _warn_of_prompt(lm: LatentLM, layout: CheckpointLayout) -> None:
    """CoLaR's evaluation encodes the question and its separator as one text; its training and our template do not."""
    texts = layout.template
    separator = lm.template.token(lm.template.separator_id)
    text = texts.question.format(question="How many?", speed="(Thinking speed: 5)") + separator
    ids = list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not layout.markers and ids != lm.template.question("How many?", "(Thinking speed: 5)"):
        progress.say(
            f"warning: this tokenizer merges {separator!r} with what stands before it, as the authors' "
            "evaluation encodes it: colar feeds it by itself, as their training does"
        )


def _lora(model: Mapping[str, Tensor], alpha: int) -> LoraSettings | None:
    """The settings of the adapter among the model's tensors; None where there is none."""
    inner = {name.partition(".lora_A.")[0]: value for name, value in model.items() if ".lora_A." in name}
    if not inner:
        return None
    targets = sorted({name.rpartition(".")[2] for name in inner})
    return LoraSettings(r=len(next(iter(inner.values()))), lora_alpha=alpha, target_modules=tuple(targets))


def _add_markers(base: Backbone, file: File, layout: CheckpointLayout, parts: Parts, adapted: bool) -> None:
    """Grow the backbone's vocabulary by the tokens that the file's embedding has."""
    embedding = base.lm.get_input_embeddings().weight
    name = next(name for name, weight in base.lm.named_parameters() if weight is embedding)
    name = "base_model.model." * adapted + name
    if name not in parts.model:
        raise ValueError(f"{file.path} lacks {layout.model}{name}, with the rows of the tokens that it adds")
    # Coconut's code makes as many rows as the tokenizer has tokens, CODI's as many as the model had, and three.
    rows, before = len(parts.model[name]), len(embedding)
    if rows - len(layout.markers) not in (before, len(base.tokenizer)):
        raise ValueError(
            f"{file.path}: {layout.model}{name} has {rows} rows, and {base.name} with {len(layout.markers)} added "
            f"tokens {before + len(layout.markers)}: give the backbone that it was trained on"
        )
    base.tokenizer.add_tokens([AddedToken(each, normalized=False, special=True) for each in layout.markers])
    base.lm.resize_token_embeddings(rows, mean_resizing=False)


@torch.no_grad()
def _fill(
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    required: Iterable[str],
    file: File,
    names: Mapping[str, str],
) -> None:
    """Copy tensors into those of the same names. ValueError for what is missing, for what has no place or another
    shape, in the file's `names`."""
    unknown = [names[name] for name in tensors if name not in own and not BUFFER.search(name)]
    if unknown:
        raise ValueError(
            f"{file.path} has {some(unknown)}, which the backbone has not: give the one it was trained on"
        )
    # A tied head is the embedding.
    there = {own[name].data_ptr() for name in tensors if name in own}
    missing = [names[name] for name in required if own[name].data_ptr() not in there]
    if missing:
        raise ValueError(f"{file.path} lacks {some(missing)}")
    for name, value in tensors.items():
        if name in own and own[name].shape != value.shape:
            raise ValueError(
                f"{file.path}: {names[name]} has shape {tuple(value.shape)}, and here {tuple(own[name].shape)}: give "
                "the backbone that it was trained on"
            )
    for name in own.keys() & tensors.keys():
        own[name].copy_(tensors[name])
