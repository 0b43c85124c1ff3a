"""What must hold for a table of names: what is registered is found, and an error lists what there
is."""

import sys

import pytest

from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.names import Table


def test_what_is_registered_is_found_until_it_is_removed():
    table: Table[int] = Table("number", {"one": 1})
    table.register("two", 2)
    assert dict(table) == {"one": 1, "two": 2}
    with pytest.raises(SpecError, match="number 'two' is registered already"):
        table.register("two", 3)
    table.unregister("two")
    assert "two" not in table and list(table) == ["one"]
    with pytest.raises(SpecError, match=r"number 'two' is not known\. There are one$"):
        table.unregister("two")


def test_an_unknown_name_is_refused_with_the_nearest_and_all_others():
    table = Table("number", dict.fromkeys(("three", "seven"), 0))
    table.check("three")
    with pytest.raises(
        SpecError,
        match=r"number 'thre' is not known; did you mean 'three'\? There are three, seven$",
    ):
        table.check("thre")
    with pytest.raises(SpecError) as refused:
        table.check("x" * 10_000)
    assert len(str(refused.value)) < 200


def test_an_entry_that_is_named_is_imported_when_it_is_used_and_not_before(tmp_path, monkeypatch):
    (tmp_path / "of_the_table.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path)
    table: Table[int] = Table("answer", {"it": "of_the_table:answer"})
    assert "it" in table and list(table) == ["it"] and "of_the_table" not in sys.modules
    assert table["it"] == 42 and "of_the_table" in sys.modules
