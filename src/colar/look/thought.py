"""A thought read as tokens: the object THOUGHT of docs/serve.md, for the terminal, the pages and the server.

The paper's case study ("we retrieve tokens with the predicted latents by embedding cosine similarity"): a latent of c
tokens is near the sum of their embeddings, so its c nearest tokens are the ones it stands for.

    thought                             its tokens
    a token of a chain                  itself
    a latent chosen token by token      these tokens, in their order ("ordered": true)
    any other latent                    its ceil(c) nearest, nearest first ("ordered": false)

`ThoughtReader` makes it, of a thought and the tokens nearest to it. These cost a product with all embeddings, so they
are computed for all thoughts that are there at once: by `read_thoughts` for a completion's, by `colar.ask` for the one
that has just come, by `serve/served_model.py` for those of all requests in a step.

Shape suffixes: K latents, V vocabulary, D width.
"""

import math
from collections import Counter
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


class Neighbour(NamedTuple):
    """A token and the cosine between its embedding and the latent."""

    token_id: int
    cosine: float


class EmbeddingIndex:
    """The embeddings of all tokens, (V, D) in float32, to compare latents with; made once for many latents."""

    @torch.no_grad()
    def __init__(self, embeddings_VD: Tensor) -> None:
        self.embeddings_VD = embeddings_VD
        self.norms_V = torch.linalg.vector_norm(embeddings_VD, dim=-1).clamp(min=1e-12)

    @torch.no_grad()
    def cosines(self, latents_KD: Tensor) -> Tensor:
        """The cosine of each latent with each token's embedding, (K, V) in float32."""
        # Outputs that processes have sent each other are on the CPU.
        latents_KD = latents_KD.to(self.embeddings_VD.device, torch.float32)
        directions_KD = torch.nn.functional.normalize(latents_KD, dim=-1)
        # Lengths are divided out afterwards: a normalised copy of the vocabulary would need as much memory again.
        cosine_KV: Tensor = (directions_KD @ self.embeddings_VD.T) / self.norms_V
        return cosine_KV

    def nearest(self, latents_KD: Tensor, k: int) -> list[list[Neighbour]]:
        """The `k` nearest tokens of each latent by cosine similarity, best first."""
        cosine_KV = self.cosines(latents_KD)
        best = cosine_KV.topk(min(k, cosine_KV.shape[1]), dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [list(map(Neighbour, ids, cosines)) for ids, cosines in pairs]


def vocabulary_of(lm: LatentLM) -> EmbeddingIndex:
    """The model's vocabulary in float32: ranks of tokens would be blurred by bfloat16.

    In any other dtype that is a copy of 4 VD bytes: 0.1 GB for SmolLM2-135M, 1.1 GB for Llama 3.2 1B.
    """
    return EmbeddingIndex(lm.embedding_table().float())


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
    """The THOUGHTs of a completion that was made with `keep_latents`; [] of any other.

    `vocabulary` is that of `vocabulary_of`, for a caller who reads many chains.
    """
    if completion.latents is None:
        return []
    reader = ThoughtReader(lm.template, completion.request.params, neighbours)
    near_K = (vocabulary or vocabulary_of(lm)).nearest(completion.latents, reader.most)
    columns = zip(completion.thought_ids, completion.thought_info(), near_K, strict=True)
    thoughts = [reader.read(*of_thought) for of_thought in columns]
    if rest := reader.end():
        thoughts[-1]["text"] += rest
    return thoughts


class ThoughtReader:
    """Reads the thoughts of one answer in their order; chosen tokens together, as a character may be several of them.

    `neighbours` are those of each THOUGHT; 0 where its text alone is wanted.
    """

    def __init__(self, template: Template, params: Any, neighbours: int = 0) -> None:
        self.template = template
        self.neighbours = neighbours
        self.size = min(group_size(params), MOST_TOKENS)
        self.most = max(neighbours, self.size)
        """The most nearest tokens of a thought: at a large c it stands for more than are shown as neighbours."""
        self._count = 0
        self._text = TokenText(template)

    def wanted(self, token_id: int, info: Mapping[str, Tensor]) -> int:
        """The number of nearest tokens by which `read` reads a thought: tokens that were chosen are their own text."""
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
            # One by one: nearest tokens have no order in which they could be decoded as a text.
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
        """The rest of the last tokens: bytes that have become no character."""
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


def _token(template: Template, token_id: int, cosine: float | None) -> dict[str, Any]:
    return {"id": token_id, "text": template.token(token_id), "cosine": _rounded(cosine)}


def _rounded(value: float | None) -> float | None:
    """Five digits are more than anybody looks at, and a third of what is sent otherwise."""
    return None if value is None else float(f"{value:.5g}")


def _mean(column: Tensor | None) -> float | None:
    return None if column is None else _rounded(column.float().mean().item())


# Thoughts as token ids, to compare with a reference chain

DecodedIds = set[int] | list[int]
"""The ids that a thought is read as: the set of its nearest tokens, or the list of those that it was chosen as."""


def chosen_ids(info: Mapping[str, Tensor]) -> list[int] | None:
    """The tokens that one thought was chosen as, in order, the separator included; None for a latent of a head."""
    if "group_ids" not in info:
        return None
    return [token_id for token_id in info["group_ids"].tolist() if token_id >= 0]


def nearest_ids(embeds_KD: Tensor, c: int, vocabulary: EmbeddingIndex) -> list[DecodedIds]:
    """The tokens that each embedding can be read as: its c nearest."""
    return [{near.token_id for near in nearest} for nearest in vocabulary.nearest(embeds_KD, c)]


def decode_thoughts(completion: Completion, c: int, vocabulary: EmbeddingIndex) -> list[DecodedIds]:
    """The tokens that each thought of a completion can be read as; tokens that were chosen are read as themselves."""
    if completion.latents is None:
        return []
    decoded_as = nearest_ids(completion.latents, c, vocabulary)
    for k, (token_id, info) in enumerate(zip(completion.thought_ids, completion.thought_info(), strict=True)):
        ids = chosen_ids(info)
        if token_id >= 0:
            decoded_as[k] = {token_id}
        elif ids is not None:
            decoded_as[k] = ids
    return decoded_as


def covered(token_ids: Sequence[int], decoded_as: DecodedIds) -> list[bool]:
    """Of each token of a group whether a thought says it. A thought chosen as 1 and 2 does not cover 1
    and 1."""
    if isinstance(decoded_as, set):
        # The sum of two equal embeddings is near a single token.
        return [token_id in decoded_as for token_id in token_ids]
    left = Counter(decoded_as)
    said = []
    for token_id in token_ids:
        said.append(left[token_id] > 0)
        left[token_id] -= 1
    return said
