"""What must hold for a node before it takes part in a run."""

from pathlib import Path
from typing import Any

import pytest

from lowcomm_node.errors import ConfigError
from lowcomm_node.node import node
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import parse_toml, sign_run


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('source = "local"', "on text of your own: name it with --data PATH"),
        ('tokenizer = "local"', "its tokenizer file: name it with --tokenizer PATH"),
    ],
)
async def test_what_a_run_needs_of_its_owner_is_told_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, told: str
) -> None:
    run = sign_run(parse_toml(f'[run]\nname = "a"\n[data]\n{data}\n'), Identity(b"c" * 32))

    class Entered:
        """A place in a swarm that has this run."""

        discovery = rejoin = None

        def __init__(self, *_: Any) -> None: ...

        async def open(self) -> None: ...

        async def find_run(self) -> Any:
            return run

        async def be_admitted(self, _: Any) -> Any:
            pytest.fail("it takes part")

        async def close(self) -> None: ...

    monkeypatch.setattr(node, "Entry", Entered)
    with pytest.raises(ConfigError, match=told):
        await node.Node(NodeSettings(home=tmp_path / "home")).run()
