"""A collector of traces on loopback: takes OTLP over HTTP, and remembers the spans that came."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span, with the resource that sent it."""

    resource: dict[str, Any]
    span: Any

    @property
    def trace(self) -> str:
        """Its trace, as hexadecimal digits."""
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        """Its attributes by name."""
        return _plain(self.span.attributes)


class Collector(ThreadingHTTPServer):
    """Answers as a real one does; what it takes is in ``spans``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = 200
        """Status of its answers; nothing is taken with another one."""
        self.spans: list[Received] = []

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        request = ExportTraceServiceRequest.FromString(data)
        assert self.path == "/v1/traces"
        if self.server.answer == 200:
            self.server.spans += [
                Received(_plain(group.resource.attributes), span)
                for group in request.resource_spans
                for scope in group.scope_spans
                for span in scope.spans
            ]
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens, until the end of the context."""
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
