"""``invite``, ``remove``, ``amend``: change a run that was created in this home."""

import json
import secrets
import time
from contextlib import suppress
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, command, seconds_of, setting
from lowcomm_node.errors import ConfigError
from lowcomm_node.system.app import run_async

_MAX_DAYS = 3660
_TEXTS = ("run.description", "run.admission", "train.schedule")
Run = Annotated[
    str | None,
    typer.Option("--run", help="NAME or NAME@FINGERPRINT; default: the only run created here."),
]
Peers = Annotated[
    list[str] | None,
    setting("peers", "Address of the swarm; default: the node of this home, or its settings."),
]


@command()
def invite(
    here: Here,
    uses: Annotated[int, typer.Option(min=1, max=1024)] = 1,
    expires: str = "30d",
    for_: Annotated[str | None, typer.Option("--for")] = None,
    run: Run = None,
) -> None:
    """Make an invite to a run you created with admission = "invite". Needs no network.

    Example: lowcomm-node invite --uses 5 --expires 8w

    Args:
        uses: How many peers may use it.
        expires: How long the invite and those who used it may take part: 12h, 7d, 8w.
        for_: The only peer id that may use it.
    """
    from lowcomm_node.storage.files import read_small
    from lowcomm_node.storage.paths import Paths
    from lowcomm_node.swarm.find_run import created_run, name_of
    from lowcomm_protocol.identity import KEY_BYTES
    from lowcomm_protocol.peers.invites import issue_invite
    from lowcomm_protocol.spec.amendments import MAX_CHAIN_BYTES, newest

    seconds = seconds_of(expires, "--expires: ")
    if seconds > _MAX_DAYS * 86_400:
        raise ConfigError(f"--expires {expires}: at most {_MAX_DAYS}d.")
    peer_id = _check_peer_id(for_) if for_ is not None else ""
    if peer_id and uses != 1:
        raise ConfigError(
            f"--uses {uses} and --for: one peer uses an invite once. Leave out one of the two."
        )
    paths = Paths(here.folder)
    identity, signed = created_run(paths, run)
    name = name_of(signed)
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
    made, text = token.invite, token.text()
    content = {
        "invite": text, "invite_id": made.invite_id, "run": name, "uses": made.uses,
        "expires": made.expires, "peer_id": peer_id or None,
    }  # fmt: skip
    several = f"for {made.uses} peers, known or unknown" if made.uses > 1 else "for one peer"
    guests = f"for {peer_id}" if peer_id else several
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.expires))
    here.show(
        content,
        f"{text}\n\n"
        f"an invite to {name} {guests}; those who come by it are out on {until}. Send it over a "
        "private channel:\n"
        "anybody who has it can use it. They join with\n"
        "  LOWCOMM_INVITE=invite... lowcomm-node join --peers ADDR\n"
        "take it back, and all who came by it, with\n"
        f"  lowcomm-node remove {made.invite_id}",
    )


@command()
def remove(
    here: Here,
    who: list[str],
    undo: Annotated[bool, typer.Option("--undo")] = False,
    peers: Peers = None,
    run: Run = None,
) -> None:
    """Remove peers or invites from a run you created: all its peers know within a minute.

    Example: lowcomm-node remove 12D3KooW... --peers ADDRESS

    Args:
        who: Peer ids, ids of invites, or invites.
        undo: Let them take part again.
    """
    from lowcomm_node.cli.creator import publish_removals, with_entry_points
    from lowcomm_node.swarm.find_run import created_run, name_of

    here.log()
    names = frozenset(map(_id_of, who))
    settings = here.settings(peers=peers)
    identity, signed = created_run(settings.paths, run)
    settings = with_entry_points(settings, signed)
    removals = run_async(publish_removals(settings, identity, signed, names, undo))
    name = name_of(signed)
    here.show(
        {"run": name, "version": removals.version, "removed": sorted(removals.ids)},
        f"{'let in again' if undo else 'removed'}: {', '.join(sorted(names))}\n"
        f"{name} has {len(removals.ids)} removed peers and invites; all know within a minute",
    )


@command()
def amend(
    here: Here,
    set_: Annotated[list[str], typer.Option("--set")],
    at: Annotated[int | None, typer.Option("--at", min=0)] = None,
    peers: Peers = None,
    run: Run = None,
) -> None:
    """Change a run you created while it trains: every peer follows from the same swarm step on.

    Example: lowcomm-node amend --set run.steps=20000 --at 12000

    Args:
        set_: SETTING=VALUE; may be repeated: run.steps, train.learning_rate,
            train.final_learning_rate, train.warmup, train.schedule, train.decay, data.shares (of
            all packed texts, such as 0.3,0.7), run.description, run.admission, run.members.
        at: First swarm step with the change; default for run.description, run.admission and
            run.members: at once.
    """
    from lowcomm_node.cli.creator import publish_amendment, with_entry_points
    from lowcomm_node.swarm.find_run import created_run, name_of
    from lowcomm_protocol.spec.amendments import SCHEDULE

    here.log()
    changes = dict(map(_parse_change, set_))
    if at is None and any(name in SCHEDULE for name in changes):
        raise ConfigError(
            "--at is missing: name the swarm step from which the change holds, a minute ahead of "
            "the swarm, so that all peers hear of it before (`lowcomm-node status` shows the step)."
        )
    settings = here.settings(peers=peers)
    identity, signed = created_run(settings.paths, run)
    settings = with_entry_points(settings, signed)
    chain = run_async(publish_amendment(settings, identity, signed, at, changes))
    name, made = name_of(signed), chain.links[-1]
    here.show(
        {"run": name, "number": made.number, "at": made.at, "settings": dict(made.settings)},
        f"{name}: {made}\nall peers know within a minute; `lowcomm-node status` shows what is in "
        "force",
    )


def _parse_change(text: str) -> tuple[str, Any]:
    """Read SETTING=VALUE. Raises ConfigError."""
    from lowcomm_protocol.spec.amendments import AMENDABLE
    from lowcomm_protocol.spec.run import SHARES

    name, equals, value = text.partition("=")
    if not equals or not (name := name.strip()):
        reason = "expected SETTING=VALUE, such as run.steps=20000"
    elif name not in AMENDABLE:
        reason = f"this can't be changed while a run trains; these can: {', '.join(AMENDABLE)}"
    elif name == "run.members":
        return name, [member.strip() for member in value.split(",") if member.strip()]
    elif name in _TEXTS:
        return name, value.strip('"')
    else:
        with suppress(ValueError):
            return name, json.loads(f"[{value.strip('[]')}]" if name == SHARES else value)
        reason = f"{value[:40]!r} is no number"
    raise ConfigError(f"--set {text[:80]}: {reason}.")


def _id_of(text: str) -> str:
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
