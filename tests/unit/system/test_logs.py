"""What must hold for logs: an error tells where it happened, and no secret that was near."""

import subprocess
import sys

import pytest

PROGRAM = """
from lowcomm_node.system.logs import configure_logs, log

def fail(headers):
    raise RuntimeError("a defect")

{configure}
try:
    fail([("authorization", "Bearer " + "secret" * 2)])
except RuntimeError as error:
    log.error("task.defect", exc_info=error)
"""


@pytest.mark.parametrize(
    "configure", ["", *(f"configure_logs(as_json={as_json})" for as_json in (True, False))]
)
def test_an_error_prints_no_local_variables(configure: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(configure=configure)],
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout + done.stderr
    assert "RuntimeError: a defect" in told and "in fail" in told
    assert "secretsecret" not in told
