"""``invite``, ``remove``, ``amend``: change a run that was created in this home."""

import json
import re
import secrets
import time
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, command, run_async, setting
from lowcomm_node.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_DURATION = re.compile(r"([1-9]\d{0,8})([smhdw])")

_MAX_DAYS = 3660

Run = Annotated[
    str | None,
    typer.Option("--run", help="NAME or NAME@FINGERPRINT; default: the only run created here."),
]


@command()
def invite(
    uses: Annotated[int, typer.Option(help="How many peers may use it.", min=1, max=1024)] = 1,
    expires: Annotated[
        str,
        typer.Option(help="How long the invite and those who used it may take part: 12h, 7d, 8w."),
    ] = "30d",
    for_: Annotated[
        str | None, typer.Option("--for", help="The only peer id that may use it.")
    ] = None,
    run: Run = None,
    *,
    here: Here,
) -> None:
    """Make an invite to a run of ours with admission = "invite". Needs no network.

    Example: lowcomm-node invite --uses 5 --expires 8w
    """
    from lowcomm_node.storage.files import read_small
    from lowcomm_node.storage.paths import Paths
    from lowcomm_node.swarm.find_run import created_run
    from lowcomm_protocol.identity import KEY_BYTES
    from lowcomm_protocol.peers.invites import issue_invite
    from lowcomm_protocol.spec.amendments import MAX_CHAIN_BYTES, newest

    seconds = parse_duration(expires)
    peer_id = _check_peer_id(for_) if for_ is not None else ""
    if peer_id and uses != 1:
        raise ConfigError(
            f"--uses {uses} and --for: one peer uses an invite once. Leave out one of the two."
        )
    paths = Paths(here.folder)
    identity, signed = created_run(paths, run)
    name = f"{signed.spec.run.name}@{signed.fingerprint}"
    kept = read_small(paths.amendments(signed.fingerprint), MAX_CHAIN_BYTES)
    admission = newest(signed.spec, signed.run_id, [kept]).last.run.admission
    if admission != "invite":
        raise ConfigError(
            f'{name} has admission = "{admission}" and takes no invites: create a run with [run] '
            'admission = "invite", or change this one with `lowcomm-node amend --set '
            "run.admission=invite`."
        )
    secret = secrets.token_bytes(KEY_BYTES)
    token = issue_invite(identity, signed.run_id, secret, time.time() + seconds, uses, peer_id)
    made = token.invite
    content = {
        "invite": token.text(),
        "invite_id": made.invite_id,
        "run": name,
        "uses": made.uses,
        "expires": made.expires,
        "peer_id": peer_id or None,
    }
    several = f"for {made.uses} peers, whoever they are" if made.uses > 1 else "for one peer"
    whom = f"for {peer_id}" if peer_id else several
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.expires))
    lines = [
        token.text(),
        "",
        f"an invite to {name} {whom}; those who come by it are out on {until}. Send it over a "
        "private channel:",
        "whoever has it can use it. They join with",
        "  LOWCOMM_INVITE=invite... lowcomm-node join --peers ADDR",
        "take it back, and all who came by it, with",
        f"  lowcomm-node remove {made.invite_id}",
    ]
    here.show(content, "\n".join(lines))


@command()
def remove(
    who: Annotated[list[str], typer.Argument(help="Peer ids, ids of invites, or invites.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let them take part again.")] = False,
    peers: Annotated[
        list[str] | None,
        setting("peers", "Address of the swarm; default: the node of this home, or its settings."),
    ] = None,
    run: Run = None,
    *,
    here: Here,
) -> None:
    """Remove peers or invites from a run of ours: all its peers know within a minute.

    Example: lowcomm-node remove 12D3KooW... --peers ADDRESS
    """
    from lowcomm_node.cli.publishing import publish_removals, with_entry_points
    from lowcomm_node.swarm.find_run import created_run

    here.log()
    names = frozenset(_name_of(text) for text in who)
    settings = here.settings(peers=peers)
    identity, signed = created_run(settings.paths, run)
    removals = run_async(
        publish_removals(with_entry_points(settings, signed), identity, signed, names, undo)
    )
    name = f"{signed.spec.run.name}@{signed.fingerprint}"
    content = {"run": name, "version": removals.version, "removed": sorted(removals.ids)}
    told = f"{'let in again' if undo else 'removed'}: {', '.join(sorted(names))}"
    here.show(
        content,
        f"{told}\n{name} has {len(removals.ids)} removed peers and invites; all know within a "
        "minute",
    )


