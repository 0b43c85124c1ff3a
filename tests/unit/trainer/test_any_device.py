"""What must hold on a device that can compute, and nothing more: it trains as a processor does,
and exchanges give the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from helpers import boxed_device, merged_bits

TESTS = Path(__file__).parents[2]
CAN_REGISTER = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REGISTER, reason="this torch takes no device in Python")
@pytest.mark.parametrize(
    ("missing", "works"),
    [
        pytest.param((), ["steps_fused"], marks=pytest.mark.soak, id="fused"),
        pytest.param(("_fused_adamw_",), [], id="plain"),
    ],
)
def test_a_device_without_streams_bf16_or_compiler_trains_and_merges(
    missing: tuple[str, ...], works: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, boxed_device.__file__, *missing],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "box:0" and found["works"] == works
    expected = boxed_device.trained(tmp_path, "cpu")
    assert found["resumed"] == expected["resumed"] == 6
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["scores"] == pytest.approx(expected["scores"], rel=1e-5)
    digests = [merged_bits.digest(name) for name in boxed_device.EXCHANGES]
    assert found["exchanges"] == digests
