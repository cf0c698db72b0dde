"""Requests in, completions out: the naive reference and the batched, cached engine."""
