"""`python -m smoe_mlx` is `smoe-mlx`."""

import sys

from .cli import main

sys.exit(main())
