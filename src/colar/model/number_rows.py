"""The first rows of number tokens, made of the rows of their digits.

    row of 12  =  (turned by 1 place (row of 1)  +  row of 2), as long as a digit's row

A plain mean would make one row of 12 and 21, and of 1 and 11. So each digit's row is turned first, by an angle for its
place, as rotary position embeddings turn queries and keys: dimension i and i + D/2 are a plane. Turning keeps lengths
and angles between rows. The angle is small: the row stays near the digits that the backbone knows.

Shape suffixes: D width, P places (1: units, 2: tens, 3: hundreds).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ANGLE = math.radians(30)
"""By which a place turns a row more than the place to its right."""


@torch.no_grad()
def start(module: Any, digit_ids: list[int], number_ids: list[int]) -> None:
    """Set the rows of the numbers from 10 on, in an embedding or an LM head; biases are the mean of the digits'."""
    weight = module.weight
    digits_10D = weight[digit_ids].float()
    biases_10 = None if getattr(module, "bias", None) is None else module.bias[digit_ids].float()
    for number, token_id in enumerate(number_ids, start=10):
        digits = [int(digit) for digit in str(number)]
        weight[token_id] = combined(digits_10D[digits]).to(weight)
        if biases_10 is not None:
            module.bias[token_id] = biases_10[digits].mean().to(weight)


def combined(digits_PD: Tensor) -> Tensor:
    """The row of a number, (D,), from its digits' rows, the first digit first."""
    places = range(len(digits_PD) - 1, -1, -1)
    turned = [turn(row, place * ANGLE) for row, place in zip(digits_PD, places, strict=True)]
    total = torch.stack(turned).sum(0)
    length = digits_PD.norm(dim=-1).mean()
    row: Tensor = total * (length / total.norm())
    return row


def turn(row_D: Tensor, angle: float) -> Tensor:
    """A row turned by an angle in all planes of dimensions i and i + D/2; an odd last dimension stays."""
    half = len(row_D) // 2
    a, b, rest = row_D[:half], row_D[half : 2 * half], row_D[2 * half :]
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.cat([cos * a - sin * b, sin * a + cos * b, rest])
