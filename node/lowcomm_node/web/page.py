"""The page of a node: files that hold nothing of it. Its script asks the API for all that it
shows."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": "index.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/api.js": "api.js",
    "/around.js": "around.js",
    "/charts.js": "charts.js",
    "/formatting.js": "formatting.js",
    "/tables.js": "tables.js",
    "/timeline.js": "timeline.js",
    "/uplot.css": "uplot/uplot.css",
    "/uplot.js": "uplot/uplot.js",
}
HEADERS = {
    # Nothing of another host is loaded or told, and no other page can show this one in a frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The routes of all its files."""
    return [Route(path, _serve(FOLDER / name)) for path, name in FILES.items()]


def _serve(file: Path):  # noqa: ANN202 - starlette's own kind of function
    async def serve(request: Request) -> Response:
        return FileResponse(file, headers=HEADERS)

    return serve
