"""Build what is released, and check it: ``make release``.

    checkout (clean, its version told in CHANGELOG.md)
      -> dist/: sdist, wheel                   the wheel built from the sdist is the same to the bit
      -> their tests, and the wheel's own ``--version``
      -> images of docker/Dockerfile           with docker or buildah; each tells the same version
      -> dist/SHA256SUMS, and a table

``--trial`` takes a checkout with changes, and a version that is not dated yet. Nothing is uploaded:
CONTRIBUTING.md tells what is left to do.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TARGETS = {"node": "lowcomm-node", "bootstrap": "lowcomm-bootstrap"}
"""Targets of the Dockerfile, and the image and command of each."""
TESTS = ("tests/unit/repository/test_packages.py", "tests/unit/node/test_systemd_units.py")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Build wheel, sdist and images, and check them.")
    parser.add_argument(
        "--trial", action="store_true", help="take uncommitted changes and an undated version"
    )
    parser.add_argument("--no-images", action="store_true", help="packages alone")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if not arguments.trial:
        refuse_unready(version)
    shutil.rmtree(DIST, ignore_errors=True)
    packages = build_packages()
    told = check_packages(packages)
    images = [] if arguments.no_images else build_images(version, told)
    write_sums(packages)
    print(f"\n{told}")
    for path in packages:
        print(f"  {path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    for image in images:
        print(f"  image {image}")


def refuse_unready(version: str) -> None:
    """A release is what is committed, and tells of itself."""
    if changed := run("git", "status", "--porcelain").strip():
        sys.exit(
            "These files are changed and not committed (--trial takes them as they "
            f"are):\n{changed}"
        )
    heading = re.search(
        rf"^## {re.escape(version)} \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    if heading is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        sys.exit(
            f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)': write the day of the "
            "release (or use --trial)."
        )


def build_packages() -> list[Path]:
    """The sdist, and the wheel, which is the same whether built from it or from the checkout."""
    build(ROOT, "sdist", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        (source,) = Path(name).iterdir()
        build(source, "wheel", DIST)
        build(ROOT, "wheel", Path(name) / "again")
        (wheel,) = DIST.glob("*.whl")
        if wheel.read_bytes() != (Path(name) / "again" / wheel.name).read_bytes():
            sys.exit(f"{wheel.name} built from the sdist is not the one built from the checkout.")
    return [sdist, wheel]


def build(source: Path, target: str, folder: Path) -> None:
    """Build one package."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder), cwd=source)


def check_packages(packages: Sequence[Path]) -> str:
    """Test them; what the command of the wheel tells of its version, run far from the checkout."""
    say("testing the packages")
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, shown=True)
    with tempfile.TemporaryDirectory() as name:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        run(*pip, "--target", name, str(packages[1]))
        told = run(
            sys.executable, "-m", "lowcomm_node", "--version", cwd=Path(name), path=name
        ).strip()
    if "commit unknown" in told:
        sys.exit(f"{told}: build from a git checkout, or name the commit in SOURCE_COMMIT.")
    return told


def build_images(version: str, told: str) -> list[str]:
    """Build each target of the Dockerfile; their names with size.

    A machine that can't build images skips them and prints why.
    """
    recipe = ROOT / "docker" / "Dockerfile"
    tool = usable_builder()
    if not recipe.exists() or tool is None:
        say(
            "images skipped: "
            + (
                "neither docker nor buildah works here"
                if recipe.exists()
                else "no docker/Dockerfile"
            )
        )
        return []
    commit = re.search(r"commit (\S+)\)", told)
    options = ["--build-arg", f"SOURCE_COMMIT={commit[1] if commit else ''}", "-f", str(recipe)]
    # What building needs of this machine alone, such as --volume for packages' settings.
    options += os.environ.get("IMAGE_OPTIONS", "").split()
    images = []
    for target, name in TARGETS.items():
        image = f"{name}:{version}"
        say(f"building the image {image}")
        run(*tool, *options, "--target", target, "-t", image, str(ROOT), shown=True)
        check_image(image, name, told)
        images.append(image)
    return images


def usable_builder() -> list[str] | None:
    """The command that builds an image here."""
    if (
        shutil.which("docker")
        and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    ):
        return ["docker", "build"]
    return ["buildah", "bud"] if shutil.which("buildah") else None


def check_image(image: str, command: str, told: str) -> None:
    """Run the image, if something here can: it must tell the version of the wheel."""
    runner = next((one for one in ("docker", "podman") if shutil.which(one)), None)
    if runner is None:
        say(f"{image} was built and not run: neither docker nor podman is here")
        return
    found = run(runner, "run", "--rm", "--entrypoint", command, image, "--version").strip()
    if found.partition(" ")[2] != told.partition(" ")[2]:
        sys.exit(f"The image {image} tells {found!r}, the wheel {told!r}.")


def write_sums(packages: Sequence[Path]) -> None:
    """Digests, as ``sha256sum --check`` reads them."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in packages]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def run(
    *command: str, cwd: Path | None = None, path: str | None = None, shown: bool = False
) -> str:
    """Run a command, and end with what it said if it fails; its output. ``path``: where it finds
    packages first."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH" or path is None
    }
    if path is not None:
        environment["PYTHONPATH"] = path
    pipe = None if shown else subprocess.PIPE
    done = subprocess.run(
        command, cwd=cwd or ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(command)} ended with "
            f"{done.returncode}\n{done.stdout or ''}{done.stderr or ''}"
        )
    return done.stdout or ""


def say(text: str) -> None:
    """A line on what goes on."""
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    main()
