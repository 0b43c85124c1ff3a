"""Whether programs for a GPU can be compiled on this machine."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def can_compile() -> bool:
    """Whether Triton is there, and what it builds with: a C compiler and Python's headers.

    torch's compiler for a GPU needs the same.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return (
        compiler is not None and headers.exists() and importlib.util.find_spec("triton") is not None
    )
