"""CoLaR: its config, its heads, the method, and the log-probs of what it chose."""

from colar.methods.colar.config import ColarConfig, ColarParams
from colar.methods.colar.method import Colar

__all__ = ["Colar", "ColarConfig", "ColarParams"]
