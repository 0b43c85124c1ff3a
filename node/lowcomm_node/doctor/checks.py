"""Checks of the node, its swarm, how others reach it, and this machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import wraps
from pathlib import Path
from statistics import median

from pynvml import NVMLError

from lowcomm_node.dht.hivemind import MAX_CLOCK_OFFSET
from lowcomm_node.doctor.findings import (
    UNREACHED,
    Finding,
    Observations,
    ObservedAddress,
    Severity,
    Subject,
    Survey,
)
from lowcomm_node.household.machines import Household, read_address
from lowcomm_node.net.targets import host_in, is_public, number_of
from lowcomm_node.status.model import to_json
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.accelerator import Card
from lowcomm_node.system.machine import memory_of_machine
from lowcomm_node.system.units import place, size
from lowcomm_protocol.peers.probes import ProbeKind

Check = Callable[[Observations], Finding | None]

NOT_CALLED = "not called yet"
PROXIES = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"}
CLOCK_WARNING = 1.0
"""Seconds of clock error from which the doctor warns."""
LITTLE_DISK, TOO_LITTLE_DISK = 2e9, 2e8
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 1e9, 256e6
LITTLE_GPU = 1e9
TRIAL_DEADLINE = 60.0
LENDER_DEADLINE = 3.0
_TRIAL = "lowcomm_node.models.devices"
_WAYS = {
    ProbeKind.DIRECT: "direct calls",
    ProbeKind.TCP: "libp2p over TCP",
    ProbeKind.QUIC: "libp2p over UDP",
}


# the node and its swarm


def node(seen: Observations) -> Finding:
    """The node of this home."""
    if seen.hangs:
        return Finding("node", Severity.FAULT, "does not answer", seen.absent)
    if seen.broken:
        return Finding("node", Severity.FAULT, "none could start here", seen.broken)
    status = seen.status
    if status is None:
        return Finding("node", Severity.UNKNOWN, f"none runs in {seen.home}", seen.absent)
    parts = [status.phase]
    if run := status.run:
        done = status.exchanges
        parts = [
            f"{status.phase} in {run.name}@{run.fingerprint}",
            _many(status.peers, "peer"),
            f"{_many(done.completed, 'exchange')} done, {done.failed} failed",
        ]
    parts += [status.waiting] if status.waiting else []
    parts += [f"warning: {status.warnings[-1]}"] if status.warnings else []
    shown = ("peer_id", "phase", "waiting", "peers", "exchanges", "warnings")
    figures = to_json(status)
    return Finding("node", Severity.OK, "; ".join(parts), "", {key: figures[key] for key in shown})


def dht(seen: Observations) -> Finding:
    """Whether a peer of the swarm answers, and whether runs are published."""

    def found(state: Severity, value: str, remedy: str = "") -> Finding:
        figures = {"peers": seen.dht_peers, "runs": seen.runs}
        return Finding(UNREACHED, state, value, remedy, figures)

    at = ", ".join(seen.peers) or "the addresses that this home remembers"
    online = (
        "that this machine is online (`curl -I http://example.com` shows the login page of a "
        "network that has one, `getent hosts NAME` whether a name resolves)"
    )
    if seen.trouble:
        remedy = f"compare {at} with what `lowcomm-bootstrap serve` prints now, and check {online}"
        return found(Severity.FAULT, seen.trouble, remedy)
    if seen.broken:
        value = "the network was not looked at: no node could start here"
        return found(Severity.UNKNOWN, value, seen.broken)
    if seen.dht_peers is None and seen.status is None:
        value = "the network was not looked at: no address of the swarm is known"
        ask = "lowcomm-node doctor --peers ADDR, as `lowcomm-bootstrap serve` prints it"
        return found(Severity.UNKNOWN, value, f"give an address of the swarm: {ask}")
    if not seen.dht_peers:
        remedy = f"check that a bootstrap server or peer runs at {at}, and {online}"
        return found(Severity.FAULT, f"no peer answers at {at}", remedy)
    answer = f"{_many(seen.dht_peers, 'peer')} known in the DHT"
    if seen.runs == 0:
        remedy = f"publish a run: lowcomm-node create run.toml --peers {seen.peers[0]}"
        return found(Severity.WARNING, f"{answer}, but no run is published", remedy)
    runs = f", {_many(seen.runs, 'run')} published" if seen.runs is not None else ""
    return found(Severity.OK, f"{answer}{runs}")


def proxy(seen: Observations) -> Finding | None:
    """Variables that name a proxy, which the node ignores; None without any."""
    # Only the names: a value may hold a password.
    found = sorted(name for name in os.environ if name.lower() in PROXIES and os.environ[name])
    if not found:
        return None
    value = f"ignores {', '.join(found)}: peers are called directly"
    return Finding("proxy", Severity.OK, value, "", {"ignored": found})


def routes(seen: Observations) -> Finding | None:
    """The routes to peers of the run."""
    if not seen.members:
        return None
    lost = [peer for peer in seen.members if peer.route is None and peer.route_reason]
    others = [peer.route or NOT_CALLED for peer in seen.members if peer not in lost]
    kinds = Counter(route.partition(" ")[0] for route in others)
    words = {kind: kind for kind in kinds} | {"not": NOT_CALLED}
    parts = [f"{count} {words[kind]}" for kind, count in kinds.most_common()]
    figures = {"routes": dict(kinds), "lost": [peer.peer_id for peer in lost]}
    if not lost:
        return Finding("routes", Severity.OK, "; ".join(parts), "", figures)
    parts.append(f"{len(lost)} not reached: {lost[-1].route_reason}")
    remedy = f"see what is known of them: lowcomm-node ping {lost[-1].peer_id[-6:]}"
    return Finding("routes", Severity.WARNING, "; ".join(parts), remedy, figures)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# the line, as others see it


def asked_others(check: Callable[[Survey], Finding]) -> Callable[[Observations], Finding | None]:
    """Make a check of a survey a check of observations: None if the network was not looked at."""

    @wraps(check)
    def checked(seen: Observations) -> Finding | None:
        return check(seen.survey) if seen.survey is not None else None

    return checked


def _unknown(name: str, survey: Survey, why: str = "") -> Finding:
    reasons = "; ".join(f"{at} {reason}" for at, reason in list(survey.silent.items())[:3])
    remedy = "ask another bootstrap server or peer: lowcomm-node doctor --peers ADDR"
    return Finding(name, Severity.UNKNOWN, why or f"no peer could be asked: {reasons}", remedy)


@asked_others
def clock(survey: Survey) -> Finding:
    """Whether our clock agrees with theirs."""
    if not survey.helpers:
        return _unknown("clock", survey)
    count = len(survey.helpers)
    offset = median(helper.offset for helper in survey.helpers)
    off = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'}"
    value = f"{off} {count} that answered" if abs(offset) >= 0.05 else "in sync"
    if abs(offset) <= CLOCK_WARNING:
        return Finding("clock", Severity.OK, value, "", {"offset": offset})
    state = Severity.FAULT if abs(offset) > MAX_CLOCK_OFFSET else Severity.WARNING
    whom = (
        "the peer that answered; if it is that one's clock that is wrong, tell its owner, else"
        if count == 1
        else f"{count} peers:"
    )
    remedy = f"this clock is {off} {whom} run `timedatectl set-ntp true`"
    return Finding("clock", state, value, remedy, {"offset": offset})


@asked_others
def udp(survey: Survey) -> Finding:
    """Whether UDP gets out, and calls over it get in."""
    gets_in = survey.reached.get(ProbeKind.QUIC)
    # A connection that a peer makes over QUIC needs our answers.
    gets_out = bool(gets_in) or any(helper.is_over_udp for helper in survey.helpers)
    dial = next((helper.entry.dial for helper in survey.helpers if helper.offers_udp), None)
    if not gets_out and dial is None:
        why = "no peer that answered offers UDP" if survey.helpers else ""
        return _unknown("udp", survey, why)
    figures = {"gets_out": gets_out, "gets_in": gets_in}
    if gets_out:
        calls = {True: ", and calls come in", False: "; calls do not come in", None: ""}
        return Finding("udp", Severity.OK, f"gets out{calls[gets_in]}", "", figures)
    return Finding(
        "udp",
        Severity.WARNING,
        "no peer is reached over UDP, although some offer it",
        f"let UDP out of {survey.outward or 'this machine'} (it did not reach the peer at {dial}): "
        "without it holes can't be punched through routers, and a lossy line is slower",
        figures,
    )


# calls from outside


class Nat(StrEnum):
    """The kind of router between this machine and the internet, and what shows it."""

    NONE = "none"
    """We are seen at an address of our own, and calls arrive."""
    FIREWALL = "firewall"
    """We are seen at an address of our own, but calls do not arrive."""
    OPEN = "open"
    """We are seen at another address, and calls arrive: a full cone, or ports are forwarded."""
    RESTRICTED = "port-restricted"
    """Two helpers see the same port, and calls do not arrive."""
    SYMMETRIC = "symmetric"
    """Two helpers see different ports for the same one of ours."""
    BEHIND = "behind-nat"
    """One helper sees us, and calls do not arrive: one of the two above."""
    UNKNOWN = "unknown"
    """No helper sees us from outside of our own network."""


def kind_of_nat(
    own_hosts: Iterable[str], observed: Iterable[ObservedAddress], calls_come_in: bool | None
) -> Nat:
    """The kind of router. ``calls_come_in``: whether a call of a helper came in; None if none was
    made."""
    outside = [seen for seen in observed if is_public(seen.host)]
    if not outside:
        return Nat.UNKNOWN
    own = set(own_hosts)
    if all(seen.host in own for seen in outside):
        return Nat.FIREWALL if calls_come_in is False else Nat.NONE
    if calls_come_in:
        return Nat.OPEN
    by_socket: defaultdict[str, list[ObservedAddress]] = defaultdict(list)
    for seen in outside:
        by_socket[seen.socket].append(seen)
    seen_twice = [places for places in by_socket.values() if len(places) > 1]
    if any(len(set(places)) > 1 for places in seen_twice):
        return Nat.SYMMETRIC
    return Nat.RESTRICTED if seen_twice and calls_come_in is False else Nat.BEHIND


def _nat_of(survey: Survey) -> Nat:
    reached = survey.reached
    came_in = any(reached.values()) if reached else None
    return kind_of_nat(survey.subject.hosts, survey.observed, came_in)


@asked_others
def nat(survey: Survey) -> Finding:
    """The kind of router in between."""
    if not survey.helpers:
        return _unknown("nat", survey)
    kind = _nat_of(survey)
    sees = next((helper.sees for helper in survey.helpers if helper.sees), "")
    own = f"{sees} is an address of this machine"
    router = f"a router is in between ({survey.outward or 'this machine'} is seen as {sees})"
    value = {
        Nat.NONE: f"none: {own}",
        Nat.FIREWALL: f"none, but a firewall: {own}, and calls do not arrive",
        Nat.OPEN: f"{router}, and lets calls in: a full cone, or ports are forwarded",
        Nat.RESTRICTED: f"{router}, port restricted: calls do not arrive, but holes can be punched",
        Nat.SYMMETRIC: f"{router}, symmetric: it takes another port for each peer, so holes can "
        "rarely be punched",
        Nat.BEHIND: f"{router}; for its kind another helper is needed: give --peers of another",
        Nat.UNKNOWN: f"not known: {survey.helpers[0].host} is in this network, or on this machine",
    }[kind]
    state, remedy = Severity.OK, ""
    if kind in (Nat.SYMMETRIC, Nat.FIREWALL):
        state, remedy = Severity.WARNING, _let_calls_in(survey, kind)
    elif kind is Nat.UNKNOWN:
        state = Severity.UNKNOWN
        remedy = "ask a peer on the internet: lowcomm-node doctor --peers ADDR"
    seen = [place(address.host, address.port) for address in survey.observed]
    return Finding("nat", state, value, remedy, {"kind": kind.value, "seen": seen})


@asked_others
def outside(survey: Survey) -> Finding:
    """Whether calls arrive."""
    reached, subject = survey.reached, survey.subject
    if not reached:
        refused = next((helper.refused for helper in survey.helpers if helper.refused), "")
        why = f"no peer tried to call this machine: {refused}" if refused else ""
        return _unknown("outside", survey, why)
    yes, no = _ways(reached, True), _ways(reached, False)
    kind = _nat_of(survey)
    state, value, remedy = Severity.WARNING, f"{yes} arrive", ""
    if reached.get(ProbeKind.DIRECT):
        value += f"; {no} do not" if no else ""
        if sees := _not_announced(survey):
            at = place(sees, subject.direct)
            value += f", but others do not know {at}"
            start = f"start the node with {_flags(subject)} --announce {at}"
            remedy = f"{start}, so that others know where to call"
        else:
            state = Severity.OK
    else:
        remedy = _let_calls_in(survey, kind)
        if yes:
            value += f"; {no} do not, so others reach this machine through tunnels, which cost more"
        else:
            value = f"calls do not arrive ({no}); {_way_round(subject, kind)}"
            state = Severity.WARNING if subject.relays else Severity.FAULT
    if not any(helper.is_outside for helper in survey.helpers):
        value += " (tried from within this network only)"
    figures = {way.name.lower(): ok for way, ok in reached.items()}
    return Finding("outside", state, value, remedy, {**figures, "relays": list(subject.relays)})


def _ways(reached: Mapping[ProbeKind, bool], wanted: bool) -> str:
    """The ways in that are reached, or are not, in words."""
    ways = [_WAYS[kind] for kind, ok in reached.items() if ok is wanted]
    return " and ".join(filter(None, (", ".join(ways[:-1]), *ways[-1:])))


def _way_round(subject: Subject, kind: Nat) -> str:
    """How others reach us although no call arrives."""
    if not subject.relays:
        return "no relay has a place for this machine either, so no peer reaches it"
    hole = "" if kind is Nat.SYMMETRIC else ", or by a punched hole"
    relays = " or ".join(relay[-6:] for relay in subject.relays)
    return f"others reach this machine through the relay {relays}{hole}"


def _not_announced(survey: Survey) -> str:
    """The address at which we can be called but that others do not know; empty if none."""
    callers = (helper.sees for helper in survey.helpers if helper.reached.get(ProbeKind.DIRECT))
    sees = next(callers, "")
    hosts = [host_in(address) or "" for address in survey.subject.announced]
    # A name may lead anywhere.
    are_others = all(number_of(host) is not None and host != sees for host in hosts)
    return sees if hosts and are_others else ""


def _let_calls_in(survey: Survey, kind: Nat) -> str:
    """The remedy that lets calls in: ports to forward in a router, or to open in a firewall."""
    subject = survey.subject
    direct, dht_port = subject.direct, subject.dht_port
    if kind in (Nat.NONE, Nat.FIREWALL, Nat.UNKNOWN):
        rules = [f"{direct}/tcp"] if direct is not None else []
        rules += [f"{dht_port}/tcp", f"{dht_port}/udp"] if dht_port is not None else []
        commands = " && ".join(f"ufw allow {rule}" for rule in rules)
        return (
            f"let these ports in, in the firewall of this machine and of its provider (such as "
            f"`{commands}`), and start the node with {_flags(subject)}"
        )
    host = survey.outward or "this machine"
    rules = [f"TCP port {direct} to {host}"] if direct is not None else []
    rules += [f"TCP and UDP port {dht_port} to {host}"] if dht_port is not None else []
    sees = next((helper.sees for helper in survey.helpers if helper.sees), None)
    flags = _flags(subject)
    flags += f" --announce {place(sees, direct)}" if sees and direct is not None else ""
    return f"forward {' and '.join(rules)} in your router, and start the node with {flags}"


def _flags(subject: Subject) -> str:
    flags = {"--port": subject.direct, "--dht-port": subject.dht_port}
    return " ".join(f"{flag} {port}" for flag, port in flags.items() if port is not None)


# this machine


def disk(seen: Observations) -> Finding:
    """Room at the home, which need not exist yet."""
    home = seen.home
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free, checkpoint = shutil.disk_usage(there).free, largest_checkpoint(home)
    figures = {"free": free, "checkpoint": checkpoint}
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = f"make {home} writable for this user, or choose another --home"
        return Finding("disk", Severity.FAULT, f"{home} is not writable", remedy, figures)
    each = f"; a checkpoint has {size(checkpoint)}" if checkpoint else ""
    value = f"{size(free)} free at {home}{each}"
    if free >= max(LITTLE_DISK, 5 * checkpoint):
        return Finding("disk", Severity.OK, value, "", figures)
    state = Severity.FAULT if free < max(TOO_LITTLE_DISK, 2 * checkpoint) else Severity.WARNING
    remedy = f"make room ({value}), lower --keep, or choose another --home"
    return Finding("disk", state, value, remedy, figures)


def largest_checkpoint(home: Path) -> int:
    """Bytes; 0 if there is none."""
    folders = (folder for folder in home.glob("runs/*/checkpoints/*") if folder.is_dir())
    sizes = (sum(file.stat().st_size for file in folder.iterdir()) for folder in folders)
    try:
        return max(sizes, default=0)
    except OSError:  # one is being removed right now
        return 0


def memory(seen: Observations) -> Finding:
    """Memory of this machine, or of its container."""
    total, free = memory_of_machine()
    value = f"{size(free)} free of {size(total)}"
    node = seen.status.trainer.memory if seen.status is not None else None
    figures = {"free": free, "total": total, "node": node and vars(node)}
    if node is not None:
        value += f"; the node takes {size(node.taken)} of {size(node.reckoned)} that it may need"
    if free >= LITTLE_MEMORY:
        return Finding("memory", Severity.OK, value, "", figures)
    state = Severity.FAULT if free < TOO_LITTLE_MEMORY else Severity.WARNING
    remedy = f"end other programs ({value}), or train a smaller model"
    return Finding("memory", state, value, remedy, figures)


def gpu(seen: Observations) -> Finding:
    """Whether an accelerator that is there is used, and what it can do for training."""
    device = seen.status.trainer.device if seen.status is not None else None
    if device not in (None, "cpu"):
        value = f"trains on {device}: nothing is tried beside it"
        return Finding("gpu", Severity.OK, value, "", {"device": device})
    # In a process of its own: torch is large, and a driver may crash or hang.
    command = [sys.executable, "-m", _TRIAL]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_DEADLINE, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        remedy = f"see what `python -m {_TRIAL}` prints, or start the node with --device cpu"
        return Finding("gpu", Severity.WARNING, f"can't be tried ({error})", remedy)
    kind, name, remedy = found["kind"], found["name"], ""
    if kind == "cpu":
        value = "torch sees none: trains on the CPU"
        with suppress(NVMLError):  # no driver of NVIDIA, or no card
            remedy = f"install a build of torch for CUDA to use the {Card().name}"
    else:
        outcomes = (f"{what} {'yes' if can else 'no'}" for what, can in found["tried"].items())
        tried = ", ".join(outcomes).replace("_", " ")
        value = f"{name} ({size(found['free'])} free of {size(found['total'])}); tried: {tried}"
        if kind != "cuda":
            value += f"; its load, temperature and power are unknown; never tried on {kind}"
        if len(several := found["all"]) > 1:
            takes = (f"{one} ({name}, {size(free)} free)" for one, (name, free) in several.items())
            value += f"; --device all takes {', '.join(takes)}"
        if device == "cpu":
            remedy = f"start the node with --device auto: it trains on the CPU beside the {name}"
        elif found["free"] < LITTLE_GPU:
            remedy = f"end what else uses the {name}"
    return Finding("gpu", Severity.WARNING if remedy else Severity.OK, value, remedy, found)


def lenders(seen: Observations) -> Finding | None:
    """Whether machines that lend themselves to this one can be called."""
    if not Paths(seen.home).household.exists():
        return None
    reached, away = list[str](), list[str]()
    for one in Household(seen.home).machines():
        if not one.address:  # it is a head
            continue
        try:
            socket.create_connection(read_address(one.address), LENDER_DEADLINE).close()
            reached.append(f"{one.name} answers at {one.address}")
        except OSError as error:
            away.append(f"{one.name} at {one.address} does not ({error.strerror or error})")
    if not reached and not away:
        return None
    remedy = "run `lowcomm-node lend` there, and see that its port is open to this machine"
    state = Severity.WARNING if away else Severity.OK
    return Finding("lenders", state, "; ".join((*reached, *away)), remedy if away else "")


CHECKS: Sequence[Check]
CHECKS = (node, dht, proxy, clock, nat, outside, udp, routes, disk, memory, gpu, lenders)
"""In the order in which findings are read."""
