"""What must hold for imports: the garbage collector rests meanwhile, and only meanwhile."""

import gc

import pytest

from lowcomm_node.system.command import importing


def test_the_collector_rests_while_modules_are_imported():
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_import_that_fails():
    with pytest.raises(ModuleNotFoundError), importing():
        import no_module_has_this_name  # noqa: F401 # pyright: ignore[reportMissingImports]
    assert gc.isenabled()


def test_later_searches_leave_out_what_modules_have_made():
    before = gc.get_freeze_count()
    with importing():
        made = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= before + len(made)
