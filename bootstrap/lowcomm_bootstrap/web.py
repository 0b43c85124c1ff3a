"""The swarm's page: public, read only.

ObservedSwarm   a run that this server keeps, and the last records of its peers
Series          its figures over time, kept over restarts
SwarmPage       everything is made once after each look at the swarm, and kept as the bytes that are
                sent: a viewer costs no lookup, no rendering and no compression, so their number is
                bounded by the line alone

Nothing here is a fact but what creators and peers have signed: a peer can claim any number of
tokens. So each figure says of how many peers it is, and a peer counts as *proved* only if it has
answered or stored its record here itself.

A series has a bounded number of points: once it is full, every second one goes, and points come
half as often. So it always spans the whole life of a run.
"""

import gzip
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median_low
from time import time
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lowcomm_bootstrap.server import GONE, read_info
from lowcomm_node.errors import NodeError
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.logs import log
from lowcomm_node.web.http import FOLDER as NODE_PAGE
from lowcomm_node.web.http import HEADERS, Listening, bind
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.spec.run import SignedRun

# what peers say

MOST_PEERS = 1024
"""Peers of one run on the page. Records beyond them are not read, proved peers first: a flood of
identities neither holds the server up nor takes honest peers off the page."""
MOST_SHOWN = 100
"""Peers on the leaderboard, and releases."""
MOST_SAMPLES = 3
RATE_SECONDS = 300.0
"""Window, in seconds, for exchanges a minute."""
MODEL = ("kind", "type", "layers", "width", "heads", "context", "vocab")
"""Settings of a model that people compare first."""


@dataclass
class ObservedSwarm:
    """One run, and the last records of its peers."""

    run: SignedRun
    peers: dict[str, PeerInfo] = field(default_factory=dict)
    proved: Set[str] = frozenset()
    about: int = 0
    """About how many peers there are, where ``peers`` is a sample; 0: it has all."""
    _records: dict[str, bytes] = field(default_factory=dict)
    _exchanges: deque[tuple[float, int]] = field(default_factory=deque)
    """Times at which peers reported more exchanges, and how many more."""
    _since: float | None = None

    def saw(
        self, records: Mapping[str, bytes], proved: Set[str], now: float, about: int = 0
    ) -> None:
        """Take in the records of its peers at a Unix time; ``about``: how many peers there are,
        where these are a sample."""
        self.about = about
        peers: dict[str, PeerInfo] = {}
        more = 0
        for peer in sorted(records, key=lambda peer: peer not in proved)[:MOST_PEERS]:
            before, record = self.peers.get(peer), records[peer]
            # A signature costs more than all the rest, and most records are those of the last look.
            is_known = self._records.get(peer) == record
            info = before if is_known else read_info(record, now)
            if info is not None and info.expires > now and info.phase not in GONE:
                peers[peer] = info
                if before is not None:  # a peer that started again counts from 0
                    more += max(0, info.report.exchanges - before.report.exchanges)
        self._since = now if self._since is None else self._since
        if more:
            self._exchanges.append((now, more))
        while self._exchanges and self._exchanges[0][0] < now - RATE_SECONDS:
            self._exchanges.popleft()
        self.peers, self._records = peers, {peer: records[peer] for peer in peers}
        self.proved = frozenset(proved) & set(peers)

    def view(self, now: float, address: str) -> dict[str, Any]:
        """Figures for people; ``address``: entry point of nodes."""
        spec, peers = self.run.spec, list(self.peers.values())
        training = [peer for peer in peers if peer.phase is Phase.TRAINING]
        losses = [peer.report.held_out_loss for peer in peers if peer.report.held_out_loss > 0]
        releases = Counter(peer.report.release or "unknown" for peer in peers)
        leaders = sorted(peers, key=lambda peer: (-peer.report.tokens, peer.peer_id))[:MOST_SHOWN]
        model = spec.model.model_dump()
        name = f"{spec.run.name}@{self.run.fingerprint}"
        step = median_low([peer.swarm_step for peer in training] or [0])
        rates = [peer.tokens_per_second for peer in training if peer.tokens_per_second > 0]
        written = [peer for peer in leaders if peer.report.sample]
        # A proved peer first: anybody can sign any words.
        written.sort(key=lambda peer: (peer.peer_id not in self.proved, -peer.report.sample_step))
        left, scale = None, max(1.0, self.about / max(1, len(peers)))
        # Applied, as their peers tell; an exchange of two counts at both.
        seconds = min(RATE_SECONDS, now - (now if self._since is None else self._since))
        applied = sum(count for _, count in self._exchanges)
        if rates:
            left = max(0, spec.run.steps - step) * spec.tokens_per_step / median_low(rates)
        return {
            "run": name,
            "description": spec.run.description,
            "creator": self.run.creator,
            "admission": spec.run.admission,
            "method": spec.sync.method,
            "model": {key: model[key] for key in MODEL if model.get(key) is not None},
            "parameters": getattr(spec.model, "parameters", None),
            "steps": spec.run.steps,
            "swarm_step": step,
            "seconds_left": left,
            "peers": round(scale * len(peers)),
            "sampled": len(peers) if self.about else 0,
            "proved": len(self.proved),
            "training": round(scale * len(training)),
            "tokens": round(scale * sum(peer.report.tokens for peer in peers)),
            "tokens_per_second": scale * sum(peer.tokens_per_second for peer in training),
            "held_out_loss": median_low(losses) if losses else None,
            "held_out_loss_of": len(losses),
            "exchanges_per_minute": scale * 60 * applied / seconds if seconds else 0.0,
            "samples": [
                {
                    "peer": peer.peer_id,
                    "name": peer.report.name,
                    "step": peer.report.sample_step,
                    "text": peer.report.sample,
                }
                for peer in written[:MOST_SAMPLES]
            ],
            "releases": dict(releases.most_common(MOST_SHOWN)),
            "leaders": [
                {
                    "peer": peer.peer_id,
                    "name": peer.report.name,
                    "tokens": peer.report.tokens,
                    "tokens_per_second": peer.tokens_per_second,
                    "exchanges": peer.report.exchanges,
                    "phase": peer.phase.value,
                    "proved": peer.peer_id in self.proved,
                }
                for peer in leaders
            ],
            "join": f"lowcomm-node join --peers {address} --run {name}" if address else None,
        }


