"""The paper's case study: thoughts read as the tokens whose embeddings are nearest, at c = 2 and 5.

Above, one question with the thoughts that a model has of it, each as its c nearest tokens (`colar generate`).
Below, over many questions, the share of tokens that are among the n nearest to their thought, n being the different
tokens of its group (`colar inspect`), by kind of token, for three chains:

    written     thoughts after a right prefix
    own         thoughts of the model's own chain
    reference   the reference's own latents: the ceiling, what reading by cosine can find at all
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from colar.ops import stats
from colar.ops.stats import Z95
from colar.show import canvas
from colar.show.figures.points import bars, legend_below

KINDS = ("bracket", "sign", "operand", "result")
CHAINS = {
    "own": "its own chain",
    "written": "after a right prefix",
    "reference": "the reference's latents (ceiling)",
}
TELLING = re.compile(r"[\d+\-*/]")
"""What the paper underlines: tokens that say something, which brackets do not."""
SHADES = ("#56B4E9", "#0072B2", "#bbbbbb")


def shares_of(systems: Sequence[Mapping[str, Any]], c: float) -> dict[str, dict[str, Any]]:
    """The share in the set by chain and kind of token, over all checkpoints of an inspection; `half` by question.

    ValueError where none was inspected at c.
    """
    runs = [system["retrieval"] for system in systems if system["compression_factor"] == c]
    if not runs:
        raise ValueError(f"nothing was inspected at c = {c:g}")
    found: dict[str, dict[str, Any]] = {}
    for chain in CHAINS:
        thoughts = [thought for run in runs for thought in run[chain]["thoughts"]]
        found[chain] = {kind: _share(thoughts, kind) for kind in KINDS}
    return found


def case_of(answers: Sequence[Mapping[str, Any]], question: str, steps: str, answer: str) -> dict[str, Any]:
    """One question's chains: the answers of `colar generate --show_latents`, one for each c."""
    chains = []
    for given in answers:
        c = given["params"]["compression_factor"]
        # As many as the thought stands for.
        thoughts = [[token.strip() for token in near[: int(c)]] for near in given["thoughts"]]
        chains.append({"c": c, "thoughts": thoughts, "answer": given["answer"]})
    return {"question": question, "steps": steps, "answer": answer, "chains": chains}


def draw(data: dict[str, Any]) -> Any:
    """`data`: `case` (see `case_of`), and `shares` by title and by c (see `shares_of`)."""
    panels = [(title, c, found) for title, by_c in data["shares"].items() for c, found in by_c.items()]
    figure = canvas.figure(3.5 * len(panels), 6.4)
    grid = figure.add_gridspec(2, len(panels), height_ratios=[1, 1])
    _draw_case(figure.add_subplot(grid[0, :]), data["case"])
    drawn = []
    for column, (title, c, found) in enumerate(panels):
        axes = figure.add_subplot(grid[1, column])
        _draw_shares(axes, found)
        canvas.dress(axes, f"{title}, c = {c}", "kind of token", "" if column else "found in the thought (%)")
        axes.set_ylim(0, 105)
        drawn.append(axes)
    legend_below(figure, drawn[0], "bars: 95% interval, clustered by question")
    return figure


def _share(thoughts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    values = []
    questions = []
    for thought in thoughts:
        size = len(set(thought["token_ids"]))
        for rank, each in zip(thought["ranks"], thought["kinds"], strict=True):
            if each == kind:
                values.append(float(rank < size))
                questions.append(thought["id"])
    if not values:
        return {"share": None, "half": None, "n": 0}
    estimate = stats.mean(values, questions)
    return {
        "share": estimate.mean,
        "half": None if estimate.se is None else Z95 * estimate.se,
        "n": estimate.samples,
    }


def _draw_shares(axes: Any, found: dict[str, dict[str, Any]]) -> None:
    width = 0.26
    for place, (chain, name) in enumerate(CHAINS.items()):
        kinds = [kind for kind in KINDS if found[chain][kind]["share"] is not None]
        x = [KINDS.index(kind) + (place - 1) * width for kind in kinds]
        y = [100 * found[chain][kind]["share"] for kind in kinds]
        half = [found[chain][kind]["half"] for kind in kinds]
        axes.bar(x, y, width, color=SHADES[place], label=name)
        bars(axes, x, y, [None if value is None else 100 * value for value in half], "#444444")
    axes.set_xticks(range(len(KINDS)), KINDS)


def _draw_case(axes: Any, case: dict[str, Any]) -> None:
    """The question, the reference's chain, and a line of boxes for each c."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    question = textwrap.fill(case["question"], 110)
    axes.text(0, 1, question, fontsize=9, color=canvas.INK, va="top")
    axes.text(
        0,
        0.72,
        f"reference  {case['steps']}   answer {case['answer']}",
        fontsize=9,
        color="#555555",
        va="top",
    )
    renderer = axes.figure.canvas.get_renderer()
    for number, chain in enumerate(case["chains"]):
        y = 0.5 - 0.27 * number
        x = 0.0
        axes.text(x, y, f"c = {chain['c']:g}", fontsize=9, fontweight="bold", color=canvas.INK, va="center")
        x += 0.055
        for thought in chain["thoughts"]:
            x = _draw_thought(axes, x, y, thought, renderer)
        axes.text(x, y, f"answer {chain['answer']}", fontsize=9, color=canvas.INK, va="center")


def _draw_thought(axes: Any, x: float, y: float, thought: Sequence[str], renderer: Any) -> float:
    """One box; telling tokens in bold. Returns where the next one begins."""
    words = [rf"$\mathbf{{{word}}}$" if TELLING.search(word) and word.isdigit() else word for word in thought]
    text = axes.text(x + 0.006, y, " ".join(words), fontsize=8, color=canvas.INK, va="center",
                     bbox={"boxstyle": "round,pad=0.25", "facecolor": "#eef4fa", "edgecolor": "#9bbbd6"})  # fmt: skip
    box = text.get_window_extent(renderer).transformed(axes.transData.inverted())
    return float(box.x1) + 0.018
