"""What must hold for ``--json``: its keys stay, and releases that differ understand each other."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from helpers.statuses import make_exchange, make_peer, make_status
from lowcomm_node.errors import Unhealthy
from lowcomm_node.status.events import Contributed
from lowcomm_node.status.model import (
    CheckpointStatus,
    Limits,
    PeerStatus,
    Ping,
    Status,
    read,
    to_json,
)
from lowcomm_node.sync.history import ExchangeEnded

KEYS: dict[type, str] = {
    Status: """
        peer_id release pid phase joined waiting waiting_code unchanged leaving uptime bytes_sent
        bytes_received
        peers
        silent_peers swarm_peers shards dht_peers addresses entry_points tunnels refusals
        warnings warning_codes
        run run.name run.description run.run_id run.fingerprint run.method run.creator run.steps
        run.chat run.adapts run.amendments
        run.amendments.number run.amendments.at run.amendments.settings run.amendments.text
        run.amendments.in_force
        swarm swarm.state swarm.seconds swarm.reason swarm.doors swarm.doors.peer_id
        swarm.doors.address
        swarm.doors.named swarm.doors.answers swarm.doors.reason swarm.doors.next_attempt
        pause pause.rule pause.reason pause.until schedule
        trainer trainer.state trainer.pid trainer.failures trainer.last_failure
        trainer.last_failure.kind
        trainer.last_failure.reason trainer.last_failure.step trainer.device trainer.duty
        trainer.parameters trainer.total_steps trainer.remaining
        trainer.tokenizing trainer.tokenizing.done
        trainer.tokenizing.total trainer.tokenizing.tokens trainer.tokenizing.rate
        trainer.tokenizing.remaining trainer.steps trainer.swarm_step trainer.tokens
        trainer.tokens_per_second trainer.loss trainer.skipped_steps trainer.learning_rate
        trainer.lenders trainer.lenders.name
        trainer.lenders.away trainer.lenders.blocks
        trainer.lenders.windows trainer.lenders.computing
        trainer.lenders.moving trainer.lenders.moved
        trainer.micro_batch trainer.activation_checkpointing trainer.computing trainer.waited
        trainer.val_loss_first trainer.val_loss_last trainer.memory trainer.memory.reckoned
        trainer.memory.taken trainer.memory.most trainer.accelerators
        trainer.accelerators.device trainer.accelerators.kind trainer.accelerators.name
        trainer.accelerators.load trainer.accelerators.memory_taken
        trainer.accelerators.memory_total trainer.accelerators.temperature
        trainer.accelerators.speed claims claims.val_loss claims.told_by releases
        exchanges_running exchanges_running.fragment exchanges_running.round exchanges_running.stage
        exchanges_running.partners exchanges_running.bytes_sent exchanges_running.bytes_received
        exchanges_running.bytes_expected exchanges_running.seconds
        exchanges exchanges.completed exchanges.refused exchanges.failed exchanges.no_partner
        exchanges.in_doubt exchanges.realigned exchanges.realigned_share exchanges.worst_block
        exchanges.since_applied
        text text.name text.share text.tokens text.pieces text.epoch text.pieces_read
        text.own_pieces text.held text.missing text.bytes_fetched text.bytes_given text.waiting
        interval interval.written interval.effective interval.cause interval.reason
        limits limits.max_up limits.max_down limits.max_peers limits.up limits.down limits.peers
        limits.turned_away
        checkpoint checkpoint.step checkpoint.path""",
    PeerStatus: """
        peer_id phase swarm_step steps tokens tokens_per_second val_loss address release name age
        completed refused
        failed
        last_reason last_code score left_out held_against route route_reason round_trip rate_up
        rate_down""",
    ExchangeEnded: """
        time fragment round outcome reason code partners in_doubt left_out left_out_codes
        swarm_step bytes_sent bytes_received
        seconds stages moments worst_block id""",
    Limits: "max_up max_down max_peers up down peers turned_away",
    Ping: "peer_id routes routes.route routes.round_trip routes.up routes.down routes.reason",
    Contributed: "steps tokens exchanges bytes_sent checkpoint",
}
"""The keys of release 0.2.0: programs read them."""


def keys(kind: Any, before: str = "") -> Iterator[str]:
    """The keys of a record, those of records in it behind a point."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield before + field.name
        for part in (hints[field.name], *get_args(hints[field.name])):
            if is_dataclass(part):
                yield from keys(part, f"{before}{field.name}.")


@pytest.mark.parametrize("kind", KEYS)
def test_programs_find_the_keys_that_they_know(kind: type) -> None:
    assert sorted(keys(kind)) == sorted(KEYS[kind].split())


@pytest.mark.parametrize("record", [make_status(), make_peer(), make_exchange()])
def test_a_record_is_the_same_after_its_way_through_json(record: Any) -> None:
    told = to_json(record)
    assert read(type(record), told) == record
    assert to_json(read(type(record), told)) == told


def test_what_a_newer_node_tells_beside_is_passed_over() -> None:
    told: Mapping[str, Any] = to_json(make_status())
    newer = {**told, "temperature": 40, "trainer": {**told["trainer"], "gradient_norm": 1.0}}
    assert read(Status, newer) == make_status()


@pytest.mark.parametrize("told", [{"phase": None}, {"trainer": {"device": []}}, {"peers": "many"}])
def test_what_can_not_be_read_names_the_field_and_the_remedy(told: dict[str, Any]) -> None:
    with pytest.raises(Unhealthy, match=rf"{next(iter(told))}.*Start the node again"):
        read(Status, to_json(make_status()) | told)
    with pytest.raises(Unhealthy, match=r"path: Field required"):
        read(CheckpointStatus, {"step": 1})
