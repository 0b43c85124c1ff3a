"""A peer on a host that exchanges contents, gives a text and fetches one, as it is told on stdin.

    python texting.py NUMBER ADDRESS FOLDER

FOLDER holds what it has of the text. It prints its record first, then an answer to each line, all
after ">":

    {"exchange": RECORD, "count": N}   N exchanges of CONTENT with that peer: seconds of each
    {"fetch": [RECORD, ...]}           fetch the text from these peers from now on
    {"count": "fetched"}               bytes of text that have come
"""

import asyncio
import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from blake3 import blake3

from helpers.donors import identity
from helpers.packed_text import opened
from helpers.wire import Callee, calling, record
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.net.bandwidth import Bandwidth
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.stream import CalleeStream, CallerStream
from lowcomm_node.net.unsent import keep_little_unsent
from lowcomm_node.sync.link import Incoming, PairLink
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import PackedText

CONTENT = bytes(range(256)) * 8 * 1024
"""2 MiB: 0.8 s at 20 Mbit/s."""
PAUSE = 1.5
"""Seconds between two exchanges, in which text moves."""


async def swap(link: PairLink) -> None:
    """Both contents, and both confirmations."""
    into = memoryview(bytearray(len(CONTENT)))

    async def place(content: pb.Content) -> tuple[memoryview, int]:
        return into, 0

    async def whole(incoming: Incoming) -> None:
        await sent
        await link.send(pb.Frame(confirm=pb.Confirm()))

    sent = asyncio.create_task(link.send_content(memoryview(CONTENT), blake3(CONTENT).digest()))
    await link.read(place, whole, lambda frame: None)


class Peer:
    """One peer."""

    def __init__(self, number: int, channels: Channels, store: PackStore) -> None:
        self.bandwidth = Bandwidth()
        self.channels = channels
        self.callee = Callee(identity(number))
        self.callee.swapping = self._answer
        server = PieceServer(VerifiedFiles(), self.bandwidth.up)
        server.packs[bytes.fromhex(store.part.pieces)] = store
        self.callee.fetching = server.serve

    async def _answer(self, peer: str, stream: CalleeStream) -> None:
        await stream.receive()
        await swap(PairLink(peer, stream, self.bandwidth))
        await stream.close()

    async def exchange(self, peer: PeerInfo) -> float:
        """One exchange; its seconds."""
        stub, began = await self.channels.stub(peer), monotonic()
        call = stub.Swap(metadata=self.channels.metadata(peer.peer_id), timeout=60)
        stream = CallerStream(call)
        await stream.send(pb.Frame(hello=pb.Offer(protocol=1)))
        await swap(PairLink(peer.peer_id, stream, self.bandwidth))
        await stream.close()
        return monotonic() - began


def told(peer: dict[str, Any]) -> PeerInfo:
    """A peer as it printed its record."""
    address = f"{peer['host']}:{peer['port']}"
    key = bytes.fromhex(peer["certificate"])
    return record(identity(peer["number"]), peer["port"], key, addresses=(address,))


async def main(number: int, host: str, folder: Path) -> None:
    """Do what is told."""
    part = PackedText.model_validate_json((folder / "part.json").read_bytes())
    own, digests = folder / "text.pack", (folder / "list").read_bytes()
    peers = list[PeerInfo]()
    async with calling(identity(number)) as channels:

        def fetch(store: PackStore) -> Fetch:
            return Fetch(channels, store, lambda: peers, peer.bandwidth.down, gives_up=False)

        file = opened(folder, own if own.exists() else None, digests, part)
        store = PackStore(file, fetch)
        peer = Peer(number, channels, store)
        port = peer.callee.port = await peer.callee.server.start(host, 0)
        key = peer.callee.certificate.public_key.hex()
        unsent = asyncio.create_task(keep_little_unsent())
        print(">", json.dumps({"number": number, "host": host, "port": port, "certificate": key}))
        sys.stdout.flush()
        fetching = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            order, answer = json.loads(line), Any
            if "exchange" in order:
                answer = []
                for _ in range(order["count"]):
                    answer.append(await peer.exchange(told(order["exchange"])))
                    await asyncio.sleep(PAUSE)
            elif "fetch" in order:
                peers[:] = map(told, order["fetch"])
                fetching = asyncio.create_task(store.have(range(part.piece_count)))
                answer = None
            else:
                answer = store.bytes_fetched
            print(">", json.dumps(answer), flush=True)
        for task in filter(None, (fetching, unsent)):
            task.cancel()
        await peer.callee.server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
