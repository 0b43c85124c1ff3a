"""A process that fetches all of a packed text into a folder, to be killed meanwhile.

    python fetching.py FOLDER PART PORT CERTIFICATE

PART is the text as JSON; a peer at PORT of loopback gives it, under a key of its certificate.
"""

import asyncio
import sys
from pathlib import Path

from helpers.donors import identity
from helpers.packed_text import store_of
from helpers.wire import calling, record
from lowcomm_protocol.spec.sections import PackedText


async def main(folder: str, text: str, port: str, certificate: str) -> None:
    """Fetch it."""
    part = PackedText.model_validate_json(text)
    giver = record(identity(1), int(port), bytes.fromhex(certificate))
    async with calling(identity(9)) as channels:
        store = store_of(Path(folder), channels, [giver], part=part)
        print("begun", flush=True)
        await store.have(range(part.piece_count))
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
