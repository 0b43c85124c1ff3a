"""Which kernels compute with a vector."""

import subprocess
import sys

import torch

from lowcomm_node.trainer.device.kernels import blocks_of, outer_of
from lowcomm_protocol.codecs import codec
from lowcomm_protocol.exchange import outer


def test_vectors_in_host_memory_go_to_the_loops_of_the_protocol() -> None:
    assert outer_of(torch.zeros(1)) is outer
    vector = torch.linspace(-1.0, 1.0, 300)
    coded, expected = torch.zeros(codec("int8").coded_size(300), dtype=torch.uint8), bytearray(308)
    blocks_of(vector).encode("int8", vector, coded)
    codec("int8").encode(vector.numpy(), memoryview(expected))
    assert coded.numpy().tobytes() == bytes(expected)
    decoded = torch.zeros(300)
    blocks_of(vector).decode("int8", coded, decoded)
    assert (decoded - vector).abs().max() < 1 / 254 + 1e-6


def test_without_a_gpu_nothing_imports_triton() -> None:
    code = (
        "import sys, torch\n"
        "from lowcomm_node.trainer import loop\n"
        "from lowcomm_node.trainer.device.kernels import outer_of, blocks_of\n"
        "outer_of(torch.zeros(1)), blocks_of(torch.zeros(1))\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
