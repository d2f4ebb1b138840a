"""`python -m tensor_comprehensions.cli` is `tensorc`."""

import sys

from .main import main

sys.exit(main())
