"""What all tests share."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# No timed assertions: a first example compiles, and machines are noisy.
settings.register_profile("lowcomm", deadline=None)
settings.load_profile("lowcomm")
