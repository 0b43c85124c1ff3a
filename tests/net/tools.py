"""Install what the tests need of the system: ``make test-tools``. Does nothing where nothing is
missing.

Debian and its kin only, as root; elsewhere it names the commands that are missing. Needs nothing
but Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from namespaces import TOOLS, missing

OTHERS = {"systemd-analyze": "systemd", "mount": "mount", "promtool": "prometheus"}
"""Commands of other tests, and Debian's packages of them."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""Any of them does; Debian has the first."""
SERVICE = "prometheus"
"""What its package starts with the machine, which no test wants."""
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def main() -> int:
    """The exit code: 0 where all is there in the end."""
    if absent := absent_packages():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            return fail(
                f"the tests need the packages {' '.join(absent)}: install them, or run this as "
                "root on Debian"
            )
        try:
            install(absent)
        except subprocess.CalledProcessError as error:
            return fail(f"apt-get can't install {' '.join(absent)} (exit code {error.returncode})")
        if absent := absent_packages():
            return fail(f"apt-get has not brought what the tests need: {' '.join(absent)}")
    if reason := missing():
        return fail(f"the tests in a laboratory of networks can't run: {reason}")
    return 0


def absent_packages() -> list[str]:
    """Packages of which a command is missing."""
    wanted = {**TOOLS, **OTHERS}
    absent = {package for command, package in wanted.items() if not found(command)}
    if not any(map(found, BROWSERS)):
        absent.add(BROWSERS[0])
    return sorted(absent)


def found(command: str) -> bool:
    """Whether there is such a command."""
    return shutil.which(command, path=PATH) is not None


def install(packages: list[str]) -> None:
    """Install packages. Raises CalledProcessError."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["update", "-qq"],
        ["install", "-qq", "-y", "--no-install-recommends", *packages],
    ):
        subprocess.run(
            ["apt-get", "-o", "Acquire::Retries=5", *command], check=True, env=environment
        )
    if SERVICE in packages and Path("/run/systemd/system").exists():
        subprocess.run(["systemctl", "disable", "--quiet", "--now", SERVICE], check=True)


def fail(reason: str) -> int:
    """Tell why."""
    print(f"tests/net/tools.py: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
