"""Files and requests: what a donor hands over, what the home keeps, what the loopback API is asked,
what owners write."""

import asyncio
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from machines import drive
from target import Made, cut, fit, join, target

from helpers.packed_text import ALL, DATA, DIGESTS, PART, PIECE, never
from helpers.packed_text import opened as opened_pack
from lowcomm_node.data.pack import (
    PackDescription,
    PackTokenizer,
    read_description,
    write_description,
)
from lowcomm_node.errors import CheckpointError, ConfigError, DataError
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.owner.sources import change_settings, load_settings
from lowcomm_node.status.events import Board
from lowcomm_node.storage.checkpoint import MANIFEST, write_checkpoint
from lowcomm_node.storage.checkpoint import read_manifest as read_checkpoint
from lowcomm_node.storage.files import _seal
from lowcomm_node.storage.pack_file import PackFile
from lowcomm_node.swarm import remembered_peers as known
from lowcomm_node.system.units import read_rate, read_size, write_rate, write_size
from lowcomm_node.web import server
from lowcomm_node.web.api import QUERIES
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.sections import PackedText
from lowcomm_protocol.state import StateForm, read_manifest, read_piece, write_manifest

TENSORS = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b.c": torch.ones(2)}
META = {
    "run_id": "ab" * 32, "plan": "cd" * 32, "swarm_step": 40, "steps": 20, "tokens": 100,
    "progress": [{"version": 1, "merged_steps": 20, "merged_tokens": 90, "synced": 2}],
}  # fmt: skip


def folder() -> Path:
    """A folder where whoever fuzzes has set ``tempfile.tempdir``, and cleans up."""
    return Path(tempfile.mkdtemp(prefix="lowcomm-fuzz-"))


FORM = StateForm.of("ab" * 32, "cd" * 32, 1000, [[(300, True), (100, False)], [(256, True)]], True)


@target
def snapshot_manifest() -> Made:
    """What a donor says of its state: a late peer believes it, or refuses it."""
    digests, slow = tuple(bytes([n]) * 32 for n in range(len(FORM.pieces))), (b"s" * 32,) * 2
    lists = {"versions": (1, 2), "slow_digests": slow, "digests": digests}
    run_of = {"run_id": bytes.fromhex(FORM.run_id), "plan": bytes.fromhex(FORM.plan)}
    good = pb.Manifest(**run_of, **lists, swarm_step=40, moments=20)
    whole = write_manifest(good)

    def run(data: bytes) -> None:
        try:
            found = read_manifest(data, FORM)
        except ProtocolViolation as error:
            assert len(str(error)) < 2000
            return
        assert found.swarm_step <= FORM.steps and len(found.digests) == len(FORM.pieces)

    good.swarm_step, good.moments, good.versions[0] = 1001, 1 << 30, 1 << 60
    far = write_manifest(good)
    return run, [whole, whole[:-7], far, whole + whole]


@target
def pack_description() -> Made:
    """What lies beside a pack: it is believed as a whole, or refused."""
    text = PackedText(
        name="a", pieces="ab" * 32, tokens=9000, held_out_tokens=40, piece_bytes=1 << 14
    )
    described = PackDescription(text=text, tokenizer=PackTokenizer(end_token=0), words="ö")
    whole = write_description(described, Identity(bytes(32)))

    def run(data: bytes) -> None:
        try:
            found, maker = read_description(data)
        except DataError as error:
            assert len(str(error)) < 2000
            return
        assert read_description(write_description(found, Identity(bytes(32))))[0] == found
        assert maker and found.text.piece_count >= 2

    return run, [whole, whole[:-9], whole.replace(b"9000", b"-1"), whole.replace(b"local", b"x")]


