"""Build hook: wheel and sdist carry the commit that they are made of, which ``lowcomm-node
--version`` tells.

From a checkout that is what git says; from an sdist, what that carries. Where neither knows,
SOURCE_COMMIT may tell it."""

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "node/lowcomm_node"


class CommitHook(BuildHookInterface):
    """Bakes the commit in; an editable installation asks git each time."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See BuildHookInterface."""
        package = Path(self.root) / PACKAGE
        known = runpy.run_path(str(package / "system" / "release.py"))
        commit = known["commit"](package) or os.environ.get("SOURCE_COMMIT", "").strip()
        if version == "editable" or not commit:
            return
        self._folder = tempfile.TemporaryDirectory()  # goes with the hook, after the build
        baked = Path(self._folder.name) / known["BAKED"]
        baked.write_text(f"{commit}\n", encoding="ascii")
        inside = PACKAGE if self.target_name == "sdist" else Path(PACKAGE).name
        build_data["force_include"][str(baked)] = f"{inside}/{known['BAKED']}"
