"""Traces of exchanges to a collector, by OTLP over HTTP. Headers, such as a token, and certificates
are the exporter's own variables (``OTEL_EXPORTER_OTLP_HEADERS``)."""

import logging
import os
from typing import Any
from urllib.parse import urlsplit

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.tracking.sink import Batch, Kept, Library, Tracked
from lowcomm_node.tracking.spans import Span, spans_of

DEFAULT = "http://localhost:4318"
PATH = "/v1/traces"
MOST = 100
"""Exchanges of one request."""
_NANO = 1_000_000_000


class Collector:
    """See Sink."""

    takes = "exchanges"

    def __init__(self, target: str | None) -> None:
        """``target``: the collector's address, with or without the path of traces."""
        self.target = _endpoint(target)
        library = Library("otel", "opentelemetry-exporter-otlp-proto-http")
        self._trace: Any = library.module("opentelemetry.trace")
        self._sdk: Any = library.module("opentelemetry.sdk.trace")
        self._resources: Any = library.module("opentelemetry.sdk.resources")
        self._scope: Any = library.module("opentelemetry.sdk.util.instrumentation")
        self._exporting: Any = library.module("opentelemetry.sdk.trace.export")
        exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        self._complaints = _Complaints()
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [self._complaints]
        logger.propagate = False
        self._exporter: Any = library.module(exporter).OTLPSpanExporter(endpoint=self.target)
        self._tracked: Tracked | None = None
        self._resource: Any = None

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """See Sink. Whether the collector answers shows with the first spans."""
        self._tracked = tracked
        self._resource = self._resources.Resource(
            {
                "service.name": "lowcomm-node",
                "service.instance.id": tracked.peer_id,
                "lowcomm.node.name": tracked.node,
                "lowcomm.run.id": tracked.run_id,
                "lowcomm.run.name": tracked.run,
            }
        )

    def write(self, batch: Batch) -> Kept:
        """See Sink."""
        assert self._tracked is not None
        for first in range(0, len(batch.exchanges), MOST):
            some = batch.exchanges[first : first + MOST]
            spans = [one for event in some for one in spans_of(event, self._tracked.peer_id)]
            self._export([self._readable(span) for span in spans])
        return {}

    def close(self) -> None:
        """See Sink."""
        self._exporter.shutdown()

    def _export(self, spans: list[Any]) -> None:
        self._complaints.last = ""
        done = self._exporter.export(spans)
        if done is not self._exporting.SpanExportResult.SUCCESS:
            why = self._complaints.last or "no reason was given"
            raise RetryLater(
                f"{self.target} does not take the spans ({why}). Nothing is lost: see that a "
                "collector for OTLP over HTTP listens there."
            )

    def _readable(self, span: Span) -> Any:
        context, trace = self._context(span.trace, span.id), self._trace
        parent = None if span.parent is None else self._context(span.trace, span.parent)
        code = trace.StatusCode.OK if span.error is None else trace.StatusCode.ERROR
        return self._sdk.ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=trace.SpanKind.INTERNAL,
            status=trace.Status(code, span.error),
            start_time=round(span.start * _NANO),
            end_time=round(span.end * _NANO),
            instrumentation_scope=self._scope.InstrumentationScope("lowcomm"),
        )

    def _context(self, trace: int, span: int) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(trace, span, is_remote=False, trace_flags=flags)


class _Complaints(logging.Handler):
    """Keeps what the exporter logs: it tells nobody why it fails."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of it."""
        self.last = " ".join(record.getMessage().split())[:300]


def _endpoint(target: str | None) -> str:
    """Where traces go. Raises ConfigError."""
    exact = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if target is None and exact:
        return exact
    told = target or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT
    parts = urlsplit(told)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--to {told[:120]!r} is no address of a collector: try {DEFAULT}.")
    if parts.username or parts.password:
        raise ConfigError(
            "--to holds a name or a password, which lists of processes show: put it into "
            "OTEL_EXPORTER_OTLP_HEADERS."
        )
    return told if parts.path.strip("/") else told.rstrip("/") + PATH
