"""CoLaR's values: `ColarConfig` in a recipe, `ColarParams` in a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from colar.checks import check_choice, check_number, is_number
from colar.methods.colar.heads import Head, LatentLoss
from colar.ops.compress import Merge

Stop = Literal["majority", "argmax"]
ChainLabel = Literal["expected", "sampled"]


@dataclass(frozen=True)
class ColarParams:
    """Per-request values."""

    compression_factor: float = 2
    """c: how many reasoning tokens a latent stands for, 1 or more."""

    snap: bool = False
    """Feed back the sum of c token embeddings that the LM head's distribution is nearest to, not the latent head's
    mean: what the model was trained to read, so that small errors do not compound."""

    def __post_init__(self) -> None:
        if self.snap not in (True, False):
            raise ValueError(f"snap must be true or false, got {self.snap!r}")
        check_number("compression_factor", self.compression_factor, 1)


@dataclass(frozen=True)
class ColarConfig:
    """The paper's choices; its ablations are values of these."""

    compression_factors: tuple[float, ...] | str = "1..5"
    """Factors drawn from in training: a range of whole numbers such as "1..5" (the paper's), or a list, in which
    a factor that stands twice is drawn twice as often."""
    merge: Merge = "sqrt"
    """Scale of a group's sum: "sqrt" of its size, or its "mean" (ablation MP)."""
    head: Head = "gaussian"
    """"gaussian" predicts mean and spread; "deterministic" a point, trained by MSE (ablation DL); "anchored" is
    gaussian with a mean that starts from the LM head's expected embedding, to which the MLP learns a correction;
    "sequential" (ours) chooses the group's tokens one after another, by cross-entropy alone: no latent_loss, alpha,
    chain_label and stop."""
    latent_loss: LatentLoss = "soft_mse"
    """"soft_mse" for simple problems, "nll" for those that need exploration (the paper's MATH runs)."""
    alpha: float = 0.02
    """Weight of the entropy in soft-MSE; sigma settles at sqrt(alpha / 2) = 0.1 sigma_e, the exploration noise."""
    nll_beta: float = 0.0
    """Weighs the NLL by sigma^(2 nll_beta), 0 (the paper's) to 1 (beta-NLL, Seitzer et al. 2022): at 0 its gradient
    grows with 1 / sigma^2, until little else is left of a clipped one; 0.5 learns the mean as well as soft_mse."""
    supervise_chain: bool = True
    """Train the LM head on the tokens of each next group; false keeps only the stop and answer labels (OC)."""
    chain_label: ChainLabel = "expected"
    """"sampled": one token of the group, drawn at random (the paper's); "expected": its expectation over the draw."""
    stop: Stop = "majority"
    """When greedy thinking ends: "majority", the separator is more likely than not; "argmax", likelier than any one
    token (the paper's), which ends early where c tokens share what is left."""
    comp_weight: float = 1.0
    """Weight of L_comp."""
    latent_weight: float = 1.0
    """Weight of L_latent ("we sum up L_comp and L_latent")."""
    sigma_e: float | None = None
    """Scale of the embeddings; null: measured on the backbone at the start and kept here."""

    def __post_init__(self) -> None:
        check_choice("method.merge", self.merge, get_args(Merge))
        check_choice("method.head", self.head, get_args(Head))
        check_choice("method.latent_loss", self.latent_loss, get_args(LatentLoss))
        check_choice("method.chain_label", self.chain_label, get_args(ChainLabel))
        check_choice("method.stop", self.stop, get_args(Stop))
        check_number("method.nll_beta", self.nll_beta, 0, 1)
        if self.head == "deterministic" and self.latent_loss == "nll":
            raise ValueError("method.latent_loss nll needs a spread: use head gaussian, or soft_mse")
        if self.nll_beta and self.latent_loss != "nll":
            raise ValueError(f"method.nll_beta is a value of latent_loss nll; this one is {self.latent_loss}")
        for name in ("alpha", "comp_weight", "latent_weight"):
            check_number(f"method.{name}", getattr(self, name), 0)
        sigma_e = self.sigma_e
        if sigma_e is not None and not (is_number(sigma_e) and sigma_e > 0):
            raise ValueError(f"method.sigma_e must be above 0 or null, got {sigma_e!r}")
        if not self.factors:
            raise ValueError("method.compression_factors is empty")
        for c in self.factors:
            ColarParams(c)
            if self.head == "sequential" and c != int(c):
                raise ValueError(f"method.head sequential needs whole compression_factors, got {c:g}")

    @property
    def factors(self) -> tuple[float, ...]:
        """The training factors as numbers."""
        given = self.compression_factors
        if isinstance(given, list | tuple):
            return tuple(given)
        low, dots, high = str(given).partition("..")
        if not (dots and low.strip().isdigit() and high.strip().isdigit() and int(low) <= int(high)):
            raise ValueError(
                f'method.compression_factors must be a list or a range such as "1..5", got {given!r}'
            )
        return tuple(range(int(low), int(high) + 1))
