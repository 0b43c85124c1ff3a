"""Mirrors give pieces over HTTPS, and nothing that they or their names do leads anywhere else."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from helpers.packed_text import ALL, DATA, DIGESTS, PART, PIECE, never, opened
from helpers.waiting import until_async
from helpers.wire import DEADLINE, soon
from lowcomm_node.errors import LinkLost, NodeError, TooSlow
from lowcomm_node.fetch import mirrors, packs
from lowcomm_node.fetch.mirrors import Mirror, MirrorRefused
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.targets import is_public

NAME = "mirror.example"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key of NAME."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


class WebServer:
    """Serves DATA as NAME.pack, and its list."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Heads of the requests."""
        self.status = "206 Partial Content"
        self.size = len(DATA)
        self.etag = '"one"'
        self.more: list[str] = []
        self.change: Callable[[bytes], bytes] = lambda body: body
        self.after: Callable[[asyncio.StreamWriter], None] = lambda writer: None
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.asked.append(head)
                await self._answer(head, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        if ".pieces" in head:
            lines, body = ["HTTP/1.1 200 OK"], DIGESTS
        else:
            asked = re.search(r"bytes=(\d+)-(\d+)", head)
            assert asked
            first, last = map(int, asked.groups())
            span = f"Content-Range: bytes {first}-{last}/{self.size}"
            lines, body = (
                [f"HTTP/1.1 {self.status}", span, f"ETag: {self.etag}"],
                DATA[first : last + 1],
            )
        sent = self.change(body)
        if not any(line.startswith("Transfer") for line in self.more):
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*lines, *self.more, "", ""]).encode() + sent)
        self.after(writer)
        await writer.drain()


@asynccontextmanager
async def serving(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WebServer]:
    """A web server whose certificate is trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    web = WebServer()
    server = await asyncio.start_server(web.serve, "127.0.0.1", 0, ssl=context)
    web.port = server.sockets[0].getsockname()[1]
    try:
        yield web
    finally:
        server.close()


def leads_to(*addresses: str) -> mirrors.Resolve:
    """A resolver that answers with these, one after another."""
    left = list(addresses)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return [left.pop(0) if len(left) > 1 else left[0]]

    return resolve


def mirror_at(web: WebServer, **more) -> Mirror:
    """The mirror, under its name."""
    more = {"is_local": True, "resolve": leads_to("127.0.0.1")} | more
    return Mirror(f"https://{NAME}:{web.port}/", PART, **more)


async def read(mirror: Mirror, piece: int) -> bytes:
    """A piece."""
    data, start = bytearray(), piece * PIECE
    try:
        async with asyncio.timeout(DEADLINE):
            async for block in mirror.read(start, start + PIECE, BandwidthLimit()):
                data += block
    finally:
        await mirror.close()
    return bytes(data)


@pytest.mark.parametrize("is_right", [True, False])
async def test_pieces_and_their_list_come_from_a_mirror_unless_it_sends_others(
    is_right: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packs, "PATIENCE", 0.0)
    monkeypatch.setattr(packs, "TICK", 0.0)
    warnings = list[str]()
    async with serving(certificate, monkeypatch) as web:
        mirror = mirror_at(web)
        store = PackStore(opened(tmp_path), never, mirrors=[mirror], warn=warnings.append)
        if is_right:
            await soon(store.have(ALL))
            assert store.path.read_bytes() == DATA and not warnings
            assert len(web.asked) < len(ALL), "neighbours come at once"
        else:
            web.change = lambda body: body if body == DIGESTS else bytes(len(body))
            work = asyncio.create_task(store.have(ALL))
            await until_async(lambda: bool(warnings), 30, "it is left out")
            assert "sent 3 wrong pieces" in warnings[0] and set(store.missing) == set(ALL)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            assert not any(map(store.file.has, ALL))
        await store.close()
    assert all(f"Host: {NAME}" in head for head in web.asked)


async def test_a_range_that_broke_off_goes_on_if_the_file_is_the_same(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(certificate, monkeypatch) as web:

        def cut(writer: asyncio.StreamWriter, then: str = web.status) -> None:
            writer.close()
            web.change, web.after, web.status = lambda body: body, lambda writer: None, then

        web.change, web.after = lambda body: body[:5000], cut
        assert await read(mirror_at(web), 2) == DATA[2 * PIECE : 3 * PIECE]
        first, second = web.asked
        assert f"bytes={2 * PIECE}-{3 * PIECE - 1}" in first and "If-Range" not in first
        assert f"bytes={2 * PIECE + 5000}-" in second and 'If-Range: "one"' in second

        web.change, web.after = lambda body: body[:5000], partial(cut, then="200 OK")
        with pytest.raises(MirrorRefused, match="has changed"):
            await read(mirror_at(web), 2)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "169.254.7.7", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "64:ff9b::a00:1", "2002:a00:1::1", "64:ff9b:1::1"],
)  # fmt: skip
async def test_a_name_that_leads_into_a_private_network_is_not_dialed(
    address: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_public(address)
    async with serving(certificate, monkeypatch) as web:
        mirror = mirror_at(web, is_local=False, resolve=leads_to(address))
        with pytest.raises(MirrorRefused, match="not an address of the public internet"):
            await read(mirror, 0)
        assert not web.asked


async def test_an_address_in_the_url_is_checked_as_that_of_a_name_is(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(certificate, monkeypatch) as web:
        for host in ("127.0.0.1", "[::1]", "localhost", "2130706433"):
            with pytest.raises(NodeError, match=r"public internet|can't be resolved"):
                await read(Mirror(f"https://{host}:{web.port}/", PART), 0)
        assert not web.asked


async def test_a_name_that_leads_elsewhere_a_moment_later_is_checked_again(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that is dialed is the one that was checked: there is no second look-up."""
    dialed = list[str]()

    async def connect_tcp(self, host: str, *more) -> None:
        dialed.append(host)
        raise OSError("nobody is dialed in a test")

    monkeypatch.setattr(mirrors.httpcore.AnyIOBackend, "connect_tcp", connect_tcp)
    public = "93.184.215.14"
    assert is_public(public)
    mirror = Mirror(f"https://{NAME}/", PART, resolve=leads_to(public, public, "10.0.0.1"))
    with pytest.raises(MirrorRefused, match=r"leads to 10\.0\.0\.1"):
        await read(mirror, 0)
    assert dialed == [public, public]


