"""Findings on this machine: how its TCP sends, disk, memory, GPU. No I/O."""

from lowcomm_node.doctor import advice
from lowcomm_node.doctor.case import Case
from lowcomm_node.doctor.findings import Finding, State
from lowcomm_node.system.formatting import size
from lowcomm_node.transport.congestion import BBR, LOSSY

LITTLE_DISK, TOO_LITTLE_DISK = 2e9, 2e8
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 1e9, 256e6
LITTLE_GPU = 1e9


def judge_resources(case: Case) -> list[Finding]:
    """All of them."""
    return [look(case) for look in (_congestion, _disk, _memory, _gpu)]


def _congestion(case: Case) -> Finding:
    tcp = case.machine.tcp
    if not tcp.congestion:
        return Finding(name="congestion", state=State.UNKNOWN, value="this system does not tell")
    resent = f"; {100 * tcp.resent:.2f} % of segments were sent again" if tcp.resent is not None else ""
    loses = tcp.congestion != BBR and tcp.resent is not None and tcp.resent > LOSSY
    bad = loses and BBR not in tcp.allowed
    helped = "; a node's connections that lose go on with bbr" if loses and not bad else ""
    return Finding(
        name="congestion",
        state=State.WARNING if bad else State.OK,
        value=f"TCP uses {tcp.congestion}{resent}{helped}",
        remedy=advice.use_bbr(tcp.congestion) if bad else "",
        figures={"tcp": tcp.congestion, "allowed": list(tcp.allowed), "resent": tcp.resent},
    )


def _disk(case: Case) -> Finding:
    disk = case.machine.disk
    figures = {"free": disk.free, "checkpoint": disk.checkpoint}
    if not disk.writable:
        remedy = f"make {case.home} writable for this user, or choose another --home"
        return Finding(
            name="disk", state=State.FAULT, value=f"{case.home} is not writable", remedy=remedy, figures=figures
        )
    state = _amount(disk.free, max(LITTLE_DISK, 5 * disk.checkpoint), max(TOO_LITTLE_DISK, 2 * disk.checkpoint))
    each = f"; a checkpoint has {size(disk.checkpoint)}" if disk.checkpoint else ""
    remedy = f"make room at {case.home} ({size(disk.free)} are free{each}), lower --keep, or choose another --home"
    value = f"{size(disk.free)} free at {case.home}{each}"
    return Finding(
        name="disk", state=state, value=value, remedy=remedy if state is not State.OK else "", figures=figures
    )


def _memory(case: Case) -> Finding:
    memory = case.machine.memory
    state = _amount(memory.free, LITTLE_MEMORY, TOO_LITTLE_MEMORY)
    value = f"{size(memory.free)} free of {size(memory.total)}"
    remedy = f"end other programs ({value}), or train a smaller model" if state is not State.OK else ""
    figures = {"free": memory.free, "total": memory.total}
    return Finding(name="memory", state=state, value=value, remedy=remedy, figures=figures)


def _gpu(case: Case) -> Finding:
    gpus = case.machine.gpus
    figures = {"gpus": [{"name": gpu.name, "total": gpu.total, "free": gpu.free} for gpu in gpus]}
    if not gpus:
        return Finding(
            name="gpu", state=State.OK, value="none that a driver tells of: trains on the CPU", figures=figures
        )
    value = ", ".join(f"{gpu.name} ({size(gpu.free)} free of {size(gpu.total)})" for gpu in gpus)
    device = case.status["trainer"]["device"] if case.status is not None else None
    remedy = ""
    if not case.machine.torch_sees_gpus:
        remedy = f"install a build of torch for CUDA to use the {gpus[0].name}: this one is for the CPU alone"
    elif device == "cpu":
        remedy = f"start the node with --device cuda: it trains on the CPU beside the {gpus[0].name}"
    elif device is None and max(gpu.free for gpu in gpus) < LITTLE_GPU:
        remedy = f"end what else uses the {gpus[0].name}: `nvidia-smi` shows it"
    return Finding(name="gpu", state=State.WARNING if remedy else State.OK, value=value, remedy=remedy, figures=figures)


def _amount(free: float, little: float, too_little: float) -> State:
    return State.FAULT if free < too_little else State.WARNING if free < little else State.OK
