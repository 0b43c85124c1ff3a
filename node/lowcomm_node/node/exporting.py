"""Exports the model for the page: ``checkpoint export`` in a process of its own, as the daemon
holds no tensors."""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from time import strftime
from typing import Any

from lowcomm_node.errors import ConfigError, NodeError, RetryLater
from lowcomm_node.export.choices import Format
from lowcomm_node.status.model import Exported

EXPORT_DEADLINE = 840.0
"""Seconds; whoever asks waits a little longer (web.api.EXPORTING)."""
MAX_TOLD = 64 * 1024


class Exporting:
    """One export at a time, each into a new folder of the home."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._busy = asyncio.Lock()

    async def export(self, fingerprint: str, format_: str) -> Exported:
        """Write the newest model. Raises ConfigError, NodeError, RetryLater."""
        if format_ not in (Format.HF, Format.GGUF):
            raise ConfigError(f"'to' can't be {format_[:80]!r}: choose hf or gguf.")
        if self._busy.locked():
            raise RetryLater("An export is being written already: wait for its end.")
        async with self._busy:
            name = f"{fingerprint[:12]}-{strftime('%Y%m%d-%H%M%S')}-{format_}"
            folder = self._home / "exports" / name
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            told = await self._run(str(folder), "--format", format_, "--run", fingerprint)
            return Exported(
                path=str(folder), step=int(told["step"]), missing=str(told.get("missing", ""))
            )

    async def _run(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "lowcomm_node", "checkpoint", "export", *arguments]
        child = await asyncio.create_subprocess_exec(
            *command,
            "--home",
            str(self._home),
            "--json",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(EXPORT_DEADLINE):
                out, errors = await child.communicate()
        except TimeoutError:
            raise RetryLater(
                f"The export took longer than {EXPORT_DEADLINE:.0f} s: `lowcomm-node checkpoint "
                "export` has no such limit."
            ) from None
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if child.returncode:
            said = errors[-MAX_TOLD:].decode("utf-8", "replace").strip().splitlines()
            last = said[-1] if said else f"exit code {child.returncode}"
            raise NodeError(last.removeprefix("error: "))
        return json.loads(out[-MAX_TOLD:].decode().strip().splitlines()[-1])
