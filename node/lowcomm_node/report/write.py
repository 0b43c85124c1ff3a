"""Writes a report."""

import time
from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.report.page import render
from lowcomm_node.report.story import stories
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.release import describe
from lowcomm_protocol import PROTOCOL_VERSION


def write_report(home: Path, file: Path, fingerprint: str | None = None) -> int:
    """Write the report of a home, or of a folder of homes; the number of homes in it.

    Raises ConfigError if there is nothing to tell, or the file can't be written; NodeError if a
    journal can't be read.
    """
    told = stories(home, fingerprint)
    page = render(told, f"lowcomm-node {describe(PROTOCOL_VERSION)}", time.time())
    try:
        write_atomic(file, page.encode())
    except OSError as error:
        raise ConfigError(
            f"{file} can't be written ({error.strerror}): name another file with --output."
        ) from None
    return len(told)
