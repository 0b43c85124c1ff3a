"""What a creator must be told of how many peers a run is for."""

import pytest

from lowcomm_node.cli.creator import check_size
from lowcomm_node.errors import ConfigError
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
    assert check_size(run_of("streaming-diloco", 33, "slice_rounds = 32")) is None
    assert check_size(run_of("streaming-diloco", 33, 'codec = "bf16"\nconsensus = 1.0')) is None


def test_a_run_that_may_outgrow_its_groups_is_created_with_a_warning() -> None:
    warning = check_size(run_of("streaming-diloco", 32))
    assert warning is not None and "for at most 32 peers" in warning
    assert "set slice_rounds = 32, codec" in warning
    narrow = check_size(run_of("streaming-diloco", 8, "group = 8"))
    assert narrow is not None and "slice_rounds = 32, group up to 32, codec" in narrow
