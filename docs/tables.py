"""Writes the tables in docs/*.md that the code knows best: `make tables`. A test keeps them up to
date.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and is replaced as a whole.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import AfterValidator, BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from lowcomm_node.owner.settings import BASIC, SETTINGS, NodeSettings, default_of, flag_of
from lowcomm_node.planner.fit import GpuFit
from lowcomm_node.planner.line import read_line, run_of_parameters
from lowcomm_node.planner.plan import Plan, plan
from lowcomm_node.planner.words import plan_in_words
from lowcomm_node.status.events import KINDS, Contributed
from lowcomm_node.status.model import Limits, PeerStatus, Ping, Status
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.document import ADDED
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import OneOf

DOCS = Path(__file__).parent
SCHEMA = DOCS / "json-schema.json"
BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BOUNDS: dict[type, tuple[str, str]] = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "above"),
    Le: ("le", "at most"),
    Lt: ("lt", "below"),
}
RECORDS: dict[str, type] = {
    "status": Status,
    "peers": PeerStatus,
    "exchanges": ExchangeEnded,
    "traffic": Limits,
    "ping": Ping,
    "contribution": Contributed,
    "plan": Plan,
    "plan --vram": GpuFit,
}
"""What ``--json`` prints, by its name in docs/json-schema.json."""


def settings() -> Iterator[str]:
    """Every setting of a specification, its values, its default, and what it is."""
    yield from ("| setting | values | if missing | what it is |", "|---|---|---|---|")
    for section, field in RunSpec.model_fields.items():
        model = type(field.default) if section == "model" else field.annotation  # a family's own
        model = next(iter(get_args(model)), model)  # of a section that may be missing
        if not (inspect.isclass(model) and issubclass(model, BaseModel)):
            continue
        missing = "refused" if field.default is None else "the method's"
        yield from _rows(section, model, missing)


def _rows(section: str, model: type[BaseModel], missing: str) -> Iterator[str]:
    """The settings of a section, and of each item of its lists; ``missing``: of required ones."""
    texts = _docstrings(model)
    for name, one in model.model_fields.items():
        text, default = texts.get(name, ""), missing if one.is_required() else _default(one)
        yield f"| `{section}.{name}` | {_values(one)} | {default} | {text} |"
        if (item := _item(one)) is not None:
            yield from _rows(f"{section}.{name}[]", item, "refused")


def _item(field: FieldInfo) -> type[BaseModel] | None:
    """The tables that a list consists of."""
    [kind, *_] = [*get_args(field.annotation), None]
    return kind if inspect.isclass(kind) and issubclass(kind, BaseModel) else None


def architectures() -> Iterator[str]:
    """Every type of model of another library, and what can be chosen of it."""
    yield from (
        "| type | must be given | may be given, and its value if missing |",
        "|---|---|---|",
    )
    for name, one in ARCHITECTURES.items():
        needed = [f"`{key}`" for key, told in one.keys.items() if told.default is None]
        others = [
            f"`{key}` {_plain(told.default).strip('`')}"
            for key, told in one.keys.items()
            if told.default is not None
        ]
        yield f"| `{name}` | {', '.join(needed)} | {', '.join(others)} |"


def owner() -> Iterator[str]:
    """Every setting of a node's owner, first those that most may want to set."""
    for title, is_basic in (("Basic", True), ("Advanced", False)):
        yield from (f"### {title}", "")
        yield from ("| flag | bounds | if not set | what it is |", "|---|---|---|---|")
        for name, setting in SETTINGS.items():
            if (name in BASIC) is is_basic:
                flag = f"{flag_of(name)} {setting.unit}".strip().replace("|", "\\|")
                bounds = _bounds_of(NodeSettings.model_fields[name]).removeprefix("of ")
                yield f"| `{flag}` | {bounds} | {default_of(name)} | {setting.text} |"
        yield ""


def presets() -> Iterator[str]:
    """What each method sets."""
    names = sorted({name for preset in PRESETS.values() for name in preset.sync})
    yield "| | " + " | ".join(f"`{method}`" for method in PRESETS) + " |"
    yield "|---" * (len(PRESETS) + 1) + "|"
    for name in names:
        cells = (
            _plain(preset.sync[name]) if name in preset.sync else "" for preset in PRESETS.values()
        )
        yield f"| `{name}` | " + " | ".join(cells) + " |"


def added() -> Iterator[str]:
    """The settings that came after 0.1, each with what a document without it means where that is
    another value than the default."""
    defaults = {row.split(" | ")[0]: row.split(" | ")[2] for row in [*settings()][2:]}
    names = list[str]()
    for name, before in ADDED.items():
        value = _plain(list(before) if isinstance(before, tuple) else before)
        names.append(f"`{name}`")
        if defaults.get(f"| `{name}`", value) != value:
            names[-1] += f" ({value})"
    yield from ("", *textwrap.wrap(", ".join(names), 100, break_on_hyphens=False), "")


def schema() -> str:
    """The JSON Schema of all records and events, for programs."""
    kinds = RECORDS | {f"event {kind.wire_name}": kind for kind in KINDS}
    inputs = [(name, "serialization", TypeAdapter(kind)) for name, kind in kinds.items()]
    places, found = TypeAdapter.json_schemas(cast("Any", inputs))
    named = {name: places[name, "serialization"] for name in kinds}
    for kind in _records(kinds.values()):
        described = found["$defs"].get(kind.__name__, {}).get("properties", {})
        for one in reversed(kind.__mro__[:-1]):
            for name, text in _docstrings(one).items():
                if name in described:
                    described[name]["description"] = text
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": dialect, "properties": named, **found}, indent=1) + "\n"


