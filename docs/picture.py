"""Draws docs/panel.svg, what `lowcomm-node status` shows after half of a demo: `make picture`."""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "panel.svg"
NODES, STEPS = 4, 400
COLUMNS = 92
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
POLL, DEADLINE = 1.0, 500.0
"""Seconds between two looks at the node's status, which no event tells as a whole; and in all."""
PROGRAM = (sys.executable, "-m", "lowcomm_node")


def main() -> None:
    """Train until half of the steps are done, draw the first node's panel, and end the demo."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"--nodes={NODES}", f"--steps={STEPS}", "--text=python", f"--home={folder}")
        demo = subprocess.Popen([*PROGRAM, "demo", *settings])
        try:
            PICTURE.write_text(drawn(_half_way(demo, f"--home={folder}/node-1")), encoding="utf-8")
        finally:
            demo.terminate()
            demo.wait()


def drawn(printed: str) -> str:
    """What a terminal shows for ``printed``, which holds escape sequences, as SVG without remote
    fonts."""
    console = Console(file=io.StringIO(), record=True, width=COLUMNS)
    console.print("[bold]$ lowcomm-node status[/]", highlight=False)
    console.print(Text.from_ansi(printed.rstrip("\n")))
    svg = console.export_svg(title="lowcomm-node", theme=MONOKAI, unique_id="panel")
    local = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return local.replace("Fira Code, monospace", FONTS)


def _half_way(demo: "subprocess.Popen[bytes]", home: str) -> str:
    """The panel at the first look after half of the steps at which the node waits for nothing."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and demo.poll() is None:
        time.sleep(POLL)
        command = [*PROGRAM, "status", "--json", home]
        asked = subprocess.run(command, capture_output=True, check=False)
        status = json.loads(asked.stdout) if asked.returncode == 0 else {}
        if ((status.get("trainer") or {}).get("swarm_step") or 0) >= STEPS // 2:
            panel = _panel(home)
            if re.search(r"training *\u2502$", Text.from_ansi(panel).plain, re.MULTILINE):
                return panel
    raise SystemExit("the demo did not come half-way, or its first node waited at each look")


def _panel(home: str) -> str:
    terminal = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    environment = os.environ | terminal | {"COLUMNS": str(COLUMNS)}
    command = [*PROGRAM, "status", home]
    asked = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return asked.stdout


if __name__ == "__main__":
    main()
