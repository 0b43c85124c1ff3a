"""Builds the images and runs containers on a Debian machine that has neither a container engine's
daemon nor a registry.

    python docker/test/engine.py build            base image by debootstrap, all images, and checks
    python docker/test/engine.py run COMMAND...   podman-compose -f docker/compose.yaml up -d

Needs root, and debootstrap, buildah, podman, podman-compose, netavark, aardvark-dns, crun,
iptables. Everything lies under ``--folder``; nothing else of the machine changes. Containers need
cgroup v2 alone and none of systemd: they run in a mount namespace that has it so, which lives as
long as the process that ``start`` makes."""

import argparse
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = ("debootstrap", "buildah", "podman", "podman-compose", "netavark", "crun", "iptables")
BASE = "docker.io/library/python:3.11-slim-bookworm"
IMAGES = {"node": "lowcomm-node", "bootstrap": "lowcomm-bootstrap", "router": "lowcomm-router"}
FOLDER = Path("/var/tmp/lowcomm-images")
RUN_ARGUMENTS = "--cgroups=disabled --ulimit nofile=1024:1024 --ulimit nproc=1000:1000"
"""Where a machine lets nobody raise limits or make cgroups."""
SETTINGS = ("/etc/pip.conf", "~/.config/pip/pip.conf")
CERTIFICATES = "/etc/ssl/certs"
"""What this machine's pip needs, with the folders that its settings name: mounted while images are
built, never part of them."""
MOUNTED = "/mnt"
"""Where: a folder that every base has, for the builder leaves an empty one behind that it had to
make."""


class Engine:
    """Images and containers under a folder. ``start`` before containers are run; use as a context
    manager to end them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.storage = (
            "--storage-driver",
            "overlay",
            "--root",
            str(folder / "root"),
            "--runroot",
            str(folder / "run"),
        )
        self.flags = (*self.storage, "--network-config-dir", str(folder / "networks"))
        """Of podman, which keeps networks as well."""
        self._holder: subprocess.Popen[str] | None = None

    # images

    def import_base(self) -> None:
        """Debian with Python under the name of the official image, unless it is there."""
        if self._has(BASE):
            return
        tree = self.folder / "base"
        shutil.rmtree(tree, ignore_errors=True)
        tree.parent.mkdir(parents=True, exist_ok=True)
        packages = "--include=python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", packages, "bookworm", str(tree))
        for name in ("etc/resolv.conf", "etc/hostname"):  # of this machine
            (tree / name).unlink(missing_ok=True)
        with subprocess.Popen(
            ["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE
        ) as packing:
            run("podman", *self.flags, "import", "-", BASE, stdin=packing.stdout)
        shutil.rmtree(tree)

    def build(self, target: str, base: str = BASE, *arguments: str) -> str:
        """Build a target; its image's name."""
        packages = named_folders(pip_settings())
        with tempfile.TemporaryDirectory(dir=self.folder) as settings:
            write_settings(Path(settings), packages)
            mounts = [(settings, MOUNTED), *((place, f"{MOUNTED}{place}") for place in packages)]
            run(
                "buildah", *self.storage, "bud", "--isolation", "chroot", "--format", "docker",
                "--layers",
                "--file", "docker/Dockerfile", "--target", target, "--tag", IMAGES[target],
                "--build-arg", f"BASE={base}", "--build-arg", f"PIP_CONFIG_FILE={MOUNTED}/pip.conf",
                # A machine's own folder of packages holds torch's build for the CPU.
                *(("--build-arg", "TORCH_INDEX=") if packages else ()),
                *(f"--volume={outside}:{inside}:ro" for outside,
                    inside in [*mounts, (CERTIFICATES, CERTIFICATES)]),
                *arguments, ".",
            )  # fmt: skip
        return IMAGES[target]

    def digest(self, image: str) -> str:
        """The digest of an image, by which a FROM can name it."""
        return self._inspect(image, "{{.Digest}}")

    def size(self, image: str) -> int:
        """Bytes of an image, with its base."""
        return int(self._inspect(image, "{{.Size}}"))

    def history(self, image: str) -> str:
        """How an image was made, with every setting that it has."""
        told = output(
            "podman", *self.flags, "history", "--no-trunc", "--format", "{{.CreatedBy}}", image
        )
        return told + self._inspect(image, "{{json .Config}}")

    def health_check(self, image: str) -> list[str]:
        """The command by which an engine sees whether a container of an image is well."""
        return json.loads(self._inspect(image, "{{json .HealthCheck}}"))["Test"]

    def files(self, image: str) -> Iterator[tuple[str, bytes]]:
        """All files of an image, with their contents."""
        name = output(
            "podman", *self.flags, "create", image, "never-run"
        ).strip()  # a base may have no command
        with tempfile.TemporaryFile(dir=self.folder) as archive:
            try:
                run("podman", *self.flags, "export", name, stdout=archive)
            finally:
                run("podman", *self.flags, "rm", name)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isfile() else None
                    yield member.name, content.read() if content is not None else b""

    def _has(self, image: str) -> bool:
        return (
            subprocess.run(
                ["podman", *self.flags, "image", "exists", image], check=False
            ).returncode
            == 0
        )

    def _inspect(self, image: str, what: str) -> str:
        return output("podman", *self.flags, "image", "inspect", "--format", what, image).strip()

    # containers

    def start(self) -> None:
        """Make the namespace in which containers run."""
        making = (
            "mount --make-rprivate / && umount -R /sys/fs/cgroup && mount -t cgroup2 none "
            "/sys/fs/cgroup && echo ready && exec sleep infinity"
        )
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", making],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError("no namespace with cgroup v2 can be made here")

    def inside(self, *command: str) -> list[str]:
        """A command line that runs there."""
        assert self._holder is not None, "start it first"
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={ROOT}", *command]

    def podman(self, *arguments: str, check: bool = True, timeout: float = 120) -> str:
        """Output of podman, run there. Raises RuntimeError with what it said, also if it takes too
        long."""
        command = self.inside("podman", *self.flags, *arguments)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"podman {' '.join(arguments)}: no answer within {timeout:.0f} s"
            ) from None
        if check and done.returncode:
            told = done.stdout[-1000:] + done.stderr[-1000:]
            raise RuntimeError(f"podman {' '.join(arguments)}: {done.returncode}: {told}")
        return done.stdout

    def compose(self, project: str, files: Sequence[str]) -> list[str]:
        """The beginning of a command line of podman-compose, which runs there."""
        arguments = [f"--podman-args={' '.join(self.flags)}", f"--podman-run-args={RUN_ARGUMENTS}"]
        named = [flag for file in files for flag in ("-f", str(ROOT / "docker" / file))]
        return self.inside("podman-compose", "-p", project, *arguments, *named)

    def stop(self) -> None:
        """End all containers and the namespace."""
        if self._holder is None:
            return
        self.podman("rm", "--all", "--force", "--time", "5", check=False, timeout=300)
        self._holder.kill()
        self._holder.wait()
        self._holder = None

    def __enter__(self) -> "Engine":
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.stop()


