"""colar: fine-tune a causal language model to think in compressed latents, at any speed."""

__version__ = "0.1.0"
