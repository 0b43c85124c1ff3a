"""A plan for people: a table of 80 columns, and sentences. Pure."""

from collections.abc import Iterator
from textwrap import wrap

from lowcomm_node.planner.plan import Choice, Estimate, Plan
from lowcomm_node.system.units import quantity, seconds, size, write_rate

GIB = 1024**3
UNKNOWN = "?"
AS_WRITTEN = "as written"
_COLUMNS = "{:<17}{:>6}{:>10}{:>9}{:>13}{:>7}{:>8}{:>10}"


def plan_in_words(told: Plan) -> str:
    """The costs of a run on a line, by method, and the method to take."""
    lines = [*_head(told), "", *_table(told), "", *_sentences(told)]
    return "\n".join(line.rstrip() for line in lines)


def interval_in_words(choice: Choice) -> str | None:
    """The interval that results on a line; None where it carries the written one."""
    if choice.as_written:
        return None
    exchange = choice.exchange
    return (
        f"every fragment is to be exchanged every {choice.written} steps, and this line makes it "
        f"every {_steps(choice.interval)}: each of the {choice.fragments} exchanges of an interval "
        f"fills it for {_time(exchange.line_seconds)} ({size(exchange.contents)} each way), and "
        f"takes {_time(exchange.seconds)} until it is merged"
    )


def _head(told: Plan) -> Iterator[str]:
    line = told.line
    yield (
        f"{quantity(told.parameters)} parameters, {told.peers} peers, steps of "
        f"{told.step_seconds:g} s, line {write_rate(line.up)} up, {write_rate(line.down)} down, "
        f"{1000 * line.latency:.0f} ms"
    )
    yield (
        f"{told.steps:,} steps: {_hours(told.hours)} on {quantity(told.tokens)} tokens, with any "
        "method, as training does not wait"
    )


def _table(told: Plan) -> Iterator[str]:
    yield _COLUMNS.format("", "", "exchange", "on line", "every", "share", "memory", "run sent")
    yield _COLUMNS.format("method", "codec", "", "", "steps", "", "GiB", "")
    if told.as_written is not None:
        yield _row(AS_WRITTEN, told.as_written)
    for choice in told.choices:
        yield _row(choice.method, choice)
    whole = told.allreduce
    yield _COLUMNS.format(
        "all-reduce",
        "fp32",
        size(whole.bytes),
        _time(whole.seconds - told.step_seconds),
        "1",
        "100 %",
        "",
        size(whole.bytes * told.steps),
    )


def _row(name: str, choice: Choice) -> str:
    every = _steps(choice.interval)
    if choice.interval != choice.written:
        every = f"{choice.written} -> {every}"
    return _COLUMNS.format(
        name,
        choice.codec,
        size(choice.exchange.contents),
        _time(choice.exchange.line_seconds),
        every,
        _share(choice.share),
        f"{choice.memory.host_bytes / GIB:.1f}",
        size(choice.run_bytes),
    )


def _sentences(told: Plan) -> Iterator[str]:
    best = told.best
    yield from _wrapped(f"Take {told.reason}.")
    if best.settings:
        settings = ", ".join(f"{name} = {_value(value)}" for name, value in best.settings.items())
        yield from _wrapped(f"It differs from the preset in {settings}.")
    yield from _wrapped(
        f"All-reduce of gradients would take {_hours(told.allreduce.hours)} on this line, "
        f"{_time(told.allreduce.seconds)} a step."
    )
    memory = best.memory
    yield from _wrapped(
        f"A peer of {best.method} needs at least {memory.host_bytes / GIB:.1f} GiB of memory, or "
        f"with a GPU {memory.gpu_host_bytes / GIB:.1f} GiB and {memory.gpu_bytes / GIB:.1f} GiB of "
        "the GPU's."
    )
    if (written := told.as_written) is not None and (why := interval_in_words(written)):
        yield from _wrapped(f"As written, {why}.")
    yield ""
    yield from _wrapped(
        "share: of all-reduce's gain over one replica alone, as measured at such an interval "
        f"({UNKNOWN}: longer than any that was). every: as the preset is -> as the line carries "
        "it, or as keeps most with this number of peers."
    )
    for one in [*_figures(best), *told.beyond]:
        yield from _wrapped(f"- {one}", "  ")


def _figures(best: Choice) -> Iterator[str]:
    for point in best.share.measured if best.share is not None else ():
        each = " / ".join(f"{100 * share:.0f}" for share in point.shares)
        seeds = f"{each}, by seed" if len(point.shares) > 1 else "one seed alone"
        yield (
            f"measured: {best.method} every {point.interval} steps, {point.peers} peers: "
            f"{100 * point.share:.0f} % ({seeds}) after {point.steps:,} steps"
        )


def _share(found: Estimate | None) -> str:
    if found is None or found.share is None:
        return UNKNOWN
    return f"{100 * found.share:.0f} %"


def _steps(interval: float) -> str:
    return f"{interval:.0f}" if interval >= 10 or interval == int(interval) else f"{interval:.1f}"


def _time(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else seconds(value)


def _hours(value: float) -> str:
    if value < 1:
        return f"{60 * value:.0f} min"
    return f"{value:.1f} h" if value < 100 else f"{value:,.0f} h"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return wrap(text, 80, subsequent_indent=indent)
