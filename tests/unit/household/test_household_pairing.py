"""What must hold for pairing: only who has the code gets in, once, and in time."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from helpers.households import Lending, lending, linked
from lowcomm_node.errors import ConfigError, LinkLost
from lowcomm_node.household.link import pair
from lowcomm_node.household.machines import Household, Machine, read_address
from lowcomm_node.household.pairing import (
    ALPHABET,
    LIFE,
    MAX_TRIES,
    Codes,
    Hello,
    draw_code,
    make_hello,
    propose,
    read_code,
)
from lowcomm_node.net.tls import make_certificate


def paired(home: Path) -> list[str]:
    return [machine.key for machine in Household(home).machines()]


def proposed(head: Household, code: str, hello: Hello) -> bytes:
    proposal, _ = propose(head, read_code(code), hello)
    return proposal.model_dump_json().encode()


def anybody() -> ssl.SSLContext:
    """TLS of a machine that is not paired."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


@pytest.fixture
def ends(tmp_path: Path) -> tuple[Household, Household]:
    """A lender and a head."""
    return Household(tmp_path / "lender"), Household(tmp_path / "head")


@pytest.fixture
def codes() -> tuple[Codes, list[str]]:
    shown: list[str] = []
    return Codes(shown.append), shown


# over the network


async def test_machines_with_the_same_code_pin_each_other(tmp_path: Path):
    head = tmp_path / "head"
    async with lending(tmp_path) as lender:
        await lender.until_told("code")
        found = await pair(lender.address, head, lender.codes[0].lower().replace("-", " "))
        assert found.address == lender.address and found.key == lender.household.key
        assert paired(head) == [lender.household.key]
        assert paired(tmp_path / "lender") == [Household(head).key]
        async with linked(lender, head, "echo"):
            assert await lender.until_told("started")
        assert lender.events("paired") and len(lender.codes) == 1, "it is paired: no more codes"
        with pytest.raises(ConfigError, match="shows no code"):
            await pair(lender.address, tmp_path / "other", lender.codes[0])
    for home in (head, tmp_path / "lender"):
        for name in ("household.pem", "household.json"):
            assert (home / name).stat().st_mode & 0o777 == 0o600


async def test_a_wrong_code_pairs_nobody_and_ten_of_them_change_the_code(tmp_path: Path):
    head, wrong = tmp_path / "head", "0000-0000-0000-0000"
    async with lending(tmp_path) as lender:
        await lender.until_told("code")
        for _ in range(MAX_TRIES):
            with pytest.raises(ConfigError, match="has another code"):
                await pair(lender.address, head, wrong)
        await lender.until_told("code", 2)
        with pytest.raises(ConfigError, match="has another code"):
            await pair(lender.address, head, lender.codes[0])
        assert paired(head) == paired(tmp_path / "lender") == []
        await pair(lender.address, head, lender.codes[1])


async def test_a_code_pairs_one_of_two_heads_and_the_next_code_the_other(tmp_path: Path):
    homes = [tmp_path / name for name in ("ada", "bob")]
    async with lending(tmp_path, pairs=True) as lender:
        await lender.until_told("code")
        tries = [pair(lender.address, home, lender.codes[0]) for home in homes]
        done = await asyncio.gather(*tries, return_exceptions=True)
        assert sorted(isinstance(one, ConfigError) for one in done) == [False, True], done
        await lender.until_told("code", 2)
        late = next(home for home in homes if not paired(home))
        await pair(lender.address, late, lender.codes[1])
        assert len(paired(tmp_path / "lender")) == 2


@asynccontextmanager
async def between(
    lender: Lending, folder: Path, change: Callable[[bytes, str], bytes]
) -> AsyncIterator[str]:
    """A machine between both, with certificates of its own; ``change``: of each line, with the key
    of its certificate."""
    own = make_certificate()
    file = folder / "between.pem"
    file.write_bytes(own.private_pem + own.pem)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(file)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(change(line, own.public_key.hex()))
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection("127.0.0.1", lender.port, ssl=anybody())
        await asyncio.gather(
            pass_on(theirs[0], writer), pass_on(reader, theirs[1]), return_exceptions=True
        )

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=serving)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def as_it_is(line: bytes, own: str) -> bytes:
    return line


