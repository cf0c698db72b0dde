"""The paper's case study: thoughts read as the tokens whose embeddings are nearest, at c = 2 and 5.

Above, one question with the thoughts that a model has of it, each as its c nearest tokens (`colar generate`).
Below, over many questions, the share of tokens that are among the n nearest to their thought, n being the different
tokens of its group (`lab/scripts/rank_thoughts.py`), by kind of token:

    commonest   no thought at all: the n commonest tokens of the other questions at that place, the control
    own         thoughts of the model's own chain
    written     thoughts after a right prefix
    reference   the reference's own latents: the ceiling, what reading by cosine can find at all
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from colar.evaluation import picture, stats
from colar.evaluation.stats import Z95
from paper_figures.points import bars, legend_below, new_figure

Thought = Mapping[str, Any]
"""See `ranks.Ranks`."""

KINDS = ("bracket", "sign", "operand", "result")
CHAINS = ("own", "written", "reference")
BARS = {
    "commonest": ("no thought: the commonest tokens (control)", "#dddddd"),
    "own": ("its own chain", "#56B4E9"),
    "written": ("after a right prefix", "#0072B2"),
    "reference": ("the reference's latents (ceiling)", "#888888"),
}
"""What is read -> the name and the colour of its bars."""
BAR_WIDTH = 0.2
LONGEST = 14
"""Characters of a token that are shown: some of the toy's are whole phrases."""
CHARACTERS = 13
"""Of a question's line, an inch."""


def shares_of(systems: Sequence[Mapping[str, Any]], c: float) -> dict[str, dict[str, Any]]:
    """Shares by what is read and by kind of token, over all checkpoints; `half` by question.

    ValueError where none was asked at c.
    """
    runs = [system["retrieval"] for system in systems if system["params"]["compression_factor"] == c]
    if not runs:
        raise ValueError(f"no thoughts were ranked at c = {c:g}")
    # All runs have the same questions: one of them is enough.
    thoughts = runs[0]["reference"]["thoughts"]
    shares = {"commonest": _by_kind(thoughts, commonest(thoughts))}
    for chain in CHAINS:
        thoughts = [thought for run in runs for thought in run[chain]["thoughts"]]
        shares[chain] = _by_kind(thoughts, [nearest(thought) for thought in thoughts])
    return shares


def nearest(thought: Thought) -> list[bool]:
    """Of each token of a thought, whether it is among the n nearest."""
    size = len(set(thought["token_ids"]))
    return [rank < size for rank in thought["ranks"]]


def commonest(thoughts: Sequence[Thought]) -> list[list[bool]]:
    """Of each token, whether it is among the n commonest that the other questions have at that place of the chain.

    Of equally common ones the smaller ids count. A chain of fixed form is guessed well without any thought.
    """
    everywhere: defaultdict[int, Counter[int]] = defaultdict(Counter)
    own: defaultdict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    for thought in thoughts:
        different = set(thought["token_ids"])
        everywhere[thought["position"]].update(different)
        own[thought["position"], thought["question"]].update(different)
    found = []
    for thought in thoughts:
        place = thought["position"]
        # A question must not vote for its own tokens.
        others = everywhere[place] - own[place, thought["question"]]
        ranked = sorted(others, key=lambda token_id: (-others[token_id], token_id))
        guessed = ranked[: len(set(thought["token_ids"]))]
        found.append([token_id in guessed for token_id in thought["token_ids"]])
    return found


def case_of(answers: Sequence[Mapping[str, Any]], question: str, steps: str, answer: str) -> dict[str, Any]:
    """One question's chains: the answers of `colar generate --show_latents`, one for each c."""
    chains = []
    # They come in the order in which they were finished.
    for given in sorted(answers, key=lambda answer: answer["params"]["compression_factor"]):
        c = given["params"]["compression_factor"]
        # As many as the thought stands for.
        thoughts = []
        for near in given["thoughts"]:
            thoughts.append([_short(token) for token in near[: int(c)]])
        chains.append({"c": c, "thoughts": thoughts, "answer": given["answer"]})
    return {"question": question, "steps": steps, "answer": answer, "chains": chains}


def _short(token: str) -> str:
    """A token cut between its words, or inside a single long one."""
    words = textwrap.shorten(token, LONGEST, placeholder="…")
    return words if words != "…" else token.strip()[: LONGEST - 1] + "…"


