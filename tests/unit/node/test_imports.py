"""The daemon handles bytes: it starts without what computes with tensors, which takes seconds and
memory."""

import subprocess
import sys

COMPUTES = {"torch", "numba", "llvmlite", "scipy", "numpy", "safetensors"}
OF_OTHER_PROCESSES = {"httpx", "typer"}
"""What only commands need."""


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after this code."""
    code = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_of_the_node_imports_nothing() -> None:
    assert modules_after("import lowcomm_node") == {"lowcomm_node"}


def test_a_daemon_in_the_dht_that_has_checked_a_run_imports_nothing_that_computes() -> None:
    loaded = modules_after(
        "import lowcomm_node.node.node, lowcomm_node.dht.guard\n"
        "from lowcomm_protocol.spec.run import parse_toml\n"
        "parse_toml('[run]\\nname = \"a\"\\nsteps = 400\\n')\n"
        "from lowcomm_node.sync.exchanger import DRIVERS\n"
        "DRIVERS['pair']\n"
    )
    assert "hivemind.dht.node" in loaded and "lowcomm_node.sync.pair_driver" in loaded
    assert not loaded & (COMPUTES | OF_OTHER_PROCESSES)
    assert not any(
        name.startswith(("lowcomm_protocol.codecs", "lowcomm_node.models")) for name in loaded
    )
