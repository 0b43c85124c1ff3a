"""Prints what an image holds as a bill of materials (CycloneDX 1.6, JSON): packages of Python and
of Debian, with versions.

Run by the image's own Python. No time and no random number in it: the same image has the same bill.
"""

import json
import subprocess
from importlib.metadata import Distribution, distributions
from typing import Any


def of_python(found: Distribution) -> dict[str, Any]:
    """A package of Python."""
    name, licence = (
        found.metadata["Name"],
        found.metadata.get("License-Expression") or found.metadata.get("License"),
    )
    known = {"licenses": [{"license": {"name": licence.splitlines()[0][:100]}}]} if licence else {}
    return component(
        name, found.version, f"pkg:pypi/{name.lower().replace('_', '-')}@{found.version}", **known
    )


def of_debian() -> list[dict[str, Any]]:
    """The packages of Debian."""
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\\n"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    entries = (line.split() for line in told.splitlines())
    return [
        component(name, version, f"pkg:deb/debian/{name}@{version}?arch={arch}")
        for name, version, arch in entries
    ]


def component(name: str, version: str, purl: str, **more: Any) -> dict[str, Any]:
    """An entry of the bill."""
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": purl,
        "bom-ref": purl,
        **more,
    }


def main() -> None:
    """Print the bill."""
    packages = sorted(
        (of_python(found) for found in distributions()), key=lambda entry: entry["purl"]
    )
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [*packages, *of_debian()],
    }
    print(json.dumps(bill, indent=1))


if __name__ == "__main__":
    main()