@picture.without_mathematics
def draw(data: dict[str, Any]) -> Any:
    """`data`: `case` (see `case_of`), and `shares` by title and by c (see `shares_of`)."""
    panels = [(title, c, found) for title, by_c in data["shares"].items() for c, found in by_c.items()]
    figure = new_figure(max(3.7 * len(panels), 10.8), 6.0)
    grid = figure.add_gridspec(2, len(panels), height_ratios=[0.8, 1])
    case = figure.add_subplot(grid[0, :])
    drawn = []
    for column, (title, c, shares) in enumerate(panels):
        axes = figure.add_subplot(grid[1, column])
        _draw_shares(axes, shares)
        picture.dress(
            axes, f"{title}, c = {c}", "kind of token", "" if column else "found in the thought (%)"
        )
        axes.set_ylim(0, 105)
        drawn.append(axes)
    legend_below(figure, drawn[0], "bars: 95% interval, clustered by question")
    # Last of all: it fixes the layout, in which the legend must have its room by then.
    _draw_case(case, data["case"])
    return figure


def _by_kind(thoughts: Sequence[Thought], found: Sequence[Sequence[bool]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {kind: [] for kind in KINDS}
    questions: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for thought, hits in zip(thoughts, found, strict=True):
        for kind, hit in zip(thought["kinds"], hits, strict=True):
            if kind in values:
                values[kind].append(float(hit))
                questions[kind].append(thought["question"])
    return {kind: _share(values[kind], questions[kind]) for kind in KINDS}


def _share(values: Sequence[float], questions: Sequence[str]) -> dict[str, Any]:
    if not values:
        return {"share": None, "half": None, "n": 0}
    estimate = stats.mean(values, questions)
    half = None if estimate.se is None else Z95 * estimate.se
    return {"share": estimate.mean, "half": half, "n": len(values)}


def _draw_shares(axes: Any, shares: dict[str, dict[str, Any]]) -> None:
    for place, (chain, (name, colour)) in enumerate(BARS.items()):
        x, y, half = [], [], []
        for number, kind in enumerate(KINDS):
            found = shares[chain][kind]
            if found["share"] is not None:
                x.append(number + (place - 1.5) * BAR_WIDTH)
                y.append(100 * found["share"])
                half.append(None if found["half"] is None else 100 * found["half"])
        axes.bar(x, y, BAR_WIDTH, color=colour, label=name)
        bars(axes, x, y, half, "#333333")
    axes.set_xticks(range(len(KINDS)), KINDS)


def _draw_case(axes: Any, case: dict[str, Any]) -> None:
    """The question, the reference's chain, and a line of boxes for each c."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    # Boxes stand beside one another by their widths, so the panel must be where it will stay.
    # The layout engine moves axes whenever the figure is drawn, also when it is saved.
    axes.figure.draw_without_rendering()
    axes.figure.set_layout_engine("none")
    axes.text(
        0,
        1,
        textwrap.fill(case["question"], int(CHARACTERS * axes.figure.get_figwidth())),
        fontsize=9,
        color=picture.INK,
        va="top",
    )
    reference = f"reference:  {case['steps']}  →  {case['answer']}"
    axes.text(0, 0.7, reference, fontsize=9, color="#555555", va="top")
    for number, chain in enumerate(case["chains"]):
        y = 0.45 - 0.25 * number
        name = axes.text(
            0, y, f"c = {chain['c']:g}", fontsize=9, fontweight="bold", color=picture.INK, va="center"
        )
        x = _right_of(name)
        for thought in chain["thoughts"]:
            box = {"boxstyle": "round,pad=0.3", "facecolor": "#eef4fa", "edgecolor": "#9bbbd6"}
            x = _right_of(
                axes.text(x, y, " ".join(thought), fontsize=8, color=picture.INK, va="center", bbox=box)
            )
        axes.text(x, y, f"→  {chain['answer']}", fontsize=9, color=picture.INK, va="center")


def _right_of(text: Any) -> float:
    """Where the next text may begin, in data coordinates."""
    box = text.get_window_extent(text.figure.canvas.get_renderer())
    left, right = text.axes.transData.inverted().transform([(box.x0, 0), (box.x1, 0)])[:, 0]
    assert right > left
    return float(right) + 0.016
