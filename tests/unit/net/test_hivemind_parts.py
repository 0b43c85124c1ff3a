"""Our parts of hivemind come without the rest of it, in a process of their own: this one may have
imported everything."""

import subprocess
import sys

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
