"""What must hold for a replica's state in pieces: nothing is lost, nothing is mixed up, whatever
optimizer, codec and model."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from lowcomm_node.data import open_data
from lowcomm_node.sync.frames import from_message, to_message
from lowcomm_node.trainer import transfer
from lowcomm_node.trainer.judging import MAX_CLAIM, PLAUSIBLE, UsualNorm
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.matching import Offer
from lowcomm_protocol.plan import FragmentProgress
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.state import (
    plan_pieces,
    read_manifest,
)

KINDS = {
    "lowcomm": {},
    "muon": {"train": {"optimizer": "muon"}},
    "tied": {"model": {"tied": True}},
    "whole": {"sync": {"fragments": 1, "codec": "mod8"}},
    "groups": {"sync": {"method": "streaming-diloco", "codec": "q2", "error_feedback": True}},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("A short text, and again a short text. " * 300)
    (folder / "b.txt").write_text("Another text that is held out. " * 300)
    return open_data(f"text:{folder}", "bytes", folder / "cache")


def spec_of(kind: str) -> RunSpec:
    change = KINDS[kind]
    return RunSpec.model_validate(
        {
            "run": {"name": "test", "steps": 1000},
            "model": {"layers": 2, "width": 32, "heads": 2, "feed_forward": 48, "context": 16}
            | change.get("model", {}),
            "train": {"batch": 2, "warmup": 2} | change.get("train", {}),
            "sync": {"method": "lowcomm", "interval": 8, "fragments": 2} | change.get("sync", {}),
        }
    )


def trained(kind: str, dataset, name: str = "peer", steps: int = 3) -> Replica:
    """A replica whose vectors all differ."""
    one = Replica(spec_of(kind), name, dataset, torch.device("cpu"))
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(steps):
        one.inner_step()
    for p in range(len(one.phi)):
        one.phi[p] = one.phi[p] + 0.01 * torch.randn(one.phi[p].shape, generator=generator)
        if one.keeps_momentum:
            one.delta[p] = torch.randn(one.phi[p].shape, generator=generator)
        state = {
            key: np.full_like(value, 0.125 + p) for key, value in one.coders[p].state().items()
        }
        one.coders[p].restore(state)
        one.schedule.merged(p, one.clock.step, one.steps, one.tokens)
        one.history[p].usual = UsualNorm(0.5 + p)
    return one


def check_same(one: Replica, other: Replica) -> None:
    """The same, to the bit, in all that travels."""
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name
    for mine, theirs in ((one.phi, other.phi), (one.delta, other.delta)):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert one.optimizer.moments().keys() == other.optimizer.moments().keys()
    for name, moment in one.optimizer.moments().items():
        assert torch.equal(moment, other.optimizer.moments()[name]), name
    for mine, theirs in zip(one.coders, other.coders, strict=True):
        assert mine.shared_state().keys() == theirs.shared_state().keys()
        assert all(
            np.array_equal(values, theirs.shared_state()[key])
            for key, values in mine.shared_state().items()
        )
        assert not any(
            values.any() for key, values in theirs.state().items() if "residual" in key
        ), "debts are not taken over"
    assert one.clock.step == other.clock.step
    count = len(one.phi)
    assert [one.schedule[p].version for p in range(count)] == [
        other.schedule[p].version for p in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_joiner_goes_on_exactly_where_its_donor_was(tmp_path: Path, dataset, kind: str):
    donor, joiner = (
        trained(kind, dataset),
        Replica(spec_of(kind), "joiner", dataset, torch.device("cpu")),
    )
    taken = transfer.StateSnapshot(donor)
    expected = trained(kind, dataset)
    donor.inner_step()  # it trains on while its snapshot is written
    donor.phi[0] = donor.phi[0] + 1
    name = taken.write(tmp_path)
    data = (tmp_path / name / "manifest").read_bytes()
    assert sha256(data).hexdigest() == name
    read_manifest(data, transfer.form_of(joiner))
    assert len(data) <= taken.form.largest_manifest
    assert (tmp_path / name / "state").stat().st_size == taken.form.size
    transfer.adopt_folder(joiner, tmp_path / name)
    check_same(expected, joiner)
    assert (joiner.steps, joiner.tokens) == (0, 0), "what it has trained itself stays its own"
    expected.stream, joiner.stream = (trained(kind, dataset, steps=0).stream for _ in range(2))
    for _ in range(2):
        assert expected.inner_step() == joiner.inner_step()


def test_a_joiner_of_a_donor_that_has_not_taken_a_step_warms_up(dataset):
    donor, joiner = (
        trained("lowcomm", dataset, steps=0),
        trained("lowcomm", dataset, "joiner", steps=0),
    )
    taken = transfer.StateSnapshot(donor)
    assert taken.manifest([]).moments == 0
    transfer.adopt(joiner, taken.manifest([]), taken.piece)
    assert joiner.optimizer.moments() == {}
    joiner.inner_step()


@pytest.mark.parametrize(("own", "step"), [(2, 3), (5, 5)])
def test_who_copies_a_state_has_all_that_it_trained_merged_and_its_exchanges_are_void(
    dataset, own: int, step: int
):
    donor, joiner = trained("lowcomm", dataset), trained("lowcomm", dataset, "joiner", steps=own)
    donor.schedule.merged(0, donor.clock.step, donor.steps, donor.tokens)
    joiner.capture(1)
    taken = transfer.StateSnapshot(donor)
    assert (taken.swarm_step, [donor.schedule[p].version for p in range(2)]) == (3, [2, 1])
    transfer.adopt(joiner, taken.manifest([]), taken.piece)
    assert joiner.captures == {} and joiner.clock.step == step, "its clock never goes back"
    for p, version in enumerate((2, 1)):
        synced = joiner.schedule.round_of(p, step)
        assert joiner.schedule[p] == FragmentProgress(
            version, own, own * joiner.spec.tokens_per_step, synced
        )
    assert [one.usual.learned for one in joiner.history] == [0.5, 1.5], "of its own exchanges"


def claiming(taken: transfer.StateSnapshot, usual: float, versions: int, moments: int) -> bytes:
    """The manifest of a donor that claims what it likes of norms and counters."""
    form = taken.form
    message = taken.manifest([bytes(32)] * len(form.pieces))
    message.versions[:] = [versions] * len(form.fragments)
    message.moments = moments
    norms = np.full(len(form.fragments), usual, dtype="<f4").tobytes()
    # The norms as a field that this release does not read any more.
    return message.SerializeToString() + bytes([7 << 3 | 2, len(norms)]) + norms


def test_no_claim_of_a_donor_makes_a_norm_plausible_or_a_newcomer_s_offer_invalid(dataset):
    donor, joiner = trained("lowcomm", dataset), trained("lowcomm", dataset, "joiner", steps=0)
    for one in joiner.history:
        one.usual = UsualNorm()
    taken = transfer.StateSnapshot(donor)
    lies = claiming(taken, usual=9.9e5, versions=2**53 - 1, moments=2**24 - 1)
    transfer.adopt(joiner, read_manifest(lies, taken.form), taken.piece)
    assert [one.usual.value for one in joiner.history] == [0.0, 0.0]
    joiner.inner_step()
    joiner.capture(0)
    joiner.contribute(0)
    bound = joiner.captures[0].judge.bound
    assert bound.limit <= PLAUSIBLE * MAX_CLAIM * joiner.spec.sync.interval * bound.own
    assert joiner.optimizer.steps <= taken.swarm_step + 1
    merged = joiner.schedule.merged(0, joiner.clock.step, joiner.steps, joiner.tokens)
    assert merged.version <= taken.swarm_step + 1
    offer = Offer(
        protocol=1,
        run_id=joiner.run_id,
        plan=joiner.plan.digest,
        codec="x",
        fragment=0,
        round=0,
        swarm_step=4,
        steps=1,
        tokens=1,
        version=merged.version,
        slow_digest=b"",
        seconds=1,
    )
    assert from_message(to_message(offer)).version == merged.version, "no deed at anybody"


@pytest.mark.parametrize("kind", ["lowcomm", "muon"])
def test_of_pieces_of_several_donors_each_value_keeps_what_belongs_to_it(dataset, kind):
    donors = [
        transfer.StateSnapshot(trained(kind, dataset, name, steps))
        for name, steps in (("a", 3), ("bb", 4), ("ccc", 5))
    ]
    joiner = Replica(spec_of(kind), "joiner", dataset, torch.device("cpu"))
    transfer.adopt(
        joiner, donors[0].manifest([]), lambda piece: donors[piece.index % 3].piece(piece)
    )
    again = transfer.StateSnapshot(joiner)
    pieces = again.form.pieces
    assert len(pieces) >= 6
    assert [again.piece(piece) for piece in pieces] == [
        donors[piece.index % 3].piece(piece) for piece in pieces
    ]


@pytest.mark.parametrize("vector", range(5))
def test_what_no_training_reaches_is_refused_and_changes_nothing(dataset, vector):
    donor, joiner = trained("lowcomm", dataset), trained("lowcomm", dataset, "joiner")
    taken, before = transfer.StateSnapshot(donor), trained("lowcomm", dataset, "joiner")
    bad = taken.form.pieces[2]

    def read(piece):
        data = bytearray(taken.piece(piece))
        if piece == bad:
            at = 4 * sum(piece.counts[:vector])
            data[at : at + 4] = np.float32(-1.0 if vector == 4 else np.nan).tobytes()
        return data

    with pytest.raises(ProtocolViolation, match="piece 2 holds"):
        transfer.adopt(joiner, taken.manifest([]), read)
    check_same(before, joiner)


# The plan of pieces


@pytest.mark.parametrize(
    ("numel", "each"),
    [
        (1000, 1000),
        (4000, 3072),
        (256 * 3072 + 1, 3328),
        (256 * 4096, 4096),
        (256 * 4096 + 1, 4352),
        (256 * 196_608, 196_608),
        (256 * 200_000, 196_608),
    ],
)
def test_values_of_a_piece_are_those_of_the_documents(numel: int, each: int):
    first = plan_pieces([((numel, True),)], ranges=False)[0]
    assert (first.start, first.stop) == (0, each), (
        "N / 256 in whole blocks, from 3072 to 196,608: docs/protocol.md"
    )