def missing() -> str | None:
    """Why this machine can't build and run images; None if it can."""
    if os.geteuid():
        return "needs root"
    lacking = [
        name
        for name in NEEDED
        if not shutil.which(name) and not Path("/usr/lib/podman", name).exists()
    ]
    return f"needs {', '.join(lacking)}" if lacking else None


def run(*command: str, **settings: object) -> None:
    """Run a command in the repository. Raises CalledProcessError."""
    subprocess.run(command, cwd=ROOT, check=True, **settings)


def output(*command: str) -> str:
    """Its output."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def pip_settings() -> configparser.ConfigParser:
    """What this machine tells its pip."""
    merged = configparser.ConfigParser(interpolation=None)
    merged.read([Path(file).expanduser() for file in SETTINGS])
    return merged


def named_folders(settings: configparser.ConfigParser) -> list[str]:
    """The folders on this machine where pip looks for packages."""
    words = [
        word
        for section in settings.values()
        for value in section.values()
        for word in value.split()
    ]
    paths = [Path(word.removeprefix("file://")) for word in words]
    # The pages of an index lie in simple/ (PEP 503), its packages beside that.
    folders = {
        path.parent if path.name == "simple" else path
        for path in paths
        if path.is_absolute() and path.is_dir()
    }
    return sorted(map(str, folders))


def write_settings(folder: Path, packages: Sequence[str]) -> None:
    """Put pip's settings of this machine into a folder, as they hold where ``packages`` are
    mounted."""
    merged = pip_settings()
    with (folder / "pip.conf").open("w") as file:
        merged.write(file)
    text = (folder / "pip.conf").read_text()
    for place in sorted(packages, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(place)}(?![\w-])", f"{MOUNTED}{place}", text)
        (folder / place.lstrip("/")).mkdir(parents=True)
    (folder / "pip.conf").write_text(text)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("build")
    running = commands.add_parser("run")
    running.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if reason := missing():
        sys.exit(f"error: this {reason}")
    engine = Engine(given.folder)
    if given.command == "build":
        engine.import_base()
        sizes = {image: engine.size(image) for image in (engine.build(target) for target in IMAGES)}
        print(json.dumps({"bytes": sizes | {"base": engine.size(BASE)}}, indent=1))
        return
    with engine:
        sys.exit(subprocess.run(engine.inside(*given.rest), check=False).returncode)


if __name__ == "__main__":
    main()
