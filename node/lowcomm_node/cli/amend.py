"""``amend``: change a run of ours while it trains."""

import json
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, run_async, show
from lowcomm_node.cli.members import Run
from lowcomm_node.cli.options import setting
from lowcomm_node.errors import ConfigError
from lowcomm_node.system.logs import configure_logs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(amend)


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
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Change a run of ours while it trains: every peer follows from the same swarm step on.

    Example: lowcomm-node amend --set run.steps=20000 --at 12000
    """
    from lowcomm_node.cli.publishing import publish_amendment, with_entry_points
    from lowcomm_node.owner.sources import load_settings
    from lowcomm_node.swarm.created_runs import created_run
    from lowcomm_protocol.spec.amendments import SCHEDULE

    configure_logs(verbose - quiet - 1, json_)
    changes = dict(map(parse_change, set_))
    if at is None and any(name in SCHEDULE for name in changes):
        raise ConfigError(
            "--at is missing: name the swarm step from which the change holds, a minute ahead of "
            "the swarm, so that all peers hear of it before (`lowcomm-node status` shows the step)."
        )
    settings = load_settings({"home": home, "peers": peers}).settings
    identity, signed = created_run(settings.paths, run)
    chain = run_async(
        publish_amendment(with_entry_points(settings, signed), identity, signed, at, changes)
    )
    name, made = f"{signed.spec.run.name}@{signed.fingerprint}", chain.links[-1]
    content = {"run": name, "number": made.number, "at": made.at, "settings": dict(made.settings)}
    show(
        content,
        json_,
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
