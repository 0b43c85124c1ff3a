"""Importing much at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Context for large imports: a sixth faster, as nothing is searched for garbage meanwhile.

    What modules make stays for good, so later searches leave it out, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
