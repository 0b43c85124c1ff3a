"""What is in the images, and what is not. They are built for real, on a base that was made here."""

import json
import re
from pathlib import Path

import pytest
from engine import (
    BASE,
    CERTIFICATES,
    IMAGES,
    MOUNTED,
    SETTINGS,
    Engine,
    named_folders,
    pip_settings,
)

pytestmark = [pytest.mark.images, pytest.mark.soak, pytest.mark.timeout(3600)]
FOLDERS = named_folders(pip_settings())
TOOLS = re.compile(r"bin/(pip[\d.]*|gcc[^/]*|g\+\+[^/]*|cc|ld|make|cmake|git)$|-packages/pip/")


def secrets() -> dict[str, bytes]:
    """What this machine's package settings say, piece by piece; an image must hold none of them."""
    found = {place: place.encode() for folder in FOLDERS for place in (folder, MOUNTED + folder)}
    for file in (Path(file).expanduser() for file in SETTINGS):
        if file.exists():
            values = re.findall(rb"=\s*(\S.*)", file.read_bytes())
            found |= {
                f"{file}: {value.decode(errors='replace')}": value.strip() for value in values
            }
    # Every Debian has certificates there, and tools that name them.
    return {name: value for name, value in found.items() if CERTIFICATES.encode() not in value}


@pytest.mark.parametrize("image", IMAGES.values())
def test_nothing_of_the_machine_that_built_it_is_in_an_image(engine: Engine, image: str) -> None:
    unwanted, base = secrets(), dict(engine.files(BASE))
    history = engine.history(image)
    assert [name for name, value in unwanted.items() if value.decode() in history] == []
    count = 0
    for name, content in engine.files(image):
        count += 1
        if base.get(name) == content:
            continue
        assert [what for what, value in unwanted.items() if value in content] == [], name
        assert not name.startswith(("etc/ssl/certs/", "root/", "mnt/")), f"{name} is not the base's"
        assert name != "etc/pip.conf" and f"/{name}".rstrip("/") not in FOLDERS, name
        assert name != "etc/resolv.conf" or not content, "an engine puts its own there"
    assert count > 1000


@pytest.mark.parametrize("image", ["lowcomm-node", "lowcomm-bootstrap"])
def test_an_image_has_no_build_tools_and_tells_what_it_has(engine: Engine, image: str) -> None:
    files = dict(engine.files(image))
    assert [name for name in files if TOOLS.search(name)] == []
    assert [name for name in files if name.startswith(("src/", "wheel/", "pip/", "tests/"))] == []
    config = json.loads(engine.history(image).splitlines()[-1])
    assert config["User"] == "lowcomm" and config["StopSignal"] == "SIGTERM"
    check = ["status", "--check"] if image == "lowcomm-node" else ["healthy"]
    assert engine.health_check(image) == ["CMD", image, *check]
    bill = json.loads(files[config["Labels"]["lowcomm.sbom"].lstrip("/")])
    versions = {entry["name"]: entry["version"] for entry in bill["components"]}
    lock = dict(
        line.split(";")[0].strip().split("==")
        for line in Path("requirements.lock").read_text().splitlines()
        if "==" in line
    )
    assert (
        versions["lowcomm-node"] and versions["tini"] and versions["hivemind"] == lock["hivemind"]
    )
    packages = [
        entry
        for entry in bill["components"]
        if entry["purl"].startswith("pkg:pypi/") and entry["name"] in lock
    ]
    pinned = {entry["name"]: entry["version"].split("+")[0] for entry in packages}
    assert pinned == {name: lock[name] for name in pinned}, "the versions of requirements.lock"


def test_a_signal_reaches_what_runs_before_python_listens(engine: Engine) -> None:
    engine.podman(
        "run", "-d", "--name", "early", *locked(), "lowcomm-node", "join", "--peers", NOWHERE
    )
    try:
        engine.podman("stop", "--time", "30", "early", timeout=60)
        code = int(engine.podman("inspect", "--format", "{{.State.ExitCode}}", "early"))
        assert code != 137, "it was not killed"
    finally:
        engine.podman("rm", "--force", "early", check=False)


def test_it_runs_as_nobody_who_may_do_anything(engine: Engine) -> None:
    look = (
        "id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; touch /opt/x /usr/x 2>&1; "
        "touch /tmp/x && echo tmp"
    )
    told = engine.podman("run", "--rm", *locked(), "--entrypoint", "sh", "lowcomm-node", "-c", look)
    assert told.splitlines()[0] == "10001"
    assert re.findall(r"Cap\w+:\s*(\w+)", told) == ["0" * 16] * 2 and re.search(
        r"NoNewPrivs:\s*1", told
    )
    assert told.count("Read-only file system") == 2 and told.endswith("tmp\n")


NOWHERE = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"


def locked() -> tuple[str, ...]:
    """How docs/server.md has a node run."""
    limits = ("--cgroups=disabled", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")
    return (
        *limits,
        "--read-only",
        "--tmpfs=/tmp",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
    )
