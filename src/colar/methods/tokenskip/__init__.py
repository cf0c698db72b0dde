"""TokenSkip: the method, and how much each token of a chain matters."""

from colar.methods.tokenskip.method import TokenSkip, TokenSkipConfig, TokenSkipParams

__all__ = ["TokenSkip", "TokenSkipConfig", "TokenSkipParams"]