@command()
def amend(
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="SETTING=VALUE; may be repeated: run.steps, train.learning_rate, "
            "train.final_learning_rate, train.warmup, train.schedule, train.decay, "
            "run.description, run.admission, run.members.",
        ),
    ],
    at: Annotated[
        int | None,
        typer.Option(
            "--at",
            help="First swarm step with the change; default for run.description, run.admission and "
            "run.members: at once.",
            min=0,
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        setting("peers", "Address of the swarm; default: the node of this home, or its settings."),
    ] = None,
    run: Run = None,
    *,
    here: Here,
) -> None:
    """Change a run of ours while it trains: every peer follows from the same swarm step on.

    Example: lowcomm-node amend --set run.steps=20000 --at 12000
    """
    from lowcomm_node.cli.publishing import publish_amendment, with_entry_points
    from lowcomm_node.swarm.find_run import created_run
    from lowcomm_protocol.spec.amendments import SCHEDULE

    here.log()
    changes = dict(map(parse_change, set_))
    if at is None and any(name in SCHEDULE for name in changes):
        raise ConfigError(
            "--at is missing: name the swarm step from which the change holds, a minute ahead of "
            "the swarm, so that all peers hear of it before (`lowcomm-node status` shows the step)."
        )
    settings = here.settings(peers=peers)
    identity, signed = created_run(settings.paths, run)
    chain = run_async(
        publish_amendment(with_entry_points(settings, signed), identity, signed, at, changes)
    )
    name, made = f"{signed.spec.run.name}@{signed.fingerprint}", chain.links[-1]
    content = {"run": name, "number": made.number, "at": made.at, "settings": dict(made.settings)}
    here.show(
        content,
        f"{name}: {made}\nall peers know within a minute; `lowcomm-node status` shows what is in "
        "force",
    )


def parse_change(text: str) -> tuple[str, Any]:
    """Read SETTING=VALUE. Raises ConfigError."""
    from lowcomm_protocol.spec.amendments import AMENDABLE

    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"--set {text[:80]}: expected SETTING=VALUE, such as run.steps=20000.")
    if name not in AMENDABLE:
        raise ConfigError(
            f"--set {text[:80]}: this can't be changed while a run trains; these can: "
            f"{', '.join(AMENDABLE)}."
        )
    if name == "run.members":
        return name, [member.strip() for member in value.split(",") if member.strip()]
    if name in ("run.description", "run.admission"):
        return name, value
    try:
        return name, json.loads(value)
    except ValueError:
        raise ConfigError(f"--set {text[:80]}: {value[:40]!r} is no number.") from None


def parse_duration(text: str) -> int:
    """Seconds of ``90s``, ``12h``, ``7d``, ``8w``. Raises ConfigError."""
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_DAYS * 86_400:
        raise ConfigError(
            f"--expires {text[:40]}: expected a time such as 12h, 7d or 8w, at most {_MAX_DAYS}d."
        )
    return seconds


def _name_of(text: str) -> str:
    """The peer id, or the id of an invite, that the creator means. Raises ConfigError."""
    from lowcomm_protocol.errors import AdmissionError
    from lowcomm_protocol.peers.invites import read_token

    try:
        return read_token(text).invite.invite_id
    except AdmissionError:
        return _check_peer_id(text)


def _check_peer_id(text: str) -> str:
    from lowcomm_protocol.errors import SignatureError
    from lowcomm_protocol.identity import public_key_of

    try:
        public_key_of(text)
    except SignatureError:
        raise ConfigError(
            f"{text[:64]!r} is not a peer id such as 12D3KooW..., as `lowcomm-node id` and `peers` "
            "show it."
        ) from None
    return text