def with_own_key(line: bytes, own: str) -> bytes:
    message = json.loads(line)
    return json.dumps(message | ({"key": own} if "key" in message else {})).encode() + b"\n"


def with_own_key_to_the_head(line: bytes, own: str) -> bytes:
    return line if b'"proof"' in line else with_own_key(line, own)


@pytest.mark.parametrize("change", [as_it_is, with_own_key, with_own_key_to_the_head])
async def test_a_machine_between_both_is_paired_with_neither(
    change: Callable[[bytes, str], bytes], tmp_path: Path
):
    async with lending(tmp_path) as lender:
        await lender.until_told("code")
        async with between(lender, tmp_path, change) as address:
            with pytest.raises((ConfigError, LinkLost)):
                await pair(address, tmp_path / "head", lender.codes[0])
        assert paired(tmp_path / "head") == paired(tmp_path / "lender") == []
        await pair(lender.address, tmp_path / "head", lender.codes[0])


async def test_who_pairs_and_says_nothing_holds_up_nobody(tmp_path: Path):
    async with lending(tmp_path) as lender:
        await lender.until_told("code")
        calling = anybody()
        dials = (asyncio.open_connection("127.0.0.1", lender.port, ssl=calling) for _ in range(20))
        silent = await asyncio.gather(*dials, return_exceptions=True)
        await pair(lender.address, tmp_path / "head", lender.codes[0])
        for one in silent:
            if isinstance(one, tuple):
                one[1].transport.abort()


async def test_a_proposal_with_more_behind_it_pairs_nobody(tmp_path: Path):
    head, seen = Household(tmp_path / "head"), list[bool]()
    async with lending(tmp_path) as lender:
        await lender.until_told("code")
        for end in (b"\nmore\n", b"x" * 1_000_000, b"\n"):
            tried = await asyncio.open_connection("127.0.0.1", lender.port, ssl=anybody())
            hello = Hello.model_validate_json(await tried[0].readline())
            tried[1].write(proposed(head, lender.codes[0], hello) + end)
            with suppress(ConnectionError):
                await tried[0].read()
            tried[1].transport.abort()
            seen.append(bool(lender.household.machines()))
    assert seen == [False, False, True]


# proofs


def test_what_was_heard_of_a_pairing_opens_no_other(
    ends: tuple[Household, Household], codes: tuple[Codes, list[str]]
):
    (lender, head), (one, shown) = ends, codes
    one.renew(0.0)
    hello = make_hello(lender)
    proposal, expected = propose(head, read_code(shown[0]), hello)
    line = proposal.model_dump_json().encode()
    found, consent = one.check(hello, line, 1.0)
    assert found.key == head.key and consent.proof == expected
    assert consent.proof != proposal.proof, "no proof serves both ways"
    with pytest.raises(LinkLost, match="too late"):
        one.check(hello, line, 1.0)
    one.renew(2.0)
    with pytest.raises(LinkLost, match="another code"):
        one.check(hello, line, 2.0)
    # Even under the same code: the nonce of each connection is new.
    again = Codes(shown.append)
    again.renew(0.0)
    hello = make_hello(lender)
    old = proposed(head, shown[-1], hello)
    with pytest.raises(LinkLost, match="another code"):
        again.check(make_hello(lender), old, 0.0)
    other = json.loads(old) | {"key": lender.key}
    with pytest.raises(LinkLost, match="another code"):
        again.check(hello, json.dumps(other).encode(), 0.0)
    found, _ = again.check(hello, old, 0.0)
    assert found.key == head.key


def test_a_code_holds_for_ten_minutes(
    ends: tuple[Household, Household], codes: tuple[Codes, list[str]]
):
    (lender, head), (one, shown) = ends, codes
    assert not one.is_shown(0.0)
    one.renew(100.0)
    hello = make_hello(lender)
    line = proposed(head, shown[0], hello)
    assert LIFE == 600 and not one.is_shown(700.0)
    with pytest.raises(LinkLost, match="too late"):
        one.check(hello, line, 700.0)
    assert one.is_shown(699.0)
    found, _ = one.check(hello, line, 699.0)
    assert found.key == head.key


