"""The switch of the device lane: which device and which dtypes its tests run on, and how far results may differ there.

    COLAR_TEST_DEVICE   cpu (default) | cuda | mps          make test-device DEVICE=cuda
    COLAR_TEST_DTYPE    float32 | bfloat16                  both by default, on a CPU bfloat16

A test of the lane takes the fixtures `device` and `dtype` (conftest.py) and has the mark `device`. On the CPU it is a
test like any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = os.environ.get("COLAR_TEST_DEVICE", "cpu")
CHOSEN = os.environ.get("COLAR_TEST_DTYPE")
# In float32 a CPU would be compared with itself, and all other tests compute there.
DTYPES = (CHOSEN,) if CHOSEN else ("bfloat16",) if DEVICE == "cpu" else ("float32", "bfloat16")


@dataclass(frozen=True)
class Tolerance:
    """Bounds of |found - wanted| <= atol + rtol |wanted|, and of what only has to be near."""

    rtol: float
    atol: float
    ratio: float
    """How far GRPO's first ratio may be from 1 where rollouts and scores are computed in other batches, as a log."""

    def close(self, found: Tensor, wanted: Tensor, what: str = "") -> None:
        """AssertionError where two tensors are not close, whatever their devices and dtypes."""
        import torch  # seconds: the process that hands out tests needs none of it

        torch.testing.assert_close(
            found.detach().float().cpu(),
            wanted.detach().float().cpu(),
            rtol=self.rtol,
            atol=self.atol,
            msg=lambda text: f"{what}: {text}",
        )


TOLERANCES = {
    # Sums in another order; a GPU's products of float32 matrices are float32 too, unless TF32 is switched on.
    "float32": Tolerance(rtol=1e-3, atol=2e-4, ratio=1e-3),
    # 8 bits, through two layers of random weights.
    "bfloat16": Tolerance(rtol=5e-2, atol=8e-2, ratio=0.3),
}

for _dtype in DTYPES:
    if _dtype not in TOLERANCES:
        raise ValueError(f"COLAR_TEST_DTYPE must be {' or '.join(TOLERANCES)}, got {_dtype!r}")
