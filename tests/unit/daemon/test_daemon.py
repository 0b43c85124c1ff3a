"""What must hold for a daemon's identity: only one that it has drawn itself counts as fresh."""

from pathlib import Path
from typing import Any

import pytest

from lowcomm_node.daemon import daemon
from lowcomm_node.errors import NoPeers
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import load_or_create_identity


@pytest.mark.parametrize(
    ("stored", "ephemeral", "fresh"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
async def test_an_identity_is_fresh_if_it_was_drawn_at_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool, ephemeral: bool, fresh: bool
) -> None:
    told: list[Any] = []

    def enter(*arguments: Any) -> None:
        told.append(arguments[-1])
        raise NoPeers("as far as this test goes")

    monkeypatch.setattr(daemon, "Entry", enter)
    settings = NodeSettings(home=tmp_path / "home", ephemeral=ephemeral)
    if stored:
        settings.home.mkdir()
        load_or_create_identity(settings.paths.identity)
    with pytest.raises(NoPeers):
        await daemon.Daemon(settings).run()
    assert told == [fresh]
