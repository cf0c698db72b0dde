"""Backbones, their checkpoints, and the language model with the modules of its method."""
