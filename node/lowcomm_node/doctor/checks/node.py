"""Checks of the node and its swarm: does it run, does anybody answer, are its peers reached."""

from collections import Counter

from lowcomm_node.doctor.observations import Observations
from lowcomm_node.doctor.report import UNREACHED, Finding, State
from lowcomm_node.status.model import to_json

NOT_CALLED = "not called yet"


def node(seen: Observations) -> Finding:
    """The node of this home."""
    if seen.hangs:
        return Finding("node", State.FAULT, "does not answer", seen.absent)
    if seen.broken:
        return Finding("node", State.FAULT, "none could start here", seen.broken)
    status = seen.status
    if status is None:
        return Finding("node", State.UNKNOWN, f"none runs in {seen.home}", seen.absent)
    told = [status.phase]
    if run := status.run:
        done = status.exchanges
        told = [
            f"{status.phase} in {run.name}@{run.fingerprint}",
            _many(status.peers, "peer"),
            f"{_many(done.completed, 'exchange')} done, {done.failed} failed",
        ]
    told += [status.waiting] if status.waiting else []
    told += [f"warning: {status.warnings[-1]}"] if status.warnings else []
    shown = ("peer_id", "phase", "waiting", "peers", "exchanges", "warnings")
    figures = to_json(status)
    return Finding("node", State.OK, "; ".join(told), "", {key: figures[key] for key in shown})


def dht(seen: Observations) -> Finding:
    """Whether somebody of the swarm answers, and whether runs are published."""

    def found(state: State, value: str, remedy: str = "") -> Finding:
        figures = {"peers": seen.dht_peers, "runs": seen.runs}
        return Finding(UNREACHED, state, value, remedy, figures)

    at = ", ".join(seen.peers) or "the addresses that this home remembers"
    online = "that this machine is online"
    if seen.trouble:
        remedy = f"compare {at} with what `lowcomm-bootstrap serve` prints now, and check {online}"
        return found(State.FAULT, seen.trouble, remedy)
    if seen.broken:
        value = "the network was not looked at: no node could start here"
        return found(State.UNKNOWN, value, seen.broken)
    if seen.dht_peers is None and seen.status is None:
        value = "the network was not looked at: no address of the swarm is known"
        ask = "lowcomm-node doctor --peers ADDR, as `lowcomm-bootstrap serve` prints it"
        return found(State.UNKNOWN, value, f"give an address of the swarm: {ask}")
    if not seen.dht_peers:
        remedy = f"check that a bootstrap server or peer runs at {at}, and {online}"
        return found(State.FAULT, f"nobody answers at {at}", remedy)
    answer = f"{_many(seen.dht_peers, 'peer')} known in the DHT"
    if seen.runs == 0:
        remedy = f"publish a run: lowcomm-node create run.toml --peers {seen.peers[0]}"
        return found(State.WARNING, f"{answer}, but no run is published", remedy)
    runs = f", {_many(seen.runs, 'run')} published" if seen.runs is not None else ""
    return found(State.OK, f"{answer}{runs}")


def routes(seen: Observations) -> Finding | None:
    """The routes to peers of the run."""
    if not seen.members:
        return None
    lost = [peer for peer in seen.members if peer.route is None and peer.route_reason]
    others = [peer.route or NOT_CALLED for peer in seen.members if peer not in lost]
    kinds = Counter(route.partition(" ")[0] for route in others)
    words = {kind: kind for kind in kinds} | {"not": NOT_CALLED}
    told = [f"{count} {words[kind]}" for kind, count in kinds.most_common()]
    figures = {"routes": dict(kinds), "lost": [peer.peer_id for peer in lost]}
    if not lost:
        return Finding("routes", State.OK, "; ".join(told), "", figures)
    told.append(f"{len(lost)} not reached: {lost[-1].route_reason}")
    remedy = f"see what is known of them: lowcomm-node ping {lost[-1].peer_id[-6:]}"
    return Finding("routes", State.WARNING, "; ".join(told), remedy, figures)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