@target
def piece() -> Made:
    """A piece of a donor's state."""
    kinds = FORM.pieces

    def run(data: bytes) -> None:
        one = kinds[data[0] % len(kinds)] if data else kinds[0]
        body = data[1:] if data[:1] > b"\xf0" else fit(data[1:], one.size)
        try:
            values = read_piece(one, body)
        except ProtocolViolation as error:
            assert len(str(error)) < 2000
            return
        assert all(bool(np.isfinite(vector).all()) for vector in values)
        assert not values.second.size or values.second.min() >= 0

    numbers = np.linspace(0.0, 1.0, max(one.size for one in kinds) // 4, dtype="<f4").tobytes()
    return run, [bytes([n]) + numbers for n in range(len(kinds))] + [
        b"\xff" + numbers[:40],
        b"\0" + b"\xff" * 64,
    ]


@target
def pack_offer() -> Made:
    """A peer's bitmap and list of a packed text: pieces of ours and of theirs, or a refusal."""
    home, peer = folder(), SimpleNamespace(peer_id="peer")
    name, spare = bytes.fromhex(PART.pieces), -PART.piece_count % 8
    loop = asyncio.new_event_loop()

    def run(data: bytes) -> None:
        offered, listing = (*cut(data), b"", b"")[:2]
        try:
            opened = pb.Opened.FromString(offered)
        except DecodeError:
            return
        file = PackFile(PART, home)
        download = PackStore(file, never)
        download.missing.update(dict.fromkeys(ALL, 1))
        try:
            size = download.listing_bytes(opened, download.enter)
            assert size == len(DIGESTS)
            source = loop.run_until_complete(download.open(peer, opened, fit(listing, size)))
        except ProtocolViolation as error:
            assert len(str(error)) < 2000 and not file.digests
            return
        assert file.digests == DIGESTS
        taken = list(iter(lambda: download.take(source), None))
        assert set(taken) <= set(ALL) and len(set(taken)) == len(taken)
        bits = int.from_bytes(opened.here) >> spare
        assert bits.bit_count() == len(taken)

    good = pb.Opened(name=name, size=PART.size, here=b"\xa5\x5a\xf0")
    long = pb.Opened(name=name, size=1 << 62, here=b"\xff" * 300)
    offers = [good, long, pb.Opened(name=b"x" * 32), pb.Opened(name=name, size=PART.size)]
    return run, [join(offer.SerializeToString(), DIGESTS) for offer in offers]


@target
def verified_pieces() -> Made:
    """What the home says of the pieces that are here: only what is sealed for this very file."""
    home = folder()
    file = opened_pack(home, digests=DIGESTS)
    file.write(3, DATA[3 * PIECE : 4 * PIECE])
    file.close()
    here = home / "here"

    def run(data: bytes) -> None:
        here.write_bytes(data)
        again = opened_pack(home)
        assert [piece for piece in ALL if again.has(piece)] in ([], [3])
        again.close()

    sealed = here.read_bytes()
    return run, [sealed, sealed[:-1] + b"\xff", sealed[32:], bytes(35), b""]


@target
def manifest() -> Made:
    """The manifest of a checkpoint of ours, whose digest is right or not."""
    home = folder()

    def run(data: bytes) -> None:
        path = home / MANIFEST
        path.write_bytes(data[1:])
        if data[:1] > b"\x40":
            try:
                path.write_bytes(_seal(json.loads(data[1:])))
            except (ValueError, TypeError, RecursionError):
                return
        try:
            info = read_checkpoint(home, 40)
        except CheckpointError as error:
            assert len(str(error)) < 2000
        else:
            assert all("/" not in file.name for file in info.parts)

    write_checkpoint(
        home, 40, dict.fromkeys(("weights", "outer", "inner"), TENSORS), META, 1_800_000_000.0
    )
    sealed = (home / MANIFEST).read_bytes()
    return run, [b"\0" + sealed, b"\xff" + json.dumps(json.loads(sealed)["content"]).encode()]


@target
def control_body() -> Made:
    """What the loopback API is asked, with the right token: its answer is an answer or an error in
    words."""
    settings = NodeSettings(home=folder())

    class Node:
        async def change_limits(self, changes: dict[str, Any]) -> dict[str, Any]:
            changed = change_settings(
                settings,
                {name: changes[name] for name in changes if name in ("max_up", "max_peers")},
            )
            return {"max_up": changed.max_up, "max_peers": changed.max_peers}

        async def generate(self, prompt: str, chat: list[str], before: bool, **draw: float) -> str:
            assert all(type(text) is str for text in (prompt, *chat)) and type(before) is bool
            kinds = {name: type(value) for name, value in draw.items()}
            assert kinds == {"tokens": int, "temperature": float, "seed": int}
            return prompt

        async def doctor(self, peers: list[str]) -> list[dict[str, Any]]:
            assert all(type(peer) is str for peer in peers)
            return []

        async def ping(self, peer: str) -> dict[str, Any]:
            assert type(peer) is str
            return {}

        def request_stop(self, now: bool) -> None:
            assert type(now) is bool

        def pause(self, seconds: float | None) -> None:
            assert seconds is None or 0 < seconds < float("inf")

        def request_finish(self) -> None: ...

        def story(self, last: int) -> dict[str, Any]:
            assert type(last) is int
            return {}

        async def samples(self, since: int, most: int) -> list[dict[str, Any]]:
            assert type(since) is type(most) is int
            return []

        async def exchanges(self, limit: int, since: int) -> list[dict[str, Any]]:
            assert type(limit) is type(since) is int
            return []

        def schedule(self, hours: str) -> dict[str, Any]:
            assert type(hours) is str
            return {}

        def __getattr__(self, name: str) -> Any:
            return lambda **given: {}

    api = server.ControlServer(Node(), Board(), settings.paths)  # type: ignore[arg-type]
    handlers = [api._answer(one) for one in QUERIES]
    headers = {"authorization": f"Bearer {api._access.token}"}

    def run(data: bytes) -> None:
        which, *parts = [*cut(data), b"", b""]

        async def stream() -> Any:
            for part in parts:
                yield part

        told = parts[0].decode("utf-8", "replace")
        query = {name: told for one in QUERIES for name in one.parameters}
        request = SimpleNamespace(headers=headers, method="POST", stream=stream, query_params=query)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await api._guarded(handlers[len(which) % len(handlers)])(request))

        drive(ask())
        assert answers[0].status_code in (200, 400, 401)
        json.loads(answers[0].body)

    bodies = [
        {"max_up": "20Mbit", "max_peers": 8},
        {"now": True},
        {"prompt": "a", "tokens": 5, "temperature": 0.5, "seed": 1},
        {"peers": ["a", "b"]},
        {"peer": "a"},
        {"name": "a", "nonce": "b"},
        {},
    ]
    return run, [
        join(b"x" * number, json.dumps(body).encode()) for number, body in enumerate(bodies)
    ]


