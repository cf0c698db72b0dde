"""`python -m colar.cli`, as torchrun calls it."""

import sys

from colar.cli import main

sys.exit(main())
