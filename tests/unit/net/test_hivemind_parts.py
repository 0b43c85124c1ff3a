"""Our parts of hivemind come without the rest of it, in a process of their own: this one may have
imported everything."""

import asyncio
import gc
import subprocess
import sys
from typing import Any

import pytest

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)

sys.meta_path.insert(0, Refuse())
"""


def run_python(code: str, *refused: str) -> str:
    """What code prints where these packages are not installed."""
    command = [sys.executable, "-c", REFUSE.format(refused=refused) + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_dht_needs_neither_torch_nor_what_else_hivemind_imports() -> None:
    code = """
from lowcomm_node.net import hivemind_parts; from lowcomm_node.dht import guard
import hivemind.dht.node, hivemind.p2p
assert hivemind.dht.node.DHTNode is hivemind_parts.DHTNode
assert hivemind.p2p.P2P is hivemind_parts.P2P
assert hivemind.dht.routing.DHTID is guard.DHTID
assert not hasattr(hivemind, "averaging")
print(hivemind_parts.MSGPackSerializer.loads(hivemind_parts.MSGPackSerializer.dumps([1, "a"])))
"""
    assert run_python(code, "torch", "scipy", "numba", "grpc", "safetensors") == "[1, 'a']"


def test_a_bootstrap_server_needs_no_torch() -> None:
    code = "import lowcomm_bootstrap.cli, lowcomm_bootstrap.serving; print('ok')"
    assert run_python(code, "torch", "scipy", "numba", "grpc", "safetensors") == "ok"


@pytest.mark.slow
def test_the_whole_of_hivemind_is_used_where_it_was_imported_before() -> None:
    code = """
import hivemind
from lowcomm_node.net import hivemind_parts
print(hivemind.averaging is not None and hivemind.dht.DHTNode is hivemind_parts.DHTNode)
"""
    assert run_python(code) == "True"


@pytest.mark.slow
async def test_a_search_that_is_cancelled_says_nothing_of_what_it_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from hivemind.dht.traverse import traverse_dht

    from lowcomm_node.net.hivemind_parts import DHTID

    asked = asyncio.Event()

    async def never(peer: Any, queries: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    target, peer = DHTID.generate(), DHTID.generate()
    search = asyncio.create_task(traverse_dht([target], [peer], 5, 1, 1, never))
    await asked.wait()
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)
    del search
    gc.collect()
    assert not caplog.records

    async def ours() -> None:
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(ours())
    await asyncio.sleep(0)
    del task
    gc.collect()
    assert "Task was destroyed" in caplog.text, "what we leave ourselves is told"
