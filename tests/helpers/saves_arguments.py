"""A browser that only writes its command line down: ``saves_arguments.py FILE ARGUMENT...``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    draft = Path(sys.argv[1] + ".draft")
    draft.write_text(" ".join(sys.argv))
    draft.rename(sys.argv[1])
