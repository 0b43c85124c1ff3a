"""llama.cpp, by the npm packages that package-lock.json pins."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def llama_cpp() -> Callable[[Path, int, str], dict[str, Any]]:
    """Have llama.cpp continue a text with the model of a file: see continue.mjs."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node 20 and npm are not installed here")
    if not (HERE / "node_modules").is_dir():
        # `npm ci` of release 11 refuses a lock without packages that the registry lacks.
        options = ["--no-save", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run([npm, "install", *options], cwd=HERE, check=True, timeout=500)

    def continued(file: Path, count: int, text: str) -> dict[str, Any]:
        done = subprocess.run(
            [node, str(HERE / "continue.mjs"), str(file), str(count), text],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return continued