def test_wrong_proofs_count_and_malformed_messages_do_not(
    ends: tuple[Household, Household], codes: tuple[Codes, list[str]]
):
    (lender, head), (one, shown) = ends, codes
    one.renew(0.0)
    hello = make_hello(lender)
    right = proposed(head, shown[0], hello)
    changed = (
        right.replace(b'"proof"', b'"prove"'),
        right.replace(head.key.encode(), b"f" * 64),
        right[:-1] + b',"more":1}',
    )
    for line in (b"", b"{}", b"[" * 5000, right[:-1], *changed):
        for _ in range(3):
            with pytest.raises(LinkLost, match="sent what is no proposal"):
                one.check(hello, line, 0.0)
    wrong = proposed(head, "0" * 16, hello)
    for _ in range(MAX_TRIES):
        assert one.is_shown(0.0)
        with pytest.raises(LinkLost, match="another code"):
            one.check(hello, wrong, 0.0)
    assert not one.is_shown(0.0)
    with pytest.raises(LinkLost, match="too late"):
        one.check(hello, right, 0.0)


def test_codes_have_80_bits_and_forgive_letters_that_look_like_digits():
    assert len(ALPHABET) == 32 and len(read_code(draw_code())) == 16
    assert len({draw_code() for _ in range(100)}) == 100
    assert read_code("oil0 abcd-efgh jkmn") == "0110ABCDEFGHJKMN"
    for text in ("", "ABCD-EFGH-JKMN", "ABCD-EFGH-JKMN-PQRU", "ABCD-EFGH-JKMN-PQR\u0661"):
        with pytest.raises(ConfigError, match="16 letters and digits"):
            read_code(text)


# what a home keeps


def key() -> str:
    return make_certificate().public_key.hex()


def test_a_machine_keeps_its_key_and_replaces_what_had_the_same_key_or_address(tmp_path: Path):
    household = Household(tmp_path)
    assert Household(tmp_path).key == household.key
    one, other = key(), key()
    household.add(Machine(name="desk", key=one, address="10.0.0.2:31340"))
    household.add(Machine(name="desk", key=other, address="10.0.0.3:31340"))
    household.add(Machine(name="head", key=one))
    assert household.lender("10.0.0.3").name == "desk-2"
    household.add(Machine(name="desk", key=key(), address="10.0.0.3:31340"))
    household.add(Machine(name="desk", key=one, address="10.0.0.4:31340"))
    found = [(machine.name, machine.address) for machine in household.machines()]
    assert found == [("head", ""), ("desk-2", "10.0.0.3:31340"), ("desk", "10.0.0.4:31340")]
    assert [head.name for head in household.heads().values()] == ["head"]
    with pytest.raises(ConfigError, match=r"pair 10\.0\.0\.2 --code CODE"):
        household.lender("10.0.0.2")
    with pytest.raises(ConfigError, match="there is desk, desk-2, head"):
        household.forget("nobody")
    household.forget("head")
    assert not household.heads()


@pytest.mark.parametrize("name", ["household.json", "household.pem"])
def test_a_damaged_file_is_one_clear_error_and_never_a_new_beginning(name: str, tmp_path: Path):
    household = Household(tmp_path)
    household.add(Machine(name="desk", key=key()))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=f"{name} is damaged: restore it, or remove it"):
        Household(tmp_path).machines()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.168.1.20", "192.168.1.20", 31340),
        ("desk.local:4000", "desk.local", 4000),
        ("fe80::1", "fe80::1", 31340),
        ("[fe80::1]:4000", "fe80::1", 4000),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, host: str, port: int):
    assert read_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:70000", "http://a", "a/b", "u@a", "[fe80::1"])
def test_what_is_no_address_is_one_clear_error(text: str):
    with pytest.raises(ConfigError, match="is not an address such as"):
        read_address(text)
