"""Logs on stderr: coloured ``key=value`` on a terminal, one JSON object per line for machines.

Events have stable names (``round.merged``); what varies goes into fields.
"""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.processors.StackInfoRenderer(),
]


def _renderer(colors: bool) -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(
        colors=colors,
        timestamp_key="time",
        pad_event_to=24,
        # The other ones print local variables, among them the tokens of requests.
        exception_formatter=structlog.dev.plain_traceback,
    )


structlog.configure(processors=[*_SHARED, _renderer(colors=False)])  # until ``configure_logs``


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks up stderr for every line, because a live panel replaces it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The current stderr."""
        return sys.stderr


def configure_logs(
    verbosity: int = 0, as_json: bool | None = None, colors: bool | None = None
) -> None:
    """Send all logs to stderr. ``verbosity``: -2 errors, -1 warnings, 0 what happens, 1 and more
    everything.

    ``as_json`` and ``colors`` None: JSON unless stderr is a terminal, colours if it is one.
    """
    terminal = sys.stderr.isatty()
    as_json = not terminal if as_json is None else as_json
    in_color = terminal if colors is None else colors
    level = {-1: logging.WARNING, 0: logging.INFO}.get(
        verbosity, logging.DEBUG if verbosity > 0 else logging.ERROR
    )
    handler = _StderrHandler()
    handler.setFormatter(_formatter(as_json, in_color))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries talk at INFO about what only their authors need.
    root.setLevel(logging.DEBUG if verbosity > 1 else max(level, logging.WARNING))
    logging.getLogger("lowcomm").setLevel(level)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=lambda *_: logging.getLogger("lowcomm"),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _formatter(as_json: bool, colors: bool) -> logging.Formatter:
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        last += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        last.append(_renderer(colors))
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=last)


log = structlog.stdlib.get_logger()
"""The logger of this program; takes effect as ``configure_logs`` has it at the time of each
line."""
