"""Draw the picture at the head of README: one chain of thought as tokens, and the same chain as latents at c = 2.

    python scripts/draw_idea.py            # writes docs/idea-light.svg and docs/idea-dark.svg

Letters are drawn as paths, so that the reader's machine needs no font of ours.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path as Curve

ROOT = Path(__file__).resolve().parent.parent

QUESTION = "21 beads in 7 equal piles:\nhow many in each?"
SPEED = "(Thinking speed: 2)"
CHAIN = ("<<", "21", "/", "7", "=", "3", ">>")
SEPARATOR = "###"
ANSWER = "3"
FACTOR = 2
MERGING = "A latent is the sum of its tokens' embeddings, divided by the square root of their number."
THINKING = "The model learns to write such latents itself, one at a time. You choose c when you ask."

# Lengths are in hundredths of an inch.
WIDTH, HEIGHT = 960, 440
MARGIN = 20
GAP = 10
BOX_HEIGHT = 46
QUESTION_WIDTH, QUESTION_HEIGHT = 232, 74
SEPARATOR_WIDTH = 54
TOKEN_WIDTH = 62
LATENT_WIDTH = 84
ANSWER_WIDTH = 46
CHAIN_LEFT = MARGIN + QUESTION_WIDTH + GAP + SEPARATOR_WIDTH + GAP
TOKENS_Y, LATENTS_Y = 318, 120

MONO = "DejaVu Sans Mono"
STRIPES = 24
"""Strips of one colour that make a latent's blend."""


@dataclass(frozen=True)
class Theme:
    """The colours of one picture. `chain` has one colour for each token of the chain."""

    text: str
    quiet: str
    paper: str
    border: str
    separator: str
    chain: tuple[str, ...]
    on_chain: str


LIGHT = Theme(
    text="#1f2328",
    quiet="#59636e",
    paper="#ffffff",
    border="#afb8c1",
    separator="#eaeef2",
    chain=("#4269d0", "#3f8fce", "#2aa1a8", "#3ca951", "#b08a00", "#d9722c", "#d6517d"),
    on_chain="#ffffff",
)
DARK = Theme(
    text="#f0f6fc",
    quiet="#9198a1",
    paper="#151b23",
    border="#656c76",
    separator="#2a313c",
    chain=("#5b7fe6", "#4a9fe0", "#33b1b8", "#46b85c", "#c79d12", "#ee8b4a", "#e5628d"),
    on_chain="#0d1117",
)
THEMES = {"light": LIGHT, "dark": DARK}


def groups(chain: tuple[str, ...], factor: int) -> list[list[int]]:
    """The indices of the tokens of each latent; the last group may be shorter."""
    indices = list(range(len(chain)))
    return [indices[start : start + factor] for start in range(0, len(chain), factor)]


def middle(i: int, width: float) -> float:
    """The middle of the i-th box of that width; the boxes stand side by side from `CHAIN_LEFT` on."""
    return CHAIN_LEFT + i * (width + GAP) + width / 2


def rounded(x: float, y: float, width: float, height: float, radius: float, **style: Any) -> FancyBboxPatch:
    """A box with round corners and its middle at (x, y)."""
    corner = (x - width / 2, y - height / 2)
    shape = f"round,pad=0,rounding_size={radius}"
    return FancyBboxPatch(corner, width, height, boxstyle=shape, zorder=3, **style)


def write(axes: Axes, x: float, y: float, text: str, colour: str, size: float, **style: Any) -> None:
    """Text with its middle at (x, y), or its left end with `ha="left"`."""
    style = {"ha": "center", "va": "center", "zorder": 5, **style}
    axes.text(x, y, text, color=colour, fontsize=size, **style)


def box(axes: Axes, x: float, y: float, width: float, text: str, face: str, edge: str, ink: str) -> None:
    """A token: a rounded box with its text."""
    axes.add_patch(rounded(x, y, width, BOX_HEIGHT, 9, facecolor=face, edgecolor=edge, linewidth=1.1))
    write(axes, x, y, text, ink, 13, family=MONO)


def latent(axes: Axes, theme: Theme, group: list[int], x: float) -> None:
    """A latent: a box that blends from the colour of its first token to that of its last."""
    outline = rounded(x, LATENTS_Y, LATENT_WIDTH, BOX_HEIGHT, 21, facecolor="none", edgecolor="none")
    axes.add_patch(outline)
    first = to_rgb(theme.chain[group[0]])
    last = to_rgb(theme.chain[group[-1]])
    stripe_width = LATENT_WIDTH / STRIPES
    for i in range(STRIPES):
        share = i / (STRIPES - 1)
        colour = [a + (b - a) * share for a, b in zip(first, last, strict=True)]
        corner = (x - LATENT_WIDTH / 2 + i * stripe_width, LATENTS_Y - BOX_HEIGHT / 2)
        # Half a unit wider than its share, so that no seam shows between two stripes.
        stripe = Rectangle(corner, stripe_width + 0.5, BOX_HEIGHT, facecolor=colour, linewidth=0, zorder=4)
        axes.add_patch(stripe)
        stripe.set_clip_path(outline)
    words = " ".join(CHAIN[i] for i in group)
    write(axes, x, LATENTS_Y, words, theme.on_chain, 12, family=MONO)


