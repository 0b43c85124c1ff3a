"""Images built and run for real, with podman on this machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docker" / "test"))

from engine import BASE, FOLDER, IMAGES, Engine, missing


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A machine with the images of this checkout; containers are ended in any case, images stay for
    the next time.

    LOWCOMM_IMAGES names the folder, which may become 10 GB.
    """
    if reason := missing():
        pytest.skip(f"images: {reason}")
    with Engine(Path(os.environ.get("LOWCOMM_IMAGES", FOLDER))) as engine:
        engine.import_base()
        # pinned, as whoever wants the same image again does
        base = f"{BASE.rpartition(':')[0]}@{engine.digest(BASE)}"
        for target in IMAGES:
            engine.build(target, base)
        yield engine
