"""This release, and its commit.

The build runs this before anything is installed: standard library only.
"""

import subprocess
from importlib.metadata import version
from pathlib import Path

BAKED = "commit.txt"
"""At the top of the package in wheels and sdists, written by the build. A checkout has none and
asks git."""
_ASK = ("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


def release() -> str:
    """The version of this software."""
    return version("lowcomm-node")


def commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """The commit of this code, with ``-dirty`` if files were changed; None if unknown."""
    baked, root = package / BAKED, package.parents[1]
    if baked.is_file():
        return baked.read_text(encoding="ascii").strip() or None
    # Without this check git might find another repository around the installed packages.
    if not (root / ".git").exists():
        return None
    ask = ("git", "-C", str(root), *_ASK)
    try:
        answer = subprocess.run(
            ask, capture_output=True, timeout=10.0, check=True, encoding="utf-8"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def describe(protocol: int) -> str:
    """The output of ``--version``."""
    return f"{release()} (commit {commit() or 'unknown'}), protocol {protocol}"
