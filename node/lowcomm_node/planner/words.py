"""A plan for people: a table of 80 columns, and sentences. Pure."""

from textwrap import wrap

from lowcomm_node.planner.fit import RANK, GpuFit
from lowcomm_node.planner.plan import Choice, Plan, measured
from lowcomm_node.system.units import quantity, seconds, size, write_rate
from lowcomm_protocol.spec.presets import PRESETS

GIB = 1024**3
NEAR = 1.15
"""Largest factor between the written interval and the resulting one that counts as the same."""
_COLUMNS = "{:<17}{:>6}{:>10}{:>9}{:>13}{:>7}{:>8}{:>10}"
_LEGEND = (
    "share: of all-reduce's gain over one replica alone, between what was measured at such "
    "intervals (?: longer than any that was). every: as the preset is -> as the line carries it, "
    "or as keeps most with this number of peers."
)


def plan_in_words(plan: Plan) -> str:
    """The costs of a run on a line, by method, and the method to take."""
    line, best = plan.line, plan.choices[0]
    sent, step = plan.allreduce_bytes, plan.allreduce_seconds
    lines = [
        f"{quantity(plan.parameters)} parameters, {line.peers} peers, steps of "
        f"{line.step_seconds:g} s, line {write_rate(line.up)} up, {write_rate(line.down)} down, "
        f"{line.latency:.0f} ms",
        f"{plan.steps:,} steps: {_hours(plan.hours)} on {quantity(plan.tokens)} tokens, with any "
        "method, as training does not wait",
        "",
        _COLUMNS.format("", "", "exchange", "on line", "every", "share", "memory", "run sent"),
        _COLUMNS.format("method", "codec", "", "", "steps", "", "GiB", ""),
    ]
    if plan.as_written is not None:
        lines.append(_row("as written", plan.as_written, plan.as_written.written))
    on_line = _time(step - line.step_seconds)
    lines += [
        *(_row(one.method, one, PRESETS[one.method].sync["interval"]) for one in plan.choices),
        _COLUMNS.format(
            "all-reduce", "fp32", size(sent), on_line, "1", "100 %", "", size(sent * plan.steps)
        ),
        "",
        *wrap(f"Take {plan.reason}.", 80),
    ]
    if best.settings:
        settings = (
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
            for name, value in best.settings.items()
        )
        lines += wrap(f"It differs from the preset in {', '.join(settings)}.", 80)
    if plan.as_written is not None and (why := interval_in_words(plan.as_written)):
        lines += wrap(f"As written, {why}.", 80)
    parameters, peers = measured()[0], best.measured[0].peers
    paragraphs = [
        f"All-reduce of gradients would take {_hours(plan.steps * step / 3600)} on this line, "
        f"{_time(step)} a step.",
        f"A peer of {best.method} needs at least {best.host_bytes / GIB:.1f} GiB of memory, or "
        f"with a GPU {best.gpu_host_bytes / GIB:.1f} GiB and {best.gpu_bytes / GIB:.1f} GiB of "
        "the GPU's." + _in_stages(best),
        "",
        _LEGEND,
        f"Measured of {best.method} with {peers} peers and {parameters:,} parameters, where this "
        f"model has {plan.parameters:,}; the longer a run, the more rare exchanges keep:",
    ]
    for paragraph in paragraphs:
        lines += wrap(paragraph, 80) or [""]
    for point in best.measured:
        seeds = ", ".join(f"{100 * share:.0f}" for share in point.shares)
        lines.append(
            f"- every {point.interval} steps: {100 * point.share:.0f} % (seeds: {seeds}) after "
            f"{point.steps:,} steps"
        )
    return "\n".join(line.rstrip() for line in lines)


CHANGES = {
    "base": 'base = "{}"',
    "moments": "--moments {}",
    "context": "context = {}",
    "rank": "rank = {}",
    "adapter": f'an adapter of rank {RANK} and base = "{{}}"',
}
"""By what is changed to make a run fit."""


def _in_stages(choice: Choice) -> str:
    if max(choice.stage_bytes, default=choice.host_bytes) >= choice.host_bytes:
        return ""
    head, lender = (f"{one / GIB:.1f} GiB" for one in choice.stage_bytes)
    return f" Two machines of one owner hold it in {head} and {lender} (docs/household.md)."


def fit_in_words(fit: GpuFit) -> str:
    """The memory of a GPU by part, and what to change where that is too little."""
    vram, of_each = f"{fit.vram_bytes / GIB:.1f} GiB", "the GPU"
    place, batch = "a GPU", f"{fit.batch} windows of a step"
    if fit.gpus > 1:
        place = vram = f"{fit.gpus} GPUs of {vram}"
        of_each = "each GPU"
        batch = f"{-(-fit.batch // fit.gpus)} windows that each has of a step"
    of_these = "" if fit.trained == fit.parameters else f", {quantity(fit.trained)} of them trained"
    rows = [part for part in fit.parts.items() if part[1]] + [("sum", fit.gpu_bytes)]
    if fit.windows is not None:
        again = ", and blocks are computed again in the backward pass" if fit.recompute else ""
        said = (
            f"{vram} hold it: {fit.windows} of the {batch} go through the "
            f"model at once{again}. The machine itself needs {fit.host_bytes / GIB:.1f} GiB."
        )
    else:
        said = f"{vram} do not hold it, even with one window at once and blocks computed again. "
        changes = [CHANGES[name].format(value) for name, value in fit.changes.items()]
        more = (
            f"They hold it with {' and '.join(changes)} ({(fit.changed_bytes or 0) / GIB:.1f} GiB)."
        )
        said += more if changes else "Nor does any change that we know of: take a smaller model."
    lines = [
        *wrap(f"{quantity(fit.parameters)} parameters{of_these}, on {place}", 80),
        "",
        f"{f'memory of {of_each}':<70}{'GiB':>10}",
        *(f"{name:<70}{size / GIB:>10.2f}" for name, size in rows),
        "",
        *wrap(said, 80),
    ]
    return "\n".join(lines)


def interval_in_words(choice: Choice) -> str | None:
    """The interval that results on a line; None where it carries about the written one."""
    if choice.interval <= NEAR * choice.written:
        return None
    return (
        f"every fragment is to be exchanged every {choice.written} steps, and this line makes it "
        f"every {_steps(choice.interval)}: each of the {choice.fragments} exchanges of an interval "
        f"fills it for {_time(choice.line_seconds)} ({size(choice.contents)} each way)"
    )


def _row(name: str, choice: Choice, written: int) -> str:
    every = _steps(choice.interval)
    return _COLUMNS.format(
        name,
        choice.codec,
        size(choice.contents),
        _time(choice.line_seconds),
        every if choice.interval == written else f"{written} -> {every}",
        "?" if choice.share is None else f"{100 * choice.share:.0f} %",
        f"{choice.host_bytes / GIB:.1f}",
        size(choice.run_bytes),
    )


def _steps(interval: float) -> str:
    return f"{interval:.0f}" if interval >= 10 or interval == int(interval) else f"{interval:.1f}"


def _time(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else seconds(value)


def _hours(value: float) -> str:
    if value < 1:
        return f"{60 * value:.0f} min"
    return f"{value:.1f} h" if value < 100 else f"{value:,.0f} h"
