"""The owner's limits of the network: bytes a second each way, and peers at once.

They can change while the node runs. A change holds at once, even for open streams, and is kept in
``config.toml`` of the home for the next start, where a flag of ``join`` or a variable overrides it.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from stat import S_IMODE
from typing import Any

import tomlkit

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.bandwidth import Bandwidth, BandwidthLimit
from lowcomm_node.net.limits import PeerLimit
from lowcomm_node.owner.settings import CHANGEABLE, NodeSettings
from lowcomm_node.owner.sources import change_settings
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.units import NONE


class Allowance:
    """The limits of a running node, and their use."""

    def __init__(self, settings: NodeSettings) -> None:
        up, down = BandwidthLimit(settings.max_up), BandwidthLimit(settings.max_down)
        self.bandwidth = Bandwidth(up, down)
        self.peer_limit = PeerLimit(settings.max_peers)

    def change(self, settings: NodeSettings, changes: Mapping[str, Any]) -> NodeSettings:
        """Change limits, written as an owner writes them; returns the settings with them.

        Raises ConfigError for an unknown or invalid limit, or one that can't be kept, and changes
        nothing then.
        """
        if unknown := [name for name in changes if name not in CHANGEABLE]:
            known = ", ".join(CHANGEABLE)
            raise ConfigError(f"{unknown[0]!r} can't be changed while the node runs: only {known}.")
        changed = change_settings(settings, changes)
        written = dict(changes)
        if "max_peers" in written:
            written["max_peers"] = changed.max_peers or NONE
        keep_settings(settings.paths.config, written)
        self.bandwidth.up.allow(changed.max_up)
        self.bandwidth.down.allow(changed.max_down)
        self.peer_limit.allow(changed.max_peers)
        return changed


def keep_settings(path: Path, changes: Mapping[str, Any]) -> None:
    """Write changes into ``config.toml``; its comments stay."""
    try:
        path = path.resolve()  # it may be a link into its owner's collection of such files
        text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        tomllib.loads(text)
        document = tomlkit.parse(text)
        document.update(changes)
        mode = S_IMODE(path.stat().st_mode) if path.exists() else 0o600
        write_atomic(path, tomlkit.dumps(document).encode(), mode)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: make it writable, or what is changed would not be kept."
        ) from None
