"""What `lowcomm-node plan` predicts against what real nodes do over emulated lines. Needs root.

    python benchmarks/planned.py [--lines 5 20 100] [--method lowcomm]

Two nodes with a model of 10.8 million parameters, in the star of `slow_lines.py`, on lines with
these Mbit/s both ways, 50 ms there and back; an inner step takes a second. Measuring
begins once every fragment has been merged ``SETTLED`` times: before that, modulo codecs do not know
yet how far peers are apart. Printed are, predicted and measured:

    interval   steps between two merges of a fragment at a node
    bytes      of contents that a node sends in one exchange, the mean
    on line    seconds for which it fills the line: what the emulator carried in the fuller
               direction, other frames and what was sent twice included, at the line's rate

Writes each to benchmarks/results/planned.json as soon as it is measured, and skips what is there.
"""

import os
import sys
from statistics import mean
from time import sleep, time
from typing import Any

import kit
import slow_lines
from laboratory import Host
from residents import START

from helpers.pacing import SHORT_LOOK, pace
from lowcomm_protocol.spec.run import parse_toml

OUT = kit.RESULTS / "planned.json"
PEERS = 2
SETTLED = 3
STEP, SECONDS = 1.0, 45.0
"""Seconds of an inner step, and of the stretch in which exchanges are counted."""
ROWS = {
    "interval": "interval, steps",
    "bytes": "bytes of an exchange",
    "line": "seconds on the line",
}


def main() -> int:
    """Measure and print; 1 if a prediction of interval, bytes or line is off by over 15 %."""
    parser = kit.parser(__doc__)
    parser.add_argument("--lines", nargs="*", type=float, default=[5.0, 20.0, 100.0])
    parser.add_argument("--method", default="lowcomm")
    arguments = parser.parse_args()
    print(f"{kit.loaded_machine()}; steps of {STEP} s", flush=True)
    wrong = 0
    for mbit in arguments.lines:
        name = f"{mbit:g} Mbit/s, {arguments.method}"
        found = kit.read(OUT).get(name)
        if found is None:
            measured = measure(mbit, arguments.method)
            found = {"predicted": predict(mbit, arguments.method), "measured": measured}
            kit.write(OUT, kit.read(OUT) | {name: found})
        wrong += show(name, found)
    return int(wrong > 0)


def spec_of(method: str) -> str:
    """The run."""
    text = slow_lines.SPEC.format(seed=0, nodes=PEERS, evaluate_every=1_000_000, method=method)
    steady = 'learning_rate = 3e-4\nwarmup = 10\nschedule = "constant"\nbatch = 1\n'
    return text.replace("batch = 1\n", steady)


def predict(mbit: float, method: str) -> dict[str, float]:
    """What the planner says."""
    from lowcomm_node.planner.line import read_line
    from lowcomm_node.planner.plan import choice_of

    latency = 4000 * slow_lines.DELAY
    options = {"up": f"{mbit}Mbit", "step_seconds": STEP, "peers": PEERS, "latency": latency}
    line = read_line("planned.py", options)
    plan = choice_of(parse_toml(spec_of(method)), line)
    return {"interval": plan.interval, "bytes": plan.contents, "line": plan.line_seconds}


def measure(mbit: float, method: str) -> dict[str, Any]:
    """What two nodes do."""
    pace(STEP, SHORT_LOOK)
    spec, rate = spec_of(method), mbit * 1e6
    with slow_lines.star(spec, rate, rate, PEERS) as (homes, nodes):
        fragments = parse_toml(spec).sync.fragments
        for node in nodes:
            node.until(lambda s: s["exchanges"]["completed"] >= SETTLED * fragments, "it", START)
        began, first = time(), [slow_lines.steps_of(node) for node in nodes]
        before = [carried(home) for home in homes]
        sleep(SECONDS)
        after = [carried(home) for home in homes]
        lasted, last = time() - began, [slow_lines.steps_of(node) for node in nodes]
        ended = [[one for one in node.exchanges() if one["time"] >= began] for node in nodes]
    steps = sum(last) - sum(first)
    wire = sum(
        max(now - was for was, now in zip(*ways, strict=True))
        for ways in zip(before, after, strict=True)
    )
    done = [one for node in ended for one in node if one["outcome"] == "applied"]
    return {
        "interval": steps * fragments / len(done),
        "bytes": mean(one["bytes_sent"] for one in done),
        "line": 8 * wire / len(done) / rate,
        "exchanges": len(done),
        "others": sum(len(node) for node in ended) - len(done),
        "step": PEERS * lasted / steps,
        "load": os.getloadavg()[0],
    }


def carried(home: Host) -> tuple[int, int]:
    """Bytes that a home's line has carried up and down."""
    now = home.link.traffic()
    return now.up.delivered_bytes, now.down.delivered_bytes


def show(name: str, found: dict[str, Any]) -> int:
    """Print one; how many of the three that count are off by more than 15 %."""
    predicted, measured = found["predicted"], found["measured"]
    print(
        f"{name}: {measured['exchanges']} exchanges applied, {measured['others']} not; steps of "
        f"{measured['step']:.2f} s, load {measured['load']:.1f}"
    )
    off = {key: measured[key] / predicted[key] - 1 for key in ROWS}
    for key, words in ROWS.items():
        print(f"  {words:22}{predicted[key]:12.4g}{measured[key]:12.4g}{off[key]:+9.1%}")
    sys.stdout.flush()
    return sum(abs(one) > 0.15 for one in off.values())


if __name__ == "__main__":
    sys.exit(main())