# over time

MOST_POINTS = 480
FIRST_SPACING = 30.0
"""Seconds between two points of a young run."""
MOST_BYTES = 16 * 1024**2
FIGURES = ("time", "peers", "tokens", "tokens_per_second", "held_out_loss", "exchanges_per_minute")
"""Figures of a point, in this order."""
Point = Annotated[list[FiniteFloat | None], Field(min_length=len(FIGURES), max_length=len(FIGURES))]


class Series(BaseModel):
    """The points of one run."""

    points: list[Point] = []
    spacing: Annotated[FiniteFloat, Field(ge=FIRST_SPACING)] = FIRST_SPACING

    def add(self, view: dict[str, Any], now: float) -> None:
        """Make a point of the view at a Unix time, if it is time for one."""
        if self.points and now - (self.points[-1][0] or 0.0) < self.spacing:
            return
        self.points.append([now, *(view[name] for name in FIGURES[1:])])
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]
            self.spacing *= 2


class _History(BaseModel):
    figures: list[str]
    runs: dict[str, Series]


def read_series(path: Path) -> dict[str, Series]:
    """Read the series of all runs, by run id; a file that can't be read is set aside."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        history = _History.model_validate_json(path.read_bytes())
        if history.figures != list(FIGURES):
            raise ValueError(f"other figures than {FIGURES}")
        return history.runs
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        path.replace(path.with_suffix(".damaged"))
        log.warning("web.history", reason=f"{path.name} could not be read, was set aside")
    return {}


# a badge

LETTER = 6.5
"""Width of a letter, about: nobody measures the reader's font."""


def badge(view: dict[str, Any]) -> str:
    """An SVG that tells how many peers a run has, and how far it is."""
    name, _, _ = view["run"].partition("@")
    done = f"{min(1.0, view['swarm_step'] / view['steps']):.0%}"
    peers = view["peers"]
    right = f"{peers} peer{'' if peers == 1 else 's'}, {done}"
    left_width, right_width = (round(LETTER * len(text)) + 12 for text in (name, right))
    width = left_width + right_width
    colour = "#1d6b3a" if view["training"] else "#566068"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" '
        f'aria-label="{escape(name)}: {escape(right)}">'
        f'<rect width="{left_width}" height="20" fill="#1c2226"/>'
        f'<rect x="{left_width}" width="{right_width}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left_width / 2}" y="14">{escape(name)}</text>'
        f'<text x="{left_width + right_width / 2}" y="14">{escape(right)}</text></g></svg>'
    )


