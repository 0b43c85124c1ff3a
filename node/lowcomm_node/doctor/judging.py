"""What was seen, judged: findings with their remedies. No I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lowcomm_node.doctor.between import judge_names, judge_packets, judge_silence
from lowcomm_node.doctor.case import Case
from lowcomm_node.doctor.findings import UNREACHED, Finding, State
from lowcomm_node.doctor.reach import judge_reach
from lowcomm_node.doctor.resources import judge_resources


def judge(case: Case) -> tuple[Finding, ...]:
    """All findings, in the order in which they are read."""
    findings = [_node(case), _dht(case), *judge_names(case.names), *judge_silence(case.silence)]
    if case.survey is not None and case.subject is not None:
        findings += judge_reach(case.subject, case.survey)
        findings += judge_packets(case.survey)
    if case.members:
        findings.append(_routes(case.members))
    return (*findings, *judge_resources(case))


def _node(case: Case) -> Finding:
    status = case.status
    if case.hangs:
        return Finding(name="node", state=State.FAULT, value="does not answer", remedy=case.absent)
    if case.broken:
        return Finding(name="node", state=State.FAULT, value="none could start here", remedy=case.broken)
    if status is None:
        return Finding(name="node", state=State.UNKNOWN, value=f"none runs in {case.home}", remedy=case.absent)
    run, done = status["run"], status["exchanges"]
    told = [f"{status['phase']} in {run['name']}@{run['fingerprint']}" if run else status["phase"]]
    if run:
        told += [
            _many(status["peers"], "peer"),
            f"{_many(done['completed'], 'exchange')} done, {done['failed']} failed",
        ]
    told += [status["waiting"]] if status["waiting"] else []
    told += [f"warning: {status['warnings'][-1]}"] if status["warnings"] else []
    figures = {key: status[key] for key in ("peer_id", "phase", "waiting", "peers", "exchanges", "warnings")}
    return Finding(name="node", state=State.OK, value="; ".join(told), figures=figures)


def _dht(case: Case) -> Finding:
    def found(state: State, value: str, remedy: str = "") -> Finding:
        figures = {"peers": case.dht_peers, "runs": case.runs}
        return Finding(name=UNREACHED, state=state, value=value, remedy=remedy, figures=figures)

    at = ", ".join(case.peers) or "the addresses that this home remembers"
    if case.trouble:
        remedy = f"compare {at} with what `lowcomm-bootstrap serve` prints now, and check that this machine is online"
        return found(State.FAULT, case.trouble, remedy)
    if case.broken:
        return found(State.UNKNOWN, "the network was not looked at: no node could start here", case.broken)
    if case.dht_peers is None and case.status is None:
        remedy = (
            "give an address of the swarm: lowcomm-node doctor --peers ADDR, as `lowcomm-bootstrap serve` prints it"
        )
        return found(State.UNKNOWN, "the network was not looked at: no address of the swarm is known", remedy)
    if not case.dht_peers:
        remedy = f"check that a bootstrap server or peer runs at {at}, and that this machine is online"
        return found(State.FAULT, f"nobody answers at {at}", remedy)
    answer = f"{_many(case.dht_peers, 'peer')} known in the DHT"
    runs = f", {_many(case.runs, 'run')} published" if case.runs is not None else ""
    if case.runs == 0:
        remedy = f"publish a run: lowcomm-node create run.toml --peers {case.peers[0]}"
        return found(State.WARNING, f"{answer}, but no run is published", remedy)
    return found(State.OK, f"{answer}{runs}")


def _routes(members: Sequence[Mapping[str, Any]]) -> Finding:
    kinds = Counter((member["route"] or "not called yet").split()[0] for member in members if not _is_lost(member))
    lost = [member for member in members if _is_lost(member)]
    told = [f"{count} {'not called yet' if kind == 'not' else kind}" for kind, count in kinds.most_common()]
    told += [f"{len(lost)} not reached: {lost[-1]['route_reason']}"] if lost else []
    state = State.WARNING if lost else State.OK
    remedy = f"see what is known of them: lowcomm-node ping {lost[-1]['peer_id'][-6:]}" if lost else ""
    figures = {"routes": dict(kinds), "lost": [member["peer_id"] for member in lost]}
    return Finding(name="routes", state=state, value="; ".join(told), remedy=remedy, figures=figures)


def _is_lost(member: Mapping[str, Any]) -> bool:
    return member["route"] is None and bool(member["route_reason"])


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
