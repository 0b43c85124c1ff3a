"""Shows how the nodes of a demo get on: a panel in a terminal, elsewhere a line now and then."""

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from lowcomm_node.status.model import Status
from lowcomm_node.status.panel import swarm_panel
from lowcomm_node.status.words import swarm_in_words
from lowcomm_node.system.units import seconds

LINE_EVERY = 10.0
"""Seconds between two lines on progress, where there is no terminal."""
WIDTH = 80
"""Columns; what is longer goes on below. Links stay whole."""

Statuses = Sequence[Status | None]
Show = Callable[[Statuses, float], None]
"""Told the statuses of all nodes, and the seconds since the start."""


@contextmanager
def view(title: str, is_shown: bool) -> Iterator[Show]:
    """What shows statuses, if they are to be shown."""
    console = Console(stderr=True)
    if not is_shown:
        yield lambda statuses, elapsed: None
    elif not console.is_terminal:
        yield Lines(title)
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda statuses, elapsed: live.update(
                swarm_panel(title, statuses, elapsed, console.width),
                refresh=True,
            )


class Lines:
    """Plain lines. The first one comes at once, so that nobody takes silence for a failure, and has
    the title."""

    def __init__(self, title: str, every: float = LINE_EVERY) -> None:
        self._title = f"{title}: "
        self._every = every
        self._next = 0.0

    def __call__(self, statuses: Statuses, elapsed: float) -> None:
        """Print where the nodes are if it is time for that."""
        if elapsed >= self._next:
            self._next = elapsed + self._every
            tell(self._title + swarm_in_words(statuses), elapsed)
            self._title = ""


def tell(text: str, elapsed: float) -> None:
    """Print a text with the seconds since the start."""
    lines = textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{seconds(elapsed):>6} ",
        subsequent_indent=7 * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(lines, file=sys.stderr, flush=True)
