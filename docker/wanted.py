"""Prints what an image has to install: the project's requirements, and those of the extras that are
named."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(
    *project["dependencies"],
    *(one for extra in sys.argv[1:] for one in project["optional-dependencies"][extra]),
    sep="\n",
)
