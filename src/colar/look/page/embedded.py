"""Questions and chains as the page holds them: short, and such that nothing in them can end a `<script>`.

tokens      all texts of tokens, each once; elsewhere their index
questions   {id, question, answer, steps}
systems     names
chains      [system][question]: {a: answer, r: right, w: what went wrong, n, f, s: #L, forward passes, seconds,
            g: groups of the reference, t: [thought], m: [missing group]}
thought     [kind, tokens, neighbours, sigma, stop probability, mark, reference]
  kind        0 a latent, 1 a token, 2 a latent that was chosen token by token
  tokens      of kind 0 their number (its nearest); else flat (token, cosine, log-prob)
  neighbours  flat (token, cosine)
  reference   flat (token, 1 where the thought says it)

`unpack.js` reads it. The page gets fewer neighbours where ten would make it larger than `MOST_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from colar.look.page.figures import names_of

MOST_BYTES = 4_000_000
"""Of the data: below 5 MB with everything else."""
NEIGHBOURS = (10, 5, 3, 0)
MARKS = (None, "right", "wrong", "after", "extra")


def data_text(
    systems: Sequence[Mapping[str, Any]],
    questions: Sequence[Mapping[str, Any]],
    chains: Sequence[Sequence[Mapping[str, Any]]],
) -> str:
    """The JSON text, safe inside a script element."""
    text = ""
    for most in NEIGHBOURS:
        text = script_safe(_packed(systems, questions, chains, most))
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


def script_safe(value: Any) -> str:
    """JSON that holds neither `</script>` nor `<!--`, whatever is in it."""
    # NaN is not JSON: an error here, before the page's JSON.parse rejects all of its data.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # In JSON these characters stand inside strings only, where they may be escaped.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _packed(
    systems: Sequence[Mapping[str, Any]],
    questions: Sequence[Mapping[str, Any]],
    chains: Sequence[Sequence[Mapping[str, Any]]],
    neighbours: int,
) -> dict[str, Any]:
    tokens = _Texts()
    packed = []
    for of_system in chains:
        packed.append([_chain(chain, tokens, neighbours) for chain in of_system])
    asked = []
    for question in questions:
        asked.append({key: question[key] for key in ("id", "question", "answer", "steps")})
    factors = [system["compression_factor"] for system in systems]
    names = names_of(systems)
    return {
        "tokens": tokens.texts,
        "questions": asked,
        "systems": [{"name": name, "c": c} for name, c in zip(names, factors, strict=True)],
        "chains": packed,
    }


class _Texts:
    """Texts by their index."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def _chain(chain: Mapping[str, Any], tokens: _Texts, neighbours: int) -> dict[str, Any]:
    return {
        "a": chain["answer"],
        "r": chain["right"],
        "w": chain["cause"],
        "n": chain["length"],
        "f": chain["forward_passes"],
        "s": _short(chain["seconds"], 6),
        "g": chain["reference_length"],
        "t": [_thought(thought, tokens, neighbours) for thought in chain["thoughts"]],
        "m": [_group(group, tokens) for group in chain["missing"]],
    }


def _thought(thought: Mapping[str, Any], tokens: _Texts, neighbours: int) -> list[Any]:
    kind = 1 if thought["kind"] == "token" else 2 if thought["ordered"] else 0
    own: Any = len(thought["tokens"])
    if kind:
        own = []
        for token in thought["tokens"]:
            own += [tokens.index(token["text"]), _short(token["cosine"]), _short(token.get("logprob"))]
    near: list[Any] = []
    # A latent's own tokens are its nearest ones: so many must stay.
    for token in thought["neighbours"][: max(neighbours, own if kind == 0 else 0)]:
        near += [tokens.index(token["text"]), _short(token["cosine"])]
    return [
        kind,
        own,
        near,
        _short(thought["sigma"]),
        _short(thought["stop_probability"]),
        MARKS.index(thought["mark"]),
        _group(thought["reference"], tokens),
    ]


def _group(group: Sequence[Mapping[str, Any]], tokens: _Texts) -> list[int]:
    flat = []
    for token in group:
        flat += [tokens.index(token["text"]), int(token["said"])]
    return flat


def _short(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
