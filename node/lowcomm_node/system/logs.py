"""Events, and the log on stderr: coloured ``key=value`` on a terminal, else one JSON object a line.

Events have stable names (``round.merged``); what varies goes into fields. Each room declares its
own events; ``status/events.py`` lists them all.
"""

import logging
import sys
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any, ClassVar, TextIO, dataclass_transform

import structlog
from structlog.typing import Processor


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Event:
    """Base of what a node reports to its log and to listeners, as it happens.

    A subclass with a name becomes a frozen dataclass: its fields are what is reported.
    """

    wire_name: ClassVar[str]

    def __init_subclass__(cls, name: str | None = None) -> None:
        super().__init_subclass__()
        if name is not None:
            dataclass(frozen=True, kw_only=True)(cls)
            cls.wire_name = name

    @property
    def name(self) -> str:
        """Its name in the log and on the wire."""
        return self.wire_name

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All names that events of this kind can have."""
        return (cls.wire_name,)

    def to_json(self) -> dict[str, Any]:
        """The event with its name, as ``join --json`` prints it."""
        assert is_dataclass(self)
        return {"event": self.name, **asdict(self)}


_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.processors.StackInfoRenderer(),
]


_console = partial(
    structlog.dev.ConsoleRenderer,
    timestamp_key="time",
    pad_event_to=24,
    # The other ones print local variables, among them the tokens of requests.
    exception_formatter=structlog.dev.plain_traceback,
)


structlog.configure(processors=[*_SHARED, _console(colors=False)])  # until ``configure_logs``


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks up stderr for every line, because a live panel replaces it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


def configure_logs(verbosity: int = 0, as_json: bool | None = None) -> None:
    """Send all logs to stderr. ``verbosity``: -2 errors, -1 warnings, 0 what happens, 1 and more
    everything.

    ``as_json`` None: JSON unless stderr is a terminal, which gets colours.
    """
    terminal = sys.stderr.isatty()
    level = {-1: logging.WARNING, 0: logging.INFO}.get(
        verbosity, logging.DEBUG if verbosity > 0 else logging.ERROR
    )
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if (not terminal) if as_json is None else as_json:
        last.append(structlog.processors.format_exc_info)
        last.append(structlog.processors.JSONRenderer(default=str))
    else:
        last.append(_console(colors=terminal))
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=last)
    handler = _StderrHandler()
    handler.setFormatter(formatter)
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


log = structlog.stdlib.get_logger()
"""The logger of this program; each line is written as ``configure_logs`` says at that time."""
