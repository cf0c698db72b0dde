"""What the fork server of `launch` imports: once for all processes that are forked from it.

Python looks for no garbage among that: not while it is imported, and not in a forked process, which would copy the memory
of a million objects by looking at them.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()

import families
import launch
import torch

import colar.cli
import colar.recipe
import colar.training.grpo.train
from colar.model.latent_lm import LoraSettings

# The first model of a process compiles hundreds of patterns. One thread: a forked process has no others.
torch.set_num_threads(1)
families.tiny_lm("llama", lora=LoraSettings(r=2))

gc.enable()
gc.freeze()
