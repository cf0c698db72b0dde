"""What the fork server of `launch` imports: once for all processes that are forked from it.

Python looks for no garbage among that: not while it is imported, and not in a forked process, which would copy the memory
of a million objects by looking at them.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()

import families
import launch

import colar.cli
import colar.recipe
import colar.training.grpo.train

gc.enable()
gc.freeze()
