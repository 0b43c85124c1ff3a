"""A stand-in for the Hugging Face Hub on loopback: it takes one upload, and remembers what came."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """Answers as the real one does what `upload_folder` asks."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        """By path, once they are committed."""
        self.objects: dict[str, bytes] = {}
        """Large files, by SHA-256."""

    @property
    def address(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, lines: bytes) -> None:
        """Take in what a commit lists."""
        for line in lines.splitlines():
            told = json.loads(line)
            value = told["value"]
            if told["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif told["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._answer({}, 401 if self.path.startswith("/api/models") else 200)

    def do_PUT(self) -> None:
        data = self._body()
        self.server.objects[sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self) -> None:
        data, path, hub = self._body(), self.path, self.server
        if self.headers.get("authorization") != f"Bearer {hub.token}":
            self._answer({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            hub.created = json.loads(data)
            self._answer({"url": f"{hub.address}/alice/tea"})
        elif "/preupload/" in path:
            self._answer({"files": [_mode(one["path"]) for one in json.loads(data)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer({"objects": [self._large(one) for one in json.loads(data)["objects"]]})
        elif "/commit/" in path:
            hub.commit(data)
            url = f"{hub.address}/alice/tea/commit/{COMMIT}"
            self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self._answer({})

    def _large(self, one: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.server.address}/put/{one['oid']}", "header": {}}
        return {**one, "authenticated": True, "actions": {"upload": upload}}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _answer(self, content: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith((".safetensors", ".gguf")) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def hub(token: str) -> Iterator[Hub]:
    """One that listens, until the end of the context."""
    server = Hub(token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
