"""What a creator must be told of how many peers a run is for."""

import pytest

from lowcomm_node.cli.creator import check_size
from lowcomm_node.errors import ConfigError
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.run import RunSpec, parse_toml


def run_of(method: str, start_peers: int, sync: str = "") -> RunSpec:
    return parse_toml(
        f'[run]\nname = "a"\nstart_peers = {start_peers}\n[sync]\nmethod = "{method}"\n{sync}'
    )


def test_a_run_that_begins_with_more_peers_than_its_groups_hold_together_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"start_peers = 33, but group = 32 and consensus = 0.*start_peers = 32 or less",
    ):
        check_size(run_of("streaming-diloco", 33))
    assert check_size(run_of("streaming-diloco", 33, "cells = 2")) is None
    assert check_size(run_of("streaming-diloco", 33, 'codec = "bf16"\nconsensus = 1.0')) is None


def test_a_run_that_may_outgrow_its_groups_is_created_with_a_warning() -> None:
    warning = check_size(run_of("streaming-diloco", 32))
    assert warning is not None and "for at most 32 peers" in warning
    assert "set cells = 8 for 128 peers, codec" in warning
    narrow = check_size(run_of("streaming-diloco", 8, "group = 8"))
    assert narrow is not None and "cells = 8 for 32 peers, group up to 32, codec" in narrow


@pytest.mark.parametrize(
    ("peers", "cells"), [(8, 1), (32, 1), (33, 2), (64, 4), (128, 8), (9000, 512)]
)
def test_cells_are_so_many_that_chance_fills_none_beyond_the_group(peers: int, cells: int) -> None:
    sync = run_of("streaming-diloco", 32).sync
    assert sync.cells_for(peers) == cells
    assert not sync.model_copy(update={"cells": cells}).realigns_among(peers)


@pytest.mark.parametrize(
    ("method", "sync", "why"),
    [
        ("lowcomm", "cells = 2", "needs groups of three or more"),
        ("streaming-diloco", 'cells = 2\ncodec = "bf16"\nconsensus = 1.0', "consensus = 0"),
        ("streaming-diloco", "cells = 3", "not a power of two: set 2 or 4"),
    ],
)
def test_cells_that_mean_nothing_are_refused(method: str, sync: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        run_of(method, 8, sync)
