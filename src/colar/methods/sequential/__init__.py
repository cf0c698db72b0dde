"""The sequential method (ours): thoughts of c tokens that are chosen one after another."""

from colar.methods.sequential.config import SequentialConfig, SequentialParams
from colar.methods.sequential.method import Sequential

__all__ = ["Sequential", "SequentialConfig", "SequentialParams"]