def _records(kinds: Iterable[Any]) -> Iterator[type]:
    """Dataclasses, and those that their fields hold."""
    for kind in kinds:
        if is_dataclass(kind):
            yield cast("type", kind)
            yield from _records(get_type_hints(kind).values())
        else:
            yield from _records(get_args(kind))


def planned(parameters: str, line: Mapping[str, Any]) -> Iterator[str]:
    """What `plan` prints."""
    spec = run_of_parameters(parameters, line["peers"])
    yield from ("```", plan_in_words(plan(spec, read_line("plan", line), from_file=False)), "```")


def truth() -> Iterator[str]:
    """What `plan` predicts beside what nodes did, as benchmarks/planned.py measured it."""
    yield "| line, method | | predicted | measured | off by |"
    yield "|---|---|---|---|---|"
    if not PLANNED.exists():
        yield "| not measured | | | | |"
        return
    for name, found in json.loads(PLANNED.read_text()).items():
        for key, words in TRUTHS.items():
            told, really = found["predicted"][key], found["measured"][key]
            scale = 1e6 if key == "bytes" else 1.0
            yield (
                f"| {name} | {words} | {told / scale:.3g} | {really / scale:.3g} | "
                f"{100 * (really / told - 1):+.0f} % |"
            )


PLANNED = DOCS.parent / "benchmarks" / "results" / "planned.json"
TRUTHS = {
    "interval": "interval, steps",
    "bytes": "MB of an exchange",
    "line": "seconds for which it fills the line",
}
NARROW = {"up": "20Mbit", "step_seconds": 2.0, "peers": 8}


def shares() -> Iterator[str]:
    """What pairs and groups keep of all-reduce's gain, from the results of shares.py."""
    benchmarks = DOCS.parent / "benchmarks"
    if str(benchmarks) not in sys.path:
        sys.path.append(str(benchmarks))
    from shares import jobs, tables

    results = json.loads((benchmarks / "results" / "shares.json").read_text())
    yield tables(list(jobs()), results)


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "shares": shares,
    "settings": settings,
    "architectures": architectures,
    "owner": owner,
    "presets": presets,
    "added": added,
    "plan-narrow": partial(planned, "100M", NARROW),
    "plan-truth": truth,
}


def filled(text: str) -> str:
    """A page with its tables as the code has them now."""
    return BLOCK.sub(lambda found: found[1] + "\n".join([*TABLES[found["name"]](), found[3]]), text)


def pages() -> Iterator[tuple[Path, str, str]]:
    """Each page with tables: where it is, as it is, and as it should be."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if BLOCK.search(text):
            yield page, text, filled(text)
    yield SCHEMA, SCHEMA.read_text() if SCHEMA.exists() else "", schema()


def _docstrings(model: type) -> dict[str, str]:
    """What stands below each field in the source, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = (
                " ".join(str(after.value.value).split()).replace("|", "\\|").replace("``", "`")
            )
    return texts


def _values(field: FieldInfo) -> str:
    kind: Any = field.annotation
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ", ".join(_plain(one) for one in get_args(kind))
    for one in field.metadata:
        if isinstance(one, AfterValidator) and isinstance(one.func, OneOf):
            return ", ".join(map(_plain, one.func.table))
    inside = [get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(kind)]
    if int in inside:
        kind = "list of integers" if get_origin(kind) is tuple else int
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", dict: "table"}
    several = "list of tables" if _item(field) else "list of texts"
    name = kind if isinstance(kind, str) else names.get(get_origin(kind) or kind, several)
    told = _bounds_of(field)
    patterns = [f"`{one.pattern}`" for one in field.metadata if getattr(one, "pattern", None)]
    return " ".join([name, told, *patterns]).strip()


def _bounds_of(field: FieldInfo) -> str:
    """In words; those of a value that may be missing, too."""
    metadata = [
        *field.metadata,
        *(one for kind in get_args(field.annotation) for one in _metadata(kind)),
    ]
    told = [
        f"{word} {_number(getattr(one, key))}" for one in metadata for key, word in _bounds(one)
    ]
    if len(told) == 2 and told[0].startswith("at least ") and told[1].startswith("at most "):
        return f"{told[0].removeprefix('at least ')} to {told[1].removeprefix('at most ')}"
    return ", ".join(told)


def _metadata(kind: Any) -> Iterator[object]:
    for one in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        yield from one.metadata if isinstance(one, FieldInfo) else [one]


def _bounds(one: object) -> Iterator[tuple[str, str]]:
    if isinstance(one, MaxLen):
        yield "max_length", "of at most"
    elif type(one) in BOUNDS:
        yield BOUNDS[type(one)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "the method's"
    default = field.get_default(call_default_factory=True)
    return _plain(list(default) if isinstance(default, tuple) else default)


def _number(value: float) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "2^63" if value == 2**63 else text


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None:
        return "none"
    return f"`{value}`" if not isinstance(value, str) else f'`"{value}"`'


def main() -> None:
    """Write what has changed."""
    for page, before, after in pages():
        if before != after:
            page.write_text(after)
            sys.stdout.write(f"{page.name} written\n")


if __name__ == "__main__":
    main()
