"""``id``, ``paths``, ``config``: what is in this home."""

from contextlib import suppress

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, show
from lowcomm_node.errors import NodeError
from lowcomm_node.owner.sources import find_home


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("id")(show_id)
    app.command()(paths)
    app.command()(config)


def show_id(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Show the peer id of this node, which is its public key. The first call makes it.

    While the node runs, also show its addresses: others can give them to --peers.
    """
    from lowcomm_node.control.client import ControlClient
    from lowcomm_node.storage.files import load_or_create_identity
    from lowcomm_node.storage.paths import Paths

    folder = Paths(find_home(home))
    peer_id = load_or_create_identity(folder.identity).peer_id
    addresses: list[str] = []
    with suppress(NodeError), ControlClient(folder.home) as client:
        addresses = list(client.status().entry_points)
    found = {"peer_id": peer_id, "key": str(folder.identity), "addresses": addresses}
    show(found, json_, "\n".join([peer_id, *(f"  {address}" for address in addresses)]))


def paths(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Show where the files of this node lie."""
    from lowcomm_node.storage.paths import Paths

    folder = Paths(find_home(home))
    names = ("home", "identity", "config", "control", "lock", "runs", "data")
    found = {name: str(getattr(folder, name)) for name in names}
    show(found, json_, "\n".join(f"{name:<9}{path}" for name, path in found.items()))


def config(home: Home = None, json_: Json = False, quiet: Quiet = 0, verbose: Verbose = 0) -> None:
    """Show every setting, its value, and where it was set."""
    loaded = read_settings({"home": home})
    values = loaded.settings.model_dump(mode="json")
    content = {
        key: {"value": value, "source": loaded.sources[key]} for key, value in values.items()
    }
    lines = [f"{key:<18}{entry['value']!s:<24} {entry['source']}" for key, entry in content.items()]
    show(content, json_, "\n".join(lines))