# the page

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": (PAGE / "index.html", "text/html; charset=utf-8"),
    "/swarm.css": (PAGE / "swarm.css", "text/css"),
    "/swarm.js": (PAGE / "swarm.js", "text/javascript"),
    "/page.css": (NODE_PAGE / "page.css", "text/css"),
    **{
        f"/{name}.js": (NODE_PAGE / f"{name}.js", "text/javascript")
        for name in ("around", "formatting", "timeline")
    },
    "/uplot.css": (NODE_PAGE / "uplot" / "uplot.css", "text/css"),
    "/uplot.js": (NODE_PAGE / "uplot" / "uplot.js", "text/javascript"),
}
JSON = "/api/v1/swarms.json"
SAVE_EVERY = 300.0
"""Seconds between two writings of the history."""


def encoded(body: bytes, kind: str, seconds: int) -> tuple[Response, Response]:
    """The response of an address, plain and compressed, made once for many viewers.

    ``seconds``: how long caches may keep it.
    """
    headers = {
        **HEADERS,
        # Anybody may show the figures and badges of a public page elsewhere.
        "Cross-Origin-Resource-Policy": "cross-origin",
        "Access-Control-Allow-Origin": "*",
        "Cache-Control": f"public, max-age={seconds}",
        "Vary": "Accept-Encoding",
        "Content-Type": kind,
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
    }
    packed = gzip.compress(body, 6, mtime=0)
    in_gzip = Response(packed, 200, headers | {"Content-Encoding": "gzip"})
    return Response(body, 200, headers), in_gzip


class SwarmPage:
    """The page of one server, and the socket at which it is served."""

    def __init__(self, history: Path, address: Callable[[], str], host: str, port: int) -> None:
        """``history``: file of the figures over time; ``address``: entry point of nodes. Raises
        PortInUse."""
        self._history = history
        self._series = read_series(history)
        """By run id."""
        self._address = address
        self._socket = bind(host, port, "--web")
        self.port: int = self._socket.getsockname()[1]
        self._listening: Listening | None = None
        self._swarms: dict[str, ObservedSwarm] = {}
        self._saved = 0.0
        self._files = {
            path: encoded(file.read_bytes(), kind, 3600) for path, (file, kind) in FILES.items()
        }
        self.made = 0
        """Number of renderings."""
        self._show(time())

    def saw(
        self, run: SignedRun, records: Mapping[str, bytes], proved: Set[str], about: int = 0
    ) -> None:
        """Take in what a look has found of a run, as `ObservedSwarm.saw`."""
        swarm = self._swarms.setdefault(run.run_id, ObservedSwarm(run))
        swarm.saw(records, proved, time(), about)

    def looked(self, run_ids: Set[str]) -> None:
        """A look is over; these runs are kept."""
        self._swarms = {run: swarm for run, swarm in self._swarms.items() if run in run_ids}
        now = time()
        self._show(now)
        if now - self._saved >= SAVE_EVERY:
            self._saved = now
            self.save()

    def _show(self, now: float) -> None:
        """Render all answers."""
        self.made += 1
        answers, views = dict(self._files), list[dict[str, Any]]()
        for run_id, swarm in self._swarms.items():
            view = swarm.view(now, self._address())
            series = self._series.setdefault(run_id, Series())
            series.add(view, now)
            views.append(view | {"history": series.points})
            svg = encoded(badge(view).encode(), "image/svg+xml", 60)
            answers[f"/badge/{swarm.run.fingerprint}.svg"] = svg
        views.sort(key=lambda view: (-view["training"], -view["peers"], view["run"]))
        document = json.dumps({"made": round(now), "figures": FIGURES, "runs": views})
        answers[JSON] = encoded(document.encode(), "application/json", 5)
        self._answers = answers

    def save(self) -> None:
        """Write the history of the runs that are kept; a disk that can't take it costs no page."""
        self._series = {run: one for run, one in self._series.items() if run in self._swarms}
        runs = {run: series.model_dump() for run, series in self._series.items()}
        try:
            write_atomic(self._history, json.dumps({"figures": FIGURES, "runs": runs}).encode())
        except (NodeError, OSError) as error:
            log.warning("web.history", reason=str(error))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request (ASGI)."""
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            response: Response = PlainTextResponse("only GET and HEAD\n", 405, HEADERS)
        elif (answers := self._answers.get(request.scope["path"])) is None:
            response = PlainTextResponse("nothing is here\n", 404, HEADERS)
        else:
            response = answers["gzip" in request.headers.get("accept-encoding", "")]
            is_known = request.headers.get("if-none-match") == response.headers["etag"]
            if is_known or request.method == "HEAD":
                response = Response(b"", 304 if is_known else 200, response.headers)
        await response(scope, receive, send)

    def open(self) -> None:
        """Answer from now on."""
        self._listening = Listening(self, self._socket)

    async def close(self) -> None:
        """Answer no more, and keep the history."""
        if self._listening is not None:
            await self._listening.close()
        self._socket.close()
        self.save()
