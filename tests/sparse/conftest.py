"""Lets tests import the helpers beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
