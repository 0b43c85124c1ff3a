"""A run that is planned for a line: what `plan` prints, `init` writes and `create` warns of."""

import tomllib
from pathlib import Path

import pytest

from helpers.command_line import Cli
from lowcomm_node.cli.creator import check_line
from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec.run import parse_toml

LINE = ["--up", "20Mbit", "--down", "50Mbit", "--step-seconds", "1", "--peers", "4"]


def test_init_writes_the_best_of_the_plan_and_the_line_that_it_is_for(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    assert cli("init", str(file), "--plan", "--parameters", "10M", *LINE).code == 0
    told = cli("plan", str(file), *LINE, "--json").json
    best, spec = told["choices"][0], parse_toml(file.read_text())
    assert (spec.sync.method, spec.sync.interval) == (best["method"], best["interval"])
    assert told["as_written"]["interval"] == spec.sync.interval
    assert tomllib.loads(file.read_text())["plan"] == {
        "up": "20Mbit",
        "down": "50Mbit",
        "step_seconds": 1.0,
        "peers": 4,
        "latency": 50.0,
    }


def test_create_warns_where_the_line_makes_an_interval_longer(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert cli("init", str(file), "--plan", "--parameters", "10M", *LINE).code == 0
    fitting = file.read_text()
    assert check_line(parse_toml(fitting), fitting, "run.toml") is None
    slower = fitting.replace('up = "20Mbit"', 'up = "1Mbit"')
    assert "this line makes it every" in check_line(parse_toml(slower), slower, "run.toml")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ('up = "20"', "lacks step_seconds, peers"),
        ('up = "20"\nstep_seconds = 1\npeers = 4', "up = 20: 20 of what?"),
        (
            'up = "1Mbit"\nstep_seconds = 0\npeers = 4',
            "step_seconds = 0: expected greater than or equal to 0.0001",
        ),
        (
            'up = "1Mbit"\nstep_seconds = 1\npeers = 1',
            "peers = 1: expected greater than or equal to 2",
        ),
        ('up = "1Mbit"\nstep_seconds = 1\npeers = true', "peers = True: expected a"),
        ('up = "1Mbit"\nstep_seconds = 1\npeers = 4\nrate = 1', "rate = 1: it has up, down"),
    ],
)
def test_a_mistake_in_the_line_of_a_run_is_named(section: str, told: str) -> None:
    text = f'[run]\nname = "a"\n[sync]\nmethod = "lowcomm"\n[plan]\n{section}\n'
    with pytest.raises(ConfigError, match=r"run.toml: \[plan\]") as error:
        check_line(parse_toml(text), text, "run.toml")
    assert told in str(error.value)


def test_plan_says_what_a_gpu_holds_of_parameters_and_of_a_run_file(
    cli: Cli, tmp_path: Path
) -> None:
    options = ("plan", "--parameters", "8B", "--adapter", "16", "--vram")
    assert 'hold it with base = "nf4"' in cli(*options, "9GiB").out
    found = cli(*options, "9GiB", "--base", "nf4", "--moments", "int8", "--json").json
    assert found["windows"] and not found["changes"]
    file = tmp_path / "run.toml"
    assert cli("init", str(file), "--parameters", "10M").code == 0
    assert cli("plan", str(file), "--vram", "8GiB", "--json").json["windows"]
    start = 'files = [{name = "a.safetensors", size = 1, sha256 = "%s", pieces = "%s"}]'
    with file.open("a") as written:
        written.write(f"\n[start]\n{start % ('0' * 64, '0' * 64)}\n[adapter]\nrank = 8\n")
    found = cli("plan", str(file), "--vram", "8GiB", "--json").json
    assert found["trained"] < found["parameters"] / 10
    for wrong, said in (("--vram", "12 of what? Write 12GiB"), ("--base", "bf16, int8 or nf4")):
        refused = cli("plan", "--parameters", "1B", "--vram", "12GiB", wrong, "12")
        assert refused.code == 78 and said in refused.err
