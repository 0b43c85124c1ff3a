"""The page of a node: files that hold nothing of it. Its script asks the API for all that it
shows."""

from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    # Nothing of another host is loaded, and no other page can show this one in a frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """Files with the headers of a page."""

    def file_response(self, *given: Any, **named: Any) -> Response:
        """Answer with a file."""
        response = super().file_response(*given, **named)
        response.headers.update(HEADERS)
        return response


PAGE = Mount("/", PageFiles(directory=FOLDER, html=True))