@target
def units() -> Made:
    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            rate = read_rate(text)
            assert rate is None or (rate >= 8000 and read_rate(write_rate(rate)) is not None)
        except ValueError as error:
            assert str(error)
        try:
            size = read_size(text)
            assert size >= 0 and (size == 0 or read_size(write_size(size)) == size)
        except ValueError as error:
            assert str(error)

    return run, [b"20Mbit", b"2.5MB/s", b"none", b"4GiB", b"1048576", b"1.5 Gbit"]


@target
def settings() -> Made:
    """A home's config.toml and the environment."""
    home = folder()

    def run(data: bytes) -> None:
        text, *pairs = [*cut(data), b""]
        (home / "config.toml").write_bytes(text)
        names = [
            "PEERS",
            "MAX_UP",
            "PORT",
            "INVITE",
            "DEVICE",
            "RUN",
            "ANNOUNCE",
            "EXCHANGE_DEADLINE",
        ]
        values = (pair.decode("utf-8", "replace").replace("\0", "") for pair in pairs)
        env = {f"LOWCOMM_{name}": value for name, value in zip(names, values, strict=False)}
        try:
            load_settings({"home": home}, env)
        except ConfigError as error:
            assert str(error) and len(str(error)) < 4000

    return run, [
        join(b'max_up = "20Mbit"\nport = 31330\n', b"", b"5Mbit", b"0"),
        join(b'peers = ["/ip4/192.0.2.1/tcp/1/p2p/12D3KooW"]\nrun = "a"\n'),
        join(
            b"", b"", b"none", b"80", b"", b"cuda:0", b"name@0123456789ab", b"192.0.2.1:5000", b"60"
        ),
    ]


@target
def known_doors() -> Made:
    path = folder() / "doors.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        found = known.read_remembered(path, 1_800_000_000.0)
        assert len(found) <= known.MAX_REMEMBERED

    peer = "12D3KooWAaYVakMyznsMrUbM1TPKUnduj2tCfQiM6zujqQmepeqr"
    door = {
        "peer_id": peer,
        "addresses": [f"/ip4/192.0.2.1/tcp/1/p2p/{peer}"],
        "answered": 1_799_999_990.0,
        "named": True,
    }
    return run, [
        json.dumps({"version": 1, "doors": [door] * number}).encode() for number in range(3)
    ]
