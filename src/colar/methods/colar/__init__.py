"""CoLaR, the paper's method: a head that predicts the next latent."""

from colar.methods.colar.method import Colar, ColarConfig, ColarParams

__all__ = ["Colar", "ColarConfig", "ColarParams"]
