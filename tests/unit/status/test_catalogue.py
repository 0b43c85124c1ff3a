"""Everything that stops a node has an entry in the catalogue, and no entry is of nothing."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lowcomm_node
import lowcomm_protocol
from lowcomm_node.catalogue import CATALOGUE, code_of
from lowcomm_node.owner.rules import Rule
from lowcomm_protocol.errors import LowcommError, Reason
from lowcomm_protocol.exchange.events import Cause
from lowcomm_protocol.matching import Refusal

ROOTS = [Path(package.__file__).parent for package in (lowcomm_node, lowcomm_protocol)]


SAYS = ("warn", "warning", "showing", "withdraw")
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


def test_every_rule_of_the_owner_is_a_reason_to_wait():
    assert {str(rule) for rule in Rule} <= set(CATALOGUE["waits"])


def test_every_cause_and_every_refusal_of_an_exchange_has_one():
    assert {*map(str, Cause), *map(str, Refusal)} == set(CATALOGUE["exchanges"])


def codes_of_calls() -> Iterator[tuple[str, str, set[str]]]:
    """Place, kind and codes of each call that names what a node waits for or warns of."""
    for path, tree in files():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            values = [*node.args, *(one.value for one in node.keywords)]
            if name == "partial" and ast.unparse(values[0]).endswith(("board.warn", "self.warn")):
                name, values = "board.warn", values[1:]
            last = name.rpartition(".")[2]
            takes_code = "board." in name or "_listeners." in name
            takes_code |= (path.name, name) == ("catch_up.py", "self.warn")
            kind = "waits" if last in ("Waiting", "showing") else "warnings"
            if last in ("Waiting", "Warned") or (last in SAYS and takes_code):
                texts = {one.value for one in ast.walk(values[0]) if isinstance(one, ast.Constant)}
                place = f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}"
                yield place, kind, {text for text in texts if isinstance(text, str)}


PASSED_ON = ("code", "outside.code", "hold.rule")
"""Codes that a call only passes on."""


def test_every_code_that_a_node_names_is_in_the_catalogue():
    calls = list(codes_of_calls())
    assert len(calls) > 50, "the search found too few"
    for place, kind, codes in calls:
        assert codes <= set(CATALOGUE[kind]), place
        assert codes or any(text in place for text in PASSED_ON), place


@pytest.mark.parametrize("kind", ["waits", "warnings"])
def test_every_code_in_the_catalogue_is_named_somewhere(kind: str):
    rules = {str(rule) for rule in Rule}
    texts = {
        node.value
        for path, tree in files()
        if path.name != "catalogue.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(CATALOGUE[kind]) - rules <= texts


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
