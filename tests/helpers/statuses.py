"""Statuses, peers and exchanges for tests, from as much of their JSON as a test is about."""

from collections.abc import Mapping
from typing import Any

from lowcomm_node.status.model import PeerStatus, Status, read
from lowcomm_node.sync.history import ExchangeEnded

RUN: dict[str, Any] = {
    "name": "demo", "run_id": "e1f145ac155e" + "0" * 52, "fingerprint": "e1f145ac155e",
    "method": "diloco",
    "creator": "12D3KooWFnwX6C2EPYF5SyEATLtEP74iGytMPpXcj3e2wqzMPa5Q", "steps": 400,
}  # fmt: skip
_STATUS: dict[str, Any] = {
    "peer_id": "12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c", "release": "0.2.0", "pid": 1,
    "run": RUN,
    "phase": "training", "waiting": None, "uptime": 1.0, "exchanges_running": [], "exchanges": {},
    "bytes_sent": 0,
    "bytes_received": 0, "peers": 0, "dht_peers": 0, "checkpoint": None, "addresses": [],
    "entry_points": [],
    "warnings": [], "trainer": {"state": "training", "device": None, "parameters": None,
        "total_steps": 400},
    "swarm": {"state": "connected", "seconds": 1.0, "reason": None, "doors": []},
}  # fmt: skip
_PEER: dict[str, Any] = {
    "peer_id": "12D3KooW9sF5Q8P3vjgRwaLNwpd81opxLNkppxzGR8dZatPiqkwy", "phase": "training",
    "swarm_step": 1, "steps": 1,
    "tokens_per_second": 1.0, "address": None, "release": "0.2.0", "age": 1.0, "completed": 0,
    "refused": 0,
    "failed": 0, "last_reason": "", "score": 1.0, "left_out": False, "held_against": "",
    "route": None,
    "route_reason": None, "round_trip": None, "rate_up": None, "rate_down": None,
}  # fmt: skip
_EXCHANGE: dict[str, Any] = {
    "time": 1.7e9, "fragment": 0, "round": 2, "outcome": "applied", "reason": "",
    "partners": [_PEER["peer_id"]],
    "swarm_step": 43, "bytes_sent": 2_810_112, "bytes_received": 2_810_112, "seconds": 0.425,
}  # fmt: skip


def make_status(**told: Any) -> Status:
    """A status that tells this; the rest is of a node that trains alone."""
    return read(Status, _merged(_STATUS, told))


def make_peer(**told: Any) -> PeerStatus:
    """A peer of which this is told."""
    return read(PeerStatus, _merged(_PEER, told))


def make_exchange(**told: Any) -> ExchangeEnded:
    """An exchange of which this is told; the rest is of one that was applied."""
    return read(ExchangeEnded, _merged(_EXCHANGE, told))


def _merged(known: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        name: _merged(known[name], one)
        if isinstance(one, dict) and isinstance(known.get(name), dict)
        else one
        for name, one in told.items()
    }
    return {**known, **nested}
