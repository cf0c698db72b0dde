"""What a run takes, before it is made: measured here (`check`), or computed for hardware that is elsewhere (`plan`)."""

from colar.planning.check import check
from colar.planning.plan import plan

__all__ = ["check", "plan"]
