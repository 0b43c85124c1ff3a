"""What a home keeps of who may take part: through restarts, other invites, and damage."""

from pathlib import Path

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.errors import NotAdmitted
from lowcomm_node.owner.sources import load_settings
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import Token, issue_invite, write_removals
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

CREATOR, ADA, BOB = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
NOW = 1_800_000_000.0


def run_of(admission: str) -> SignedRun:
    return sign_run(parse_toml(f'[run]\nname = "a"\nadmission = "{admission}"\n'), CREATOR)


RUN = run_of("invite")


def invite(
    letter: bytes = b"i", uses: int = 1, expires: float = NOW + 1000, creator: Identity = CREATOR
) -> Token:
    return issue_invite(creator, RUN.run_id, letter * 32, expires, uses)


def stand(
    home: Path, token: Token | None = None, now: float = NOW, peer: Identity = ADA, **flags
) -> RunAdmission:
    settings = load_settings(
        {"home": home, "invite": token.text() if token else None, **flags}, {}
    ).settings
    run_admission = RunAdmission(settings, RUN, peer.peer_id, now)
    run_admission.check_ourselves(now)
    return run_admission


def files(home: Path) -> set[str]:
    return {path.name for path in (home / "runs" / RUN.fingerprint).glob("*")}


def test_a_claim_is_made_once_and_kept_so_that_it_stays_the_earliest(tmp_path: Path) -> None:
    first = stand(tmp_path, invite())
    path = tmp_path / "runs" / RUN.fingerprint / "claim"
    assert path.read_bytes() == first.claim
    assert path.stat().st_mode & 0o777 == 0o600
    assert invite().secret not in path.read_bytes(), "the secret of an invite is not kept"
    assert stand(tmp_path, now=NOW + 50).claim == first.claim
    assert stand(tmp_path, invite(), now=NOW + 50).claim == first.claim, (
        "the same invite, given again"
    )


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"x" * 10_000])
def test_a_damaged_or_stolen_claim_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    stand(tmp_path, invite())
    path = tmp_path / "runs" / RUN.fingerprint / "claim"
    path.write_bytes(damage)
    with pytest.raises(NotAdmitted):
        stand(tmp_path)
    path.write_bytes(invite().claim(BOB.peer_id, NOW).data)
    with pytest.raises(NotAdmitted):
        stand(tmp_path)
    stand(tmp_path, invite())


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (invite(expires=NOW - 5), "expired 5 s ago: ask the run's creator for another"),
        (invite(creator=BOB), f"not signed by the creator of this run .{CREATOR.peer_id}"),
        (
            issue_invite(CREATOR, RUN.run_id, b"i" * 32, NOW + 9, 1, BOB.peer_id),
            f"for {BOB.peer_id} alone",
        ),
        (issue_invite(CREATOR, "cd" * 32, b"i" * 32, NOW + 9), "for another run"),
    ],
)
def test_an_invite_that_is_none_for_us_is_told_before_anything_is_kept(
    tmp_path: Path, token: Token, told: str
) -> None:
    with pytest.raises(NotAdmitted, match=told):
        stand(tmp_path, token)
    assert files(tmp_path) == set()


async def test_what_was_heard_survives_a_restart(tmp_path: Path) -> None:
    discovery = MemoryDiscovery(ADA.peer_id, MemoryNetwork(lambda: NOW))
    run_admission = stand(tmp_path, invite())
    run_admission.admission.check(BOB.peer_id, invite(b"b").claim(BOB.peer_id, NOW).data, NOW)
    removals = write_removals(CREATOR, RUN.run_id, 3, frozenset([BOB.peer_id]))
    assert run_admission.admission.hear_removals(removals.data)
    await run_admission.look(discovery)
    assert files(tmp_path) == {"claim", "uses", "removals"}

    again = stand(tmp_path)
    assert again.admission.removals == removals
    assert again.admission.to_bytes() == run_admission.admission.to_bytes()
    with pytest.raises(NotAdmitted, match="was removed from this run"):
        stand(tmp_path, invite(b"b"), peer=BOB)
