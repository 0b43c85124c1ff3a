"""``lend`` and ``pair``: what they print, where nobody is at a terminal, and how they end."""

import re
import signal
from pathlib import Path

import pytest

from helpers.command_line import Cli
from helpers.processes import Process, free_port, run
from helpers.waiting import until
from lowcomm_node.household.machines import Household, Machine
from lowcomm_node.net.tls import make_certificate


def code_of(lender: Process) -> str:
    """The code that a lender shows."""
    found = until(lambda: re.search(r"^  (\w{4}(-\w{4}){3})$", lender.output, re.M), 60, "a code")
    assert found
    return found[1]


def test_two_commands_pair_two_machines_and_ctrl_c_ends_the_lender(tmp_path: Path) -> None:
    port, head = free_port(), tmp_path / "head"
    home = tmp_path / "lender"
    lender = Process(home, "lowcomm_node", "lend", "--home", str(home), "--port", str(port))
    try:
        code, address = code_of(lender), f"127.0.0.1:{port}"
        pairing = ("lowcomm_node", "pair", address, "--home", str(head))
        asked = run(*pairing)
        assert asked.returncode == 78
        assert f"lowcomm-node pair {address} --code CODE" in asked.stderr
        done = run(*pairing, "--code", code)
        assert done.returncode == 0 and done.stdout.endswith(f" at {address} is paired.\n")
        until(lambda: "is paired with this machine" in lender.output, 60, "the lender says so")
        assert "lowcomm-node join --with " in lender.output and f":{port}" in lender.output
        assert max(map(len, lender.output.splitlines())) <= 80
    finally:
        code = lender.end(signal.SIGINT)
    assert code == 0 and "Traceback" not in lender.output


def test_a_machine_is_forgotten_by_its_name(cli: Cli, tmp_path: Path) -> None:
    household = Household(tmp_path / "home")
    household.add(Machine(name="desk", key=make_certificate().public_key.hex()))
    wrong = cli("lend", "--forget", "dsek")
    assert wrong.code == 78 and "there is desk" in wrong.err
    assert cli("lend", "--forget", "desk").out == "desk is paired with this machine no longer.\n"
    assert not household.machines()


@pytest.mark.parametrize("command", ["pair 10.0.0.1:0x --code a", "pair 127.0.0.1:1 --code a"])
def test_what_can_not_be_an_address_or_a_code_is_one_line(command: str, cli: Cli) -> None:
    ended = cli(*command.split())
    assert ended.code == 78 and len(ended.err.splitlines()) == 1
