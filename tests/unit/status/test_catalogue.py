"""Everything that stops a node has an entry in the catalogue, and no entry is of nothing."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lowcomm_node
import lowcomm_protocol
from lowcomm_node.catalogue import CATALOGUE, WaitCode, WarningCode, code_of
from lowcomm_node.owner.rules import Rule
from lowcomm_protocol.errors import LowcommError, Reason
from lowcomm_protocol.exchange.events import Cause
from lowcomm_protocol.matching import Refusal

ROOTS = [Path(package.__file__).parent for package in (lowcomm_node, lowcomm_protocol)]


SAYS = ("warn", "warning", "showing")
"""Methods of a board, and of whoever passes on to it, that take a code first."""


@cache
def files() -> list[tuple[Path, ast.Module]]:
    paths = [path for root in ROOTS for path in root.rglob("*.py")]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def trees() -> Iterator[ast.Module]:
    for _, tree in files():
        yield tree


def error_classes() -> set[str]:
    """Names of all classes that derive from LowcommError, wherever they stand."""
    bases: dict[str, set[str]] = {}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):  # two classes may have one name
                of = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
                bases.setdefault(node.name, set()).update(of)
    found = {LowcommError.__name__}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def test_every_error_has_a_code_a_sentence_and_a_remedy():
    codes = {code_of(type(name, (), {})) for name in error_classes()}
    assert len(codes) > 25, "the search found too few"
    assert codes == set(CATALOGUE["errors"])


def test_every_reason_to_refuse_has_one():
    assert {str(reason) for reason in Reason} == set(CATALOGUE["refusals"])


def test_every_reason_to_wait_has_one_and_every_rule_of_the_owner_is_one():
    assert set(WaitCode) == set(CATALOGUE["waits"])
    assert {str(rule) for rule in Rule} <= set(CATALOGUE["waits"])


def test_every_cause_and_every_refusal_of_an_exchange_has_one():
    assert {*map(str, Cause), *map(str, Refusal)} == set(CATALOGUE["exchanges"])


def test_every_warning_has_one():
    assert set(WarningCode) == set(CATALOGUE["warnings"])


def said_without_a_code() -> Iterator[str]:
    """Calls that tell the owner something, and name no code in the first place."""
    for path, tree in files():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            on = ast.unparse(getattr(node.func, "value", node.func))
            if name == "Waiting" or (name in SAYS and on.endswith(("board", "_listeners"))):
                first = ast.unparse(node.args[0]) if node.args else ""
                if not first.startswith(("WaitCode", "WarningCode", "outside.code", "code")):
                    yield f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}"


def test_nothing_is_said_without_a_code():
    assert list(said_without_a_code()) == []


def test_every_entry_is_a_sentence_with_a_remedy():
    for kind, catalogue in CATALOGUE.items():
        for code, one in catalogue.items():
            assert one.meaning.endswith("."), (kind, code)
            assert one.remedy, (kind, code)
            assert "|" not in one.meaning + one.remedy, (kind, code)


def test_options_and_commands_that_remedies_name_exist():
    import re

    import typer

    from lowcomm_node.cli import app

    command = typer.main.get_command(app)
    texts = " ".join(one.remedy for each in CATALOGUE.values() for one in each.values())
    for name in set(re.findall(r"`lowcomm-node ([a-z]+)", texts)):
        assert name in command.commands, name
    options = {
        option
        for one in command.commands.values()
        for parameter in one.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert set(re.findall(r"`(--[a-z-]+)`", texts)) - {"--version"} <= options