@pytest.mark.parametrize(
    ("status", "more", "why"),
    [
        ("302 Found", ["Location: https://10.0.0.1/"], "leads to another address"),
        ("301 Moved", [f"Location: https://{NAME}/b"], "leads to another address"),
        ("200 OK", [], "serves no ranges"),
        ("404 Not Found", [], "answers 404"),
        ("206 Partial Content", ["Content-Encoding: gzip"], "compresses"),
    ],
)
async def test_an_answer_that_is_not_of_the_range_is_refused(
    status: str, more: list[str], why: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(certificate, monkeypatch) as web:
        web.status, web.more = status, more
        with pytest.raises(MirrorRefused, match=why):
            await read(mirror_at(web), 0)
        assert len(web.asked) == 1


async def test_another_size_and_more_than_was_announced_are_refused(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(certificate, monkeypatch) as web:
        web.size += 1
        with pytest.raises(MirrorRefused, match="another file"):
            await read(mirror_at(web), 0)
        web.size -= 1
        web.more = ["Transfer-Encoding: chunked"]
        web.change = lambda body: b"".join(
            b"%x\r\n%b\r\n" % (len(body), body) for body in [body, body[:1], b""]
        )
        with pytest.raises(MirrorRefused, match="more than it announced"):
            await read(mirror_at(web), 0)
        web.more, web.change = [], lambda body: body + body
        assert await read(mirror_at(web), 0) == DATA[:PIECE], "nothing beyond its length is read"


async def test_who_drips_or_asks_for_patience_is_left_for_a_while(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "GIVING_WAY", 0.0)
    async with serving(certificate, monkeypatch) as web:
        web.change = lambda body: body[:1]
        with pytest.raises(TooSlow, match="next to nothing"):
            monkeypatch.setattr(mirrors, "LEAST_RATE", 1e12)
            await read(mirror_at(web), 0)
        web.change, web.status, web.more = lambda body: body, "429 Wait", ["Retry-After: 120"]
        mirror = mirror_at(web)
        with pytest.raises(LinkLost, match="again in 120 s"):
            await read(mirror, 0)
        assert mirror.later > 100


async def test_a_certificate_of_another_name_is_not_accepted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "ATTEMPTS", 1)
    async with serving(certificate, monkeypatch) as web:
        mirror = Mirror(
            f"https://other.example:{web.port}/", PART, is_local=True, resolve=leads_to("127.0.0.1")
        )
        with pytest.raises(LinkLost, match="failed"):
            await read(mirror, 0)
        assert not web.asked
