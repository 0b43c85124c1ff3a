"""What the page of a node costs, and how soon it shows something.

    python benchmarks/page.py [--rounds 5] [--seconds 12]

Two real nodes on loopback. In turn nobody, one and 50 viewers follow the first one's events, each
for some seconds. Prints CPU seconds of its daemon (user and system, without its trainer) for each
second, and tokens a second, medians over the rounds. Then a browser opens the page of that node,
and of one whose journal holds a busy week, in turn: milliseconds from the request to the first
figures, and to the drawn loss."""

import http.client
import json
import selectors
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import psutil

VIEWERS = (0, 1, 50)
LOADS = 7
WEEK = 7 * 86400.0
EXCHANGE_EVERY, SAMPLE_EVERY = 20.0, 10.0
"""Seconds, of the busy week."""


def main() -> int:
    """Measure, print, write."""
    parser = kit.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    arguments = parser.parse_args()
    told: dict[str, Any] = {"machine": kit.loaded_machine(), "seconds": arguments.seconds}
    with kit.two_nodes("page", 50, "--checkpoint-every", "100000") as nodes:
        nodes[0].until_completed(1)
        told["rounds"] = [
            {str(count): measure(nodes[0], count, arguments.seconds) for count in order(number)}
            for number in range(arguments.rounds)
        ]
        told["first look"] = first_looks(nodes[0])
    kit.write(kit.RESULTS / "page.json", told)
    show(told)
    return 0


def order(number: int) -> tuple[int, ...]:
    """Each count once, beginning with another one in each round."""
    first = number % len(VIEWERS)
    return VIEWERS[first:] + VIEWERS[:first]


def show(told: dict[str, Any]) -> None:
    """The table."""
    print(told["machine"])
    print("viewers  CPU of the daemon  tokens/s   (medians of", len(told["rounds"]), "rounds)")
    for count in map(str, VIEWERS):
        cpu, tokens = (
            statistics.median(one[count][name] for one in told["rounds"])
            for name in ("cpu", "tokens/s")
        )
        print(f"{count:>7}  {cpu:16.2%}  {tokens:8.0f}")
    for name, looks in told["first look"].items():
        figures, drawn = (statistics.median(one[part] for one in looks) for part in (0, 1))
        size = max(one[2] for one in looks)
        print(f"{name}: figures after {figures:.0f} ms, loss after {drawn:.0f} ms, {size} bytes")


def measure(node: Any, viewers: int, seconds: float) -> dict[str, float]:
    """CPU of the daemon and tokens of its trainer while so many follow."""
    daemon = psutil.Process(node.child.pid)
    with following(node, viewers):
        before, tokens, began = spent(daemon), node.status()["trainer"]["tokens"], time.monotonic()
        time.sleep(seconds)  # the window that is measured
        after, more, ended = spent(daemon), node.status()["trainer"]["tokens"], time.monotonic()
    length = ended - began
    return {"cpu": (after - before) / length, "tokens/s": (more - tokens) / length}


def spent(process: psutil.Process) -> float:
    """CPU seconds of one process."""
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def following(node: Any, count: int) -> Iterator[None]:
    """So many viewers that read whatever comes, on one thread."""
    given = json.loads((node.home / "control.json").read_text())
    headers = {"Authorization": f"Bearer {given['token']}", "Accept": "text/event-stream"}
    streams: list[http.client.HTTPConnection] = []
    chosen = selectors.DefaultSelector()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for key, _ in chosen.select(0.1):
                key.fileobj.recv(65536)  # type: ignore[union-attr]

    for _ in range(count):
        stream = http.client.HTTPConnection("127.0.0.1", given["port"], timeout=20)
        stream.request("GET", "/api/v1/events", headers=headers)
        streams.append(stream)
        chosen.register(stream.sock, selectors.EVENT_READ)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()
        chosen.close()
        for stream in streams:
            stream.close()


def first_looks(node: Any) -> dict[str, list[tuple[float, float, int]]]:
    """Of a node that has just begun, and of one after a week, in turn."""
    from helpers.browser import browsing
    from helpers.stand_in import link, serving
    from lowcomm_node.web.client import ControlClient

    found: dict[str, list[tuple[float, float, int]]] = {"a new node": [], "after a week": []}
    with (
        tempfile.TemporaryDirectory() as home,
        serving(after_a_week(Path(home), node), Path(home)),
        browsing() as browser,
    ):
        for _ in range(LOADS):
            found["a new node"].append(look(browser, node.ask(ControlClient.link)))
            found["after a week"].append(look(browser, link(Path(home))))
    return found


def look(browser: Any, link: str) -> tuple[float, float, int]:
    """Milliseconds to the figures, and to the loss; bytes loaded."""
    from helpers.browser import visiting

    # The page itself tells when it has drawn: looking from outside takes longer.
    noted = (
        "window.seen = {}; new MutationObserver(() => {"
        "if (document.body?.dataset.states) seen.figures ??= performance.now();"
        "if (Number(document.getElementById('loss')?.dataset.points) > 0) "
        "seen.loss ??= performance.now();"
        "}).observe(document, {subtree: true, childList: true, attributes: true})"
    )
    with visiting(browser) as visit:
        visit.page.add_init_script(noted)
        visit.open(link)
        visit.wait("seen.loss")
        figures, drawn = visit.page.evaluate("[seen.figures, seen.loss]")
        return figures, drawn, visit.bytes


def after_a_week(home: Path, node: Any) -> Any:
    """A node that tells the status of another one, and has the journal of a busy week."""
    from helpers.stand_in import StandIn
    from helpers.statuses import make_exchange
    from lowcomm_node.status.events import Notice
    from lowcomm_node.status.journal import Journal, JournalFile, sample
    from lowcomm_node.web.client import ControlClient

    status, path, now = node.ask(ControlClient.status), home / "journal.db", time.time()
    file, plain = JournalFile(path), sample(now, status)
    samples = [
        replace(plain, time=now - age, swarm_step=int(WEEK - age), steps=int(WEEK - age), loss=2.0)
        for age in range(0, int(WEEK), int(SAMPLE_EVERY))
    ]
    exchanges = [
        make_exchange(time=now - age, stages={"send": 1.0, "receive": 1.0}, fragment=number % 8)
        for number, age in enumerate(range(int(WEEK), 0, -int(EXCHANGE_EVERY)))
    ]
    rows = [Notice(one.time, one) for one in exchanges]
    file.add(rows, samples)
    file.prune(now)
    file.close()

    class AfterAWeek(StandIn):
        async def samples(self, since: int, most: int) -> Any:
            return Journal(path).samples(since, most)

        async def exchanges(self, limit: int, since: int) -> Any:
            return Journal(path).exchanges(limit)

    return AfterAWeek(status)


if __name__ == "__main__":
    sys.exit(main())
