"""The sequential method (ours): thoughts of c tokens that are chosen one after another."""

from colar.methods.sequential.method import Sequential, SequentialConfig, SequentialParams

__all__ = ["Sequential", "SequentialConfig", "SequentialParams"]
