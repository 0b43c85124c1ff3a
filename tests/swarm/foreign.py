"""A peer that shares no line of code with ours: written from docs/protocol.md and exchange.proto
alone.

    python foreign.py exchange.proto HOST:PORT PEER_ID run.json

It makes its own stubs, introduces itself (``Describe``), copies the callee's state (``Fetch``), and
exchanges the one fragment of the model in fp32 (``Swap``). It tells what came of that as JSON.
Nothing of lowcomm may be imported here."""

import hashlib
import json
import queue
import secrets
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from grpc_tools import protoc

PROTOCOL = 4
DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
PREFIX = bytes.fromhex("002408011220")
CHUNK = 256 * 1024
RETRY = 0.5
"""Seconds between two tries: nothing tells a caller when the callee takes exchanges again."""
LATER = ("busy", "crossed", "too-soon", "full", "not-training")
"""Refusals of the moment."""
PATIENCE = 90.0
LEAST_VALUES, MOST_VALUES = 3_072, 196_608
"""Of a piece of state."""


def base58(data: bytes) -> str:
    """The usual alphabet; leading zero bytes are ones."""
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = DIGITS[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def public_key(peer_id: str) -> Ed25519PublicKey:
    """The key inside a peer id."""
    number = 0
    for digit in peer_id:
        number = number * 58 + DIGITS.index(digit)
    data = number.to_bytes(len(PREFIX) + 32)
    assert data.startswith(PREFIX) and base58(data) == peer_id
    return Ed25519PublicKey.from_public_bytes(data[len(PREFIX) :])


def bound(purpose: str, payload: bytes) -> bytes:
    """What is signed."""
    return b"lowcomm/" + purpose.encode() + b"\0" + payload


class Client:
    """One key, one run, one callee."""

    def __init__(
        self, messages: Any, services: Any, address: str, callee: str, run: dict[str, Any]
    ) -> None:
        self.pb, self.address, self.callee = messages, address, callee
        self.key = Ed25519PrivateKey.generate()
        self.peer_id = base58(PREFIX + self.key.public_key().public_bytes_raw())
        # The run's specification names its own id, and its creator has signed it.
        text = run["spec"].encode()
        public_key(run["creator"]).verify(
            bytes.fromhex(run["signature"]), bound("run specification", text)
        )
        self.run_id, self.spec = hashlib.sha256(text).digest(), json.loads(text)
        assert self.spec["run"]["creator"] == run["creator"]
        # Nobody has told us the record yet: what answers here must turn out to be in the record of
        # whom we mean.
        host, _, port = address.rpartition(":")
        self.certificate = ssl.get_server_certificate((host, int(port)), timeout=30)
        credentials = grpc.ssl_channel_credentials(self.certificate.encode())
        channel = grpc.secure_channel(
            address, credentials, options=[("grpc.ssl_target_name_override", "lowcomm")]
        )
        self.stub = services.ExchangeStub(channel)

    def sign(self, purpose: str, payload: bytes) -> bytes:
        """A signature, 64 bytes."""
        return self.key.sign(bound(purpose, payload))

    def metadata(self) -> list[tuple[str, bytes]]:
        """A credential for one call."""
        payload = self.pb.Credential(
            caller=self.peer_id, callee=self.callee, run_id=self.run_id,
            issued_ms=int(time.time() * 1000),
            nonce=secrets.token_bytes(16),
        ).SerializeToString()  # fmt: skip
        signed = self.pb.SignedCredential(
            payload=payload, signature=self.sign("credential", payload)
        )
        return [("lowcomm-credential-bin", signed.SerializeToString())]

    def introduce(self) -> Any:
        """Hand over our record; that of the callee, checked."""
        now = int(time.time() * 1000)
        payload = self.pb.PeerRecord(
            protocol=PROTOCOL, run_id=self.run_id, peer_id=self.peer_id, issued_ms=now,
            expires_ms=now + 300_000,
            phase="training",
        ).SerializeToString()  # fmt: skip
        record = self.pb.SignedRecord(payload=payload, signature=self.sign("peer record", payload))
        answer = self.stub.Describe(
            self.pb.Introduction(record=record), metadata=self.metadata(), timeout=30
        ).record
        public_key(self.callee).verify(answer.signature, bound("peer record", answer.payload))
        theirs = self.pb.PeerRecord.FromString(answer.payload)
        assert (theirs.peer_id, theirs.run_id, theirs.protocol) == (
            self.callee,
            self.run_id,
            PROTOCOL,
        )
        key = x509.load_pem_x509_certificate(self.certificate.encode()).public_key()
        point = key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        assert b"\2" + theirs.certificate == point, "somebody else answers at this address"
        return theirs

    def state(self, numel: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """The manifest, fast weights, slow weights, of a model that is one fragment and is trained
        by AdamW."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(self.pb.FetchRequest(enter=self.pb.Enter(state=b"")))
        replies = self.stub.Fetch(iter(requests.get, None), metadata=self.metadata(), timeout=60)
        try:
            reply = next(replies)
            while reply.WhichOneof("kind") == "position":
                reply = next(replies)
            data = self._chunks(replies, reply.opened.size)
            assert hashlib.sha256(data).digest() == reply.opened.name
            manifest = self.pb.Manifest.FromString(data)
            step = min(MOST_VALUES, max(LEAST_VALUES, -(-numel // 256 // 256) * 256))
            fast, slow = np.empty(numel, "<f4"), np.empty(numel, "<f4")
            for piece, start in enumerate(range(0, numel, step)):
                count = min(step, numel - start)
                requests.put(self.pb.FetchRequest(wanted=self.pb.Wanted(piece=piece)))
                data = self._chunks(replies, 4 * 5 * count)
                assert hashlib.sha256(data).digest() == manifest.digests[piece]
                fast[start : start + count], slow[start : start + count] = np.frombuffer(
                    data, "<f4"
                ).reshape(5, -1)[:2]
            assert piece + 1 == len(manifest.digests)
            assert hashlib.sha256(slow.tobytes()).digest() == manifest.slow_digests[0]
            return manifest, fast, slow
        finally:
            requests.put(None)

    def _chunks(self, replies: Iterator[Any], size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = next(replies).chunk
            assert chunk.offset == len(data) and chunk.data
            data += chunk.data
        assert len(data) == size
        return bytes(data)

    def swap(self, offer: Any, contribution: bytes) -> tuple[str, bytes]:
        """One exchange: empty and what the callee contributed, or the reason of its refusal."""
        frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        frame, outgoing = self.pb.Frame, iter(frames.get, None)
        frames.put(frame(hello=offer))
        incoming = self.stub.Swap(outgoing, metadata=self.metadata(), timeout=PATIENCE)
        try:
            answer = next(incoming)
            if answer.WhichOneof("kind") == "refuse":
                return answer.refuse.reason, b""
            theirs = answer.accept
            assert (theirs.run_id, theirs.plan, theirs.codec) == (
                offer.run_id,
                offer.plan,
                offer.codec,
            )
            digest = blake3(contribution).digest()
            frames.put(frame(content=self.pb.Content(size=len(contribution), digest=digest)))
            for offset in range(0, len(contribution), CHUNK):
                data = contribution[offset : offset + CHUNK]
                frames.put(frame(chunk=self.pb.Chunk(offset=offset, data=data)))
            received = self._receive(incoming, len(contribution))
            members = hashlib.sha256(
                "\n".join(sorted([self.peer_id, self.callee])).encode()
            ).digest()
            frames.put(frame(confirm=self.pb.Confirm(members=members)))
            assert next(incoming).confirm.members == members, "it holds something else"
            frames.put(None)
            assert next(incoming, None) is None, "it has nothing more to say"
            return "", received
        finally:
            frames.put(None)

    def _receive(self, incoming: Iterator[Any], size: int) -> bytes:
        content = next(incoming).content
        assert content.size == size
        data = bytearray()
        while len(data) < size:
            chunk = next(incoming).chunk
            assert chunk.offset == len(data) and chunk.data
            data += chunk.data
        assert blake3(data).digest() == content.digest
        return bytes(data)


def tensors_of(model: dict[str, Any]) -> list[tuple[str, int, int]]:
    """The tensors of the model in their order: name, rows, values a row."""
    width, hidden, head = model["width"], model["feed_forward"], model["width"] // model["heads"]
    block = {
        "attention_norm": (width, 1), "attention.query": (width, width),
        "attention.key": (width, width),
        "attention.value": (width, width), "attention.output": (width, width),
        "attention.query_norm": (head, 1),
        "attention.key_norm": (head, 1), "feed_forward_norm": (width, 1),
        "feed_forward.gate": (hidden, width),
        "feed_forward.up": (hidden, width), "feed_forward.down": (width, hidden),
    }  # fmt: skip
    blocks = [
        (f"blocks.{n}.{name}.weight", *shape)
        for n in range(model["layers"])
        for name, shape in block.items()
    ]
    ends = [("norm.weight", width, 1), ("head.weight", model["vocab"], width)]
    return [("embedding.weight", model["vocab"], width), *blocks, *ends]


def take_part(client: Client) -> dict[str, Any]:
    """Introduce ourselves, copy the state, exchange."""
    theirs = client.introduce()
    spec, sync = client.spec, client.spec["sync"]
    assert (sync["fragments"], sync["group"], sync["codec"], spec["model"]["tied"]) == (
        1,
        2,
        "fp32",
        False,
    )
    assert spec["train"]["optimizer"] == "adamw"
    slices = [[name, 0, rows, rows * width] for name, rows, width in tensors_of(spec["model"])]
    plan = json.dumps(["lowcomm fragment plan 1", sync["pattern"], [slices]], separators=(",", ":"))
    state, fast, slow = client.state(sum(numel for *_, numel in slices))
    gain = sync["outer_lr"] if sync["outer"] == "noloco" else 1.0
    contribution = (gain * (fast - slow) + sync["consensus"] * slow).astype("<f4").tobytes()
    offer = client.pb.Offer(
        protocol=PROTOCOL, run_id=client.run_id, plan=hashlib.sha256(plan.encode()).digest(),
        codec="fp32", fragment=0,
        round=state.swarm_step // sync["interval"], swarm_step=state.swarm_step,
        steps=sync["interval"],
        tokens=sync["interval"] * spec["train"]["batch"] * spec["model"]["context"],
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    refused: list[str] = []
    while time.monotonic() < deadline:
        reason, received = client.swap(offer, contribution)
        if not reason:
            ours, others = (np.frombuffer(data, "<f4") for data in (contribution, received))
            distance = float(np.linalg.norm(ours - others) / np.linalg.norm(ours))
            return {
                "peer_id": client.peer_id,
                "phase": theirs.phase,
                "refused": refused,
                "distance": distance,
            }
        refused.append(reason)
        assert reason in LATER, reason
        time.sleep(RETRY)
    raise AssertionError(f"refused again and again: {refused}")


def main() -> None:
    """Make stubs, take part, tell."""
    proto, address, callee, run = Path(sys.argv[1]), *sys.argv[2:4], Path(sys.argv[4])
    with tempfile.TemporaryDirectory() as folder:
        made = [
            "protoc",
            f"-I{proto.parent}",
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            proto.name,
        ]
        assert protoc.main(made) == 0
        sys.path.insert(0, folder)
        messages, services = __import__("exchange_pb2"), __import__("exchange_pb2_grpc")
        told = take_part(Client(messages, services, address, callee, json.loads(run.read_text())))
    ours = [name for name in sys.modules if name.startswith("lowcomm")]
    print(json.dumps(told | {"imported": ours}))


if __name__ == "__main__":
    main()