def strand(axes: Axes, colour: str, start: float, end: float) -> None:
    """A soft line from a token down into its latent."""
    top = TOKENS_Y - BOX_HEIGHT / 2 - 3
    bottom = LATENTS_Y + BOX_HEIGHT / 2 + 3
    half = (top + bottom) / 2
    points = [(start, top), (start, half), (end, half), (end, bottom)]
    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=3, alpha=0.8, zorder=2))


def frame(axes: Axes, theme: Theme, y: float, question: str, end: float) -> float:
    """Draw what both rows share: the question, the two separators, the answer.

    `end` is the right end of the chain. Returns the right end of the row.
    """
    x = MARGIN + QUESTION_WIDTH / 2
    style = {"facecolor": theme.paper, "edgecolor": theme.border, "linewidth": 1.1}
    axes.add_patch(rounded(x, y, QUESTION_WIDTH, QUESTION_HEIGHT, 9, **style))
    write(axes, x, y, question, theme.text, 11, linespacing=1.45)
    opening = CHAIN_LEFT - GAP - SEPARATOR_WIDTH / 2
    closing = end + GAP + SEPARATOR_WIDTH / 2
    for x in (opening, closing):
        box(axes, x, y, SEPARATOR_WIDTH, SEPARATOR, theme.separator, theme.border, theme.text)
        write(axes, x, y + 35, "separator", theme.quiet, 9)
    x = closing + SEPARATOR_WIDTH / 2 + GAP + ANSWER_WIDTH / 2
    box(axes, x, y, ANSWER_WIDTH, ANSWER, theme.paper, theme.border, theme.text)
    write(axes, x, y + 35, "answer", theme.quiet, 9)
    return x + ANSWER_WIDTH / 2


def heading(axes: Axes, theme: Theme, y: float, title: str, note: str) -> None:
    """The name of a row and its cost, above it."""
    write(axes, MARGIN, y + 84, title, theme.text, 15, ha="left", weight="bold")
    write(axes, MARGIN, y + 58, note, theme.quiet, 11.5, ha="left")


def draw(theme: Theme) -> Figure:
    """The whole picture, on a transparent ground."""
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")

    heading(axes, theme, TOKENS_Y, "Chain of thought", f"{len(CHAIN)} tokens, one forward pass each")
    for i, token in enumerate(CHAIN):
        colour = theme.chain[i]
        box(axes, middle(i, TOKEN_WIDTH), TOKENS_Y, TOKEN_WIDTH, token, colour, colour, theme.on_chain)
    chain_end = middle(len(CHAIN) - 1, TOKEN_WIDTH) + TOKEN_WIDTH / 2
    tokens_end = frame(axes, theme, TOKENS_Y, QUESTION, chain_end)

    merged = groups(CHAIN, FACTOR)
    heading(axes, theme, LATENTS_Y, f"CoLaR, c = {FACTOR}", f"{len(merged)} latents, one pass each")
    for k, group in enumerate(merged):
        x = middle(k, LATENT_WIDTH)
        latent(axes, theme, group, x)
        for j, i in enumerate(group):
            # The strands of a latent share its upper edge evenly.
            end = x + LATENT_WIDTH * ((j + 0.5) / len(group) - 0.5)
            strand(axes, theme.chain[i], middle(i, TOKEN_WIDTH), end)
    chain_end = middle(len(merged) - 1, LATENT_WIDTH) + LATENT_WIDTH / 2
    latents_end = frame(axes, theme, LATENTS_Y, f"{QUESTION}\n{SPEED}", chain_end)

    # The shorter chain leaves this much of the row free.
    arrow = {"arrowstyle": "<->", "color": theme.border, "linewidth": 1.3}
    axes.annotate("", (latents_end + 6, LATENTS_Y), (tokens_end, LATENTS_Y), arrowprops=arrow)
    saved = f"{len(CHAIN) - len(merged)} passes saved"
    write(axes, (latents_end + 6 + tokens_end) / 2, LATENTS_Y + 14, saved, theme.quiet, 11)

    write(axes, MARGIN, 52, MERGING, theme.quiet, 11.5, ha="left")
    write(axes, MARGIN, 26, THINKING, theme.quiet, 11.5, ha="left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the two pictures")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    # A fixed salt and no date: the same picture is the same file.
    with matplotlib.rc_context({"svg.hashsalt": "colar", "svg.fonttype": "path"}):
        for name, theme in THEMES.items():
            path = args.output / f"idea-{name}.svg"
            draw(theme).savefig(path, transparent=True, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main()
