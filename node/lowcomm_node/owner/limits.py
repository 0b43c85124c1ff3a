"""What the owner lets this node take of the network: bytes a second each way, and peers at once; while it runs, too.

A change holds at once, for streams that are in progress, too, and is kept in ``config.toml`` of the home for the next start. What
was given to ``join`` as a flag or a variable goes before that file then, as it always does.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from stat import S_IMODE
from typing import Any

import tomlkit

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.settings import CHANGEABLE, NodeSettings
from lowcomm_node.owner.sources import change_settings
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.units import NONE
from lowcomm_node.transport.bandwidth import Bandwidth, BandwidthLimit
from lowcomm_node.transport.guard.peer_limit import PeerLimit


class Allowance:
    """The limits of a running node, and what is used of them."""

    def __init__(self, settings: NodeSettings) -> None:
        self.bandwidth = Bandwidth(BandwidthLimit(settings.max_up), BandwidthLimit(settings.max_down))
        self.peer_limit = PeerLimit(settings.max_peers)

    def change(self, settings: NodeSettings, changes: Mapping[str, Any]) -> NodeSettings:
        """Take other limits, by their names, as their owner writes them; the settings with them.

        Raises ConfigError for a limit that is not known or not valid, or if it can't be kept; nothing is changed then.
        """
        unknown = [name for name in changes if name not in CHANGEABLE]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} can't be changed while the node runs: only {', '.join(CHANGEABLE)}.")
        changed = change_settings(settings, changes)
        written = {name: value if name != "max_peers" else changed.max_peers or NONE for name, value in changes.items()}
        _keep(settings.paths.config, written)
        self.bandwidth.up.allow(changed.max_up)
        self.bandwidth.down.allow(changed.max_down)
        self.peer_limit.allow(changed.max_peers)
        return changed


def _keep(path: Path, changes: Mapping[str, Any]) -> None:
    """Write changes into ``config.toml``; its comments stay."""
    try:
        path = path.resolve()  # it may be a link into its owner's collection of such files
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        tomllib.loads(text)
        document = tomlkit.parse(text)
        document.update(changes)
        mode = S_IMODE(path.stat().st_mode) if path.exists() else 0o600
        write_atomic(path, tomlkit.dumps(document).encode(), mode)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: make it writable, or the limits would not be kept.") from None
