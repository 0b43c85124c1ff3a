"""A process that is killed at random instants of fetching text fetches next to nothing twice."""

import asyncio
import os
import sys
from pathlib import Path
from random import Random

import pytest

from helpers.donors import identity
from helpers.packed_text import never, opened, part_of
from helpers.wire import listening
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.net.bandwidth import BandwidthLimit

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
SOAK = pytest.mark.soak

MIB = 1024 * 1024
SIZE, RATE = 128 * MIB, 32.0 * MIB
"""Bytes of the text, and bytes a second of its giver."""


class CountingServer(PieceServer):
    """Counts the bytes that it sends."""

    sent = 0

    async def _send_chunk(self, stream, offset: int, data: bytes) -> None:
        await super()._send_chunk(stream, offset, data)
        self.sent += len(data)


@pytest.mark.parametrize(
    ("piece_bytes", "most"),
    [(64 * 1024, 3), *(pytest.param(size, 10, marks=SOAK) for size in (64 * 1024, 8 * MIB))],
)
async def test_kills_cost_a_twentieth_of_the_bytes_at_most(
    piece_bytes: int, most: int, tmp_path: Path
) -> None:
    random = Random(f"fetching:{piece_bytes}")
    data = random.randbytes(SIZE)
    part, digests = part_of(data, piece_bytes)
    own, folder = tmp_path / "text.pack", tmp_path / "fetched"
    own.write_bytes(data)

    async with listening(identity(1)) as callee:
        server = CountingServer(VerifiedFiles(), BandwidthLimit(RATE))
        store = PackStore(opened(tmp_path / "giver", own, digests, part), never)
        server.packs[bytes.fromhex(part.pieces)] = store
        callee.fetching = server.serve
        arguments = [
            str(folder), part.model_dump_json(), str(callee.port),
            callee.certificate.public_key.hex(),
        ]  # fmt: skip
        kills, code = 0, None
        while code != 0:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(__file__).with_name("fetching.py")),
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            )
            try:
                assert child.stdout and await child.stdout.readline() == b"begun\n"
                async with asyncio.timeout(
                    random.uniform(0, SIZE / RATE / most) if kills < most else 60
                ):
                    code = await child.wait()
            except TimeoutError:
                kills += 1
            finally:
                if child.returncode is None:
                    child.kill()
                await child.wait()
        assert kills == most and (folder / "data").read_bytes() == data
        assert len(data) <= server.sent <= 1.05 * len(data), f"{server.sent / len(data):.3f}"
        await store.close()
