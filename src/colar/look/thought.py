"""A thought read as tokens: the object THOUGHT of docs/serve.md, for the terminal, the pages and the server.

The paper's case study ("we retrieve tokens with the predicted latents by embedding cosine similarity"): a latent of c
tokens is near the sum of their embeddings, so its c nearest tokens are the ones it stands for.

    thought                             its tokens
    a token of a chain                  itself
    a latent chosen token by token      these tokens, in their order ("ordered": true)
    any other latent                    its ceil(c) nearest, nearest first ("ordered": false)

`ThoughtReader` makes a THOUGHT of a thought and its nearest tokens. These cost a product with all embeddings, so they
are computed for all available thoughts at once: `read_thoughts` does so for those of a completion, `colar.ask` for the
latest one, and `serve/served_model.py` for those of all requests in a step.

Shape suffixes: K latents, V vocabulary, D width.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colar.engine.completion import Completion, TokenText
from colar.model.latent_lm import LatentLM
from colar.template.template import Template

NEIGHBOURS = 10
"""Nearest tokens that a THOUGHT has."""
MOST_TOKENS = 32
"""Most nearest tokens that stand for a latent in a THOUGHT."""
POSITIONS_AT_ONCE = 1024
"""Most positions whose logits, or cosines, with all tokens are computed at once: 0.6 GB for 152,000 tokens."""
SHOWN = ("logp", "group_ids", "group_logps", "group_low_confidence", "sigma", "stop_probability")
"""The info that a THOUGHT is made of; what else methods report is for reinforcement."""


class Neighbour(NamedTuple):
    """A token and the cosine between its embedding and the latent."""

    token_id: int
    cosine: float


class EmbeddingIndex:
    """The embeddings of all tokens, (V, D), to compare latents with; made once for many latents.

    They are compared in float32, because bfloat16 would blur the ranks of tokens. For embeddings of any other dtype
    this is a copy of 4 VD bytes (1.1 GB for Llama 3.2 1B), made when the first latent is compared.
    """

    def __init__(self, embeddings_VD: Tensor) -> None:
        self._given_VD = embeddings_VD.detach()

    @functools.cached_property
    def embeddings_VD(self) -> Tensor:
        return self._given_VD.float()

    @functools.cached_property
    def norms_V(self) -> Tensor:
        norms_V: Tensor = torch.linalg.vector_norm(self.embeddings_VD, dim=-1)
        return norms_V.clamp(min=1e-12)

    @torch.no_grad()
    def cosines(self, latents_KD: Tensor) -> Tensor:
        """The cosine of each latent with each token's embedding, (K, V) in float32."""
        # Outputs that processes have sent each other are on the CPU.
        latents_KD = latents_KD.to(self.embeddings_VD.device, torch.float32)
        directions_KD = torch.nn.functional.normalize(latents_KD, dim=-1)
        # Lengths are divided out afterwards, because a normalised copy of the vocabulary would double the memory.
        cosine_KV: Tensor = (directions_KD @ self.embeddings_VD.T) / self.norms_V
        return cosine_KV

    def nearest(self, latents_KD: Tensor, k: int) -> list[list[Neighbour]]:
        """The `k` nearest tokens of each latent by cosine similarity, best first."""
        nearest: list[list[Neighbour]] = []
        # In parts, because the cosines of 16,000 latents with 152,000 tokens would take 9.7 GB.
        for part_KD in torch.split(latents_KD, POSITIONS_AT_ONCE):
            cosine_KV = self.cosines(part_KD)
            best = cosine_KV.topk(min(k, cosine_KV.shape[1]), dim=-1)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            nearest += [list(map(Neighbour, ids, cosines)) for ids, cosines in pairs]
        return nearest


def vocabulary_of(lm: LatentLM) -> EmbeddingIndex:
    """The index of the model's vocabulary."""
    return EmbeddingIndex(lm.embedding_table())


def group_size(params: Any) -> int:
    """The most tokens that a thought stands for."""
    return math.ceil(getattr(params, "compression_factor", 1))


# Thoughts as data


def read_thoughts(
    lm: LatentLM,
    completion: Completion,
    neighbours: int = NEIGHBOURS,
    vocabulary: EmbeddingIndex | None = None,
) -> list[dict[str, Any]]:
    """The THOUGHTs of a completion that was made with `keep_latents`; [] for any other.

    A caller that reads many chains passes the `vocabulary` of `vocabulary_of`, which is then made once.
    """
    if completion.latents is None:
        return []
    reader = ThoughtReader(lm.template, completion.request.params, neighbours)
    infos = completion.thought_info(SHOWN)
    steps = zip(completion.thought_ids, completion.latents, infos, strict=True)
    thoughts = read_together([(reader, *step) for step in steps], vocabulary or vocabulary_of(lm))
    if rest := reader.end():
        thoughts[-1]["text"] += rest
    return thoughts


