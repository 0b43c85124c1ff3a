"""What must hold for the arithmetic of exchanges: weights are the same to the bit on every
processor, with any number of threads, and in every release."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "helpers" / "merged_bits.py"
RECORDED = {
    "lowcomm": "8069f7dcfd74c0c6",
    "lowcomm, bf16": "ab36a1704a049149",
    "noloco": "39bf82f961829f7d",
    "gossip": "e0aa7e85efd88d2d",
    "diloco in pairs": "37a441fd27ad41a1",
    "diloco": "37f927d8c5ae3af3",
    "streaming-diloco": "775d80c540425b68",
    "streaming-diloco, bf16": "2145decc261829dd",
    "realigned": "b4f4e00c202598a4",
    "odd numbers": "8f452e50a2367e66",
    "remembering": "f4944d231a93f681",
    "lowcomm, as shipped": "3df3082453777645",
    "streaming-diloco, as shipped": "9097af9442e1dd1a",
    "diloco-paper, as shipped": "53c5f7282ef93876",
    "streaming-diloco-paper, as shipped": "23f4de6e7caf7b1a",
    "noloco-paper, as shipped": "daa0ea8eb7d7be91",
    "lowcomm, mod3": "0102731d6e38936a",
    "lowcomm, mod6": "534373e88a5815d1",
    "lowcomm, mod8": "e1017e9bd9eca3e3",
    "streaming-diloco, q2": "0976fbc98296e1fe",
    "streaming-diloco, int8": "5672135c2352ab73",
}
"""Up to ``odd numbers`` of version 0.1, without the instructions that round a product and a sum at
once; a momentum of 0 was kept then, and does not count. The others are of the release that brought
them."""

KNOWN = ["default", "avx2", "avx512"]
OURS = torch.backends.cpu.get_cpu_capability().lower()
HERE = KNOWN[: KNOWN.index(OURS) + 1 if OURS in KNOWN else 1]
"""What this processor can do: more would be an illegal instruction."""
PLAIN = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
"""Codecs compiled for any processor of the architecture."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability",
    [HERE[0], *(pytest.param(one, marks=pytest.mark.soak) for one in HERE[1:-1]), *HERE[1:][-1:]],
)
def test_weights_are_those_that_were_recorded_with_one_thread_and_with_two(capability: str):
    assert merged("1,2", {"ATEN_CPU_CAPABILITY": capability}) == [RECORDED, RECORDED]


SHIPPED = {name: one for name, one in RECORDED.items() if "as shipped" in name}
IN_CI = ("lowcomm, as shipped",)
"""Each compiles for long."""


@pytest.mark.slow
@pytest.mark.parametrize("names", [IN_CI, pytest.param(tuple(SHIPPED), marks=pytest.mark.soak)])
def test_weights_are_the_same_where_codecs_are_compiled_for_any_processor(names: tuple[str, ...]):
    shipped = {name: SHIPPED[name] for name in names}
    assert merged("1", PLAIN | {"ATEN_CPU_CAPABILITY": "default"}, *shipped) == [shipped]


def merged(threads: str, processor: dict[str, str], *cases: str) -> list[dict[str, str]]:
    """What the script prints on such a processor, of some cases or of all."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), threads, *cases],
        env=os.environ | processor,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
