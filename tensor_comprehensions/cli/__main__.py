"""Makes `python -m tensor_comprehensions.cli` run `tensorc`."""

import sys

from .main import main

sys.exit(main())