def read_together(
    thoughts: Sequence[tuple["ThoughtReader", int, Tensor, Mapping[str, Tensor]]], vocabulary: EmbeddingIndex
) -> list[dict[str, Any]]:
    """The THOUGHTs of (reader, token id, embedding (D,), info on the CPU).

    One product with the vocabulary finds the neighbours of all thoughts that need any.
    """
    wanted = [reader.wanted(token_id, info) for reader, token_id, _, info in thoughts]
    near: list[list[Neighbour]] = [[] for _ in thoughts]
    if any(wanted):
        near = vocabulary.nearest(torch.stack([embed_D for _, _, embed_D, _ in thoughts]), max(wanted))
    rows = zip(thoughts, near, wanted, strict=True)
    return [reader.read(token_id, info, found[:n]) for (reader, token_id, _, info), found, n in rows]


def infos_on_cpu(infos: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The info of several thoughts of one method, as far as it is `SHOWN`, copied to the CPU by one synchronisation for
    each name."""
    on_cpu: list[dict[str, Tensor]] = [{} for _ in infos]
    for name in [name for name in SHOWN if infos and name in infos[0]]:
        columns = [info[name] for info in infos]
        # Flattened, because thoughts of different steps may differ in width.
        flat = torch.cat([column.reshape(-1) for column in columns]).cpu()
        values = torch.split(flat, [column.numel() for column in columns])
        for info, column, own in zip(on_cpu, columns, values, strict=True):
            info[name] = own.view(column.shape)
    return on_cpu


class ThoughtReader:
    """Reads the thoughts of one answer in order; chosen tokens together, because a character may span several.

    `neighbours` is the number of them in each THOUGHT; 0 if only its text is needed.
    """

    def __init__(self, template: Template, params: Any, neighbours: int = 0) -> None:
        self.template = template
        self.neighbours = neighbours
        self.size = min(group_size(params), MOST_TOKENS)
        self.most = max(neighbours, self.size)
        """Most nearest tokens of a thought: `neighbours`, or at a large c the number that it stands for."""
        self._count = 0
        self._text = TokenText(template)

    def wanted(self, token_id: int, info: Mapping[str, Tensor]) -> int:
        """The number of nearest tokens that `read` needs; chosen tokens are their own text, and need none for it."""
        ids, _ = chosen_tokens(token_id, info, self.template.separator_id)
        return self.most if self.neighbours or not ids else 0

    def read(self, token_id: int, info: Mapping[str, Tensor], near: Sequence[Neighbour]) -> dict[str, Any]:
        """The next THOUGHT; `token_id` is -1 for a latent.

        `near` are its nearest tokens, of which the first `size` stand for a latent that was not chosen as tokens. A
        chosen token that is none of them has no cosine.
        """
        ids, logprobs = chosen_tokens(token_id, info, self.template.separator_id)
        ordered = bool(ids)
        if ordered:
            text = self._text.add(ids)
        else:
            ids = [each.token_id for each in near[: self.size]]
            logprobs = [None] * len(ids)
            # One by one, because nearest tokens have no order in which they could be decoded as a text.
            text = "".join(map(self.template.token, ids))
        cosines = dict(near)
        tokens = []
        for each, logprob in zip(ids, logprobs, strict=True):
            tokens.append({**_token(self.template, each, cosines.get(each)), "logprob": _rounded(logprob)})
        self._count += 1
        return {
            "index": self._count - 1,
            "text": text,
            "kind": "token" if token_id >= 0 else "latent",
            "tokens": tokens,
            "ordered": ordered,
            # The next token of the group had low confidence (`confidence_threshold`), and ended it.
            "low_confidence": bool(info.get("group_low_confidence", False)),
            "neighbours": [_token(self.template, *each) for each in near],
            "sigma": _mean(info.get("sigma")),
            "stop_probability": _mean(info.get("stop_probability")),
        }

    def end(self) -> str:
        """The remaining text of the last tokens: bytes that never completed a character."""
        return self._text.end()


def chosen_tokens(
    token_id: int, info: Mapping[str, Tensor], separator_id: int
) -> tuple[list[int], list[float | None]]:
    """The tokens that a thought was chosen as, and their log-probs where they are known; none for other latents."""
    if token_id >= 0:
        logp = info.get("logp")
        return [token_id], [None if logp is None else float(logp)]
    chosen = chosen_ids(info)
    if chosen is None:
        return [], []
    pairs = zip(chosen, info["group_logps"].tolist(), strict=False)
    # The token that closes the reasoning may end a group, and is no part of it.
    own = [(token_id, logprob) for token_id, logprob in pairs if token_id != separator_id]
    return [token_id for token_id, _ in own], [logprob for _, logprob in own]


def chosen_ids(info: Mapping[str, Tensor]) -> list[int] | None:
    """The tokens that one thought was chosen as, in order, the separator included; None for a latent of a head."""
    if "group_ids" not in info:
        return None
    return [token_id for token_id in info["group_ids"].tolist() if token_id >= 0]


def _token(template: Template, token_id: int, cosine: float | None) -> dict[str, Any]:
    return {"id": token_id, "text": template.token(token_id), "cosine": _rounded(cosine)}


def _rounded(value: float | None) -> float | None:
    """Round to five significant digits, enough for display and a third of the characters to send."""
    return None if value is None else float(f"{value:.5g}")


def _mean(column: Tensor | None) -> float | None:
    return None if column is None else _rounded(column.float().mean().item())
