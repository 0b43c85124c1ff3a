"""What the creator of a run changes while it trains: signed amendments, numbered and chained.

An amendment names the run, its number, the SHA-256 of its predecessor (of the first: the run id),
the swarm step at which it comes into force, and settings. Peers carry the whole chain beside the
run; of two chains the longer holds. The settings that hold at a swarm step are a function of run,
chain and step alone (``Course``), so peers on both sides of an amendment need not agree on
anything: the run id, the plan and the codec never change.

A peer that is beyond the step of an amendment follows as soon as it hears of it. Newcomers and
storers of the DHT, which have no swarm step of their own, judge who may join by the highest swarm
step that peers' records tell (docs/specification.md).
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from lowcomm_protocol.errors import LowcommError, RecordError, SpecError, VersionError
from lowcomm_protocol.identity import SIGNATURE_BYTES, Identity, verify
from lowcomm_protocol.refusals import Reason
from lowcomm_protocol.spec.document import encode
from lowcomm_protocol.spec.run import RunSpec, SignedRun, amended

SCHEDULE = (
    "run.steps",
    "train.learning_rate",
    "train.final_learning_rate",
    "train.warmup",
    "train.schedule",
    "train.decay",
)
AMENDABLE = (*SCHEDULE, "run.description", "run.admission", "run.members")
MAX_AMENDMENTS = 32
MAX_CHAIN_BYTES = 20 * 1024
"""Of a whole chain, as it travels."""
MAX_STEP = 100_000_000
ADMISSIONS = ("open", "invite", "list")
_PURPOSE = "amendment"
_FIELDS = frozenset(("run", "number", "previous", "at", "settings"))


@dataclass(frozen=True)
class Amendment:
    """One change of a run."""

    number: int
    """From 1."""
    at: int
    """Swarm step."""
    settings: Mapping[str, Any]
    """By the names in ``AMENDABLE``."""
    document: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {_brief(value)}" for name, value in self.settings.items())
        when = f" from swarm step {self.at}" if self.at else ""
        return f"amendment {self.number}: {values}{when}"

    def to_json(self) -> dict[str, Any]:
        """As ``status`` and events tell it."""
        return {"number": self.number, "at": self.at, "settings": dict(self.settings)}


@dataclass(frozen=True)
class Chain:
    """All amendments of one run, in their order."""

    run_id: str = ""
    links: tuple[Amendment, ...] = ()
    data: bytes = field(default=b"", repr=False)
    """As it travels; empty where there is none."""

    @property
    def order(self) -> tuple[int, bytes]:
        """Of two chains the higher holds.

        Of two of one length, which an honest creator never signs, all take the same.
        """
        return len(self.links), sha256(self.data).digest() if self.data else b""

    @property
    def admissions(self) -> tuple[tuple[int, Any, frozenset[str]], ...]:
        """Who may join: from which swarm step on, admission, members.

        ``Course`` checks the values.
        """
        said = (link for link in self.links if "run.admission" in link.settings)
        return tuple(
            (one.at, one.settings["run.admission"], frozenset(one.settings["run.members"]))
            for one in said
        )


class Course:
    """The settings of a run over its swarm steps."""

    def __init__(self, spec: RunSpec, chain: Chain | None = None) -> None:
        """Raises SpecError if an amendment makes no valid specification of the run."""
        self.chain = chain or Chain()
        self._starts = [amendment.at for amendment in self.chain.links]
        self._specs = [spec]
        for amendment in self.chain.links:
            source = f"amendment {amendment.number}"
            changed = amended(self._specs[-1], amendment.settings, source)
            if "run.steps" in amendment.settings and changed.run.steps < amendment.at:
                raise SpecError(
                    f"{source}: run.steps = {changed.run.steps} is before swarm step "
                    f"{amendment.at}, at which it would come into force: name an earlier step, or "
                    "more steps."
                )
            self._specs.append(changed)

    def at(self, swarm_step: int) -> RunSpec:
        """The settings that hold at a swarm step."""
        return self._specs[bisect_right(self._starts, swarm_step)]

    @property
    def last(self) -> RunSpec:
        """The settings with all amendments, those to come included."""
        return self._specs[-1]

    @property
    def longest(self) -> int:
        """The most swarm steps that the run has had or will have."""
        return max(spec.run.steps for spec in self._specs)

    def is_over(self, swarm_step: int) -> bool:
        """Whether the run has ended by a swarm step."""
        return swarm_step >= self.at(swarm_step).run.steps


def write_amendment(
    creator: Identity, run: SignedRun, chain: Chain, at: int, settings: Mapping[str, Any]
) -> Chain:
    """The chain with one more amendment.

    Raises SpecError if that changes the run into none, or the chain gets too long.
    """
    if creator.peer_id != run.creator:
        raise SpecError(f"Only the run's creator ({run.creator}) can amend it.")
    if unknown := [name for name in settings if name not in AMENDABLE]:
        raise SpecError(
            f"{unknown[0]} can't be changed while a run trains; these can: {', '.join(AMENDABLE)}."
        )
    if not settings:
        raise SpecError(f"An amendment needs a setting: one of {', '.join(AMENDABLE)}.")
    if len(chain.links) >= MAX_AMENDMENTS:
        raise SpecError(
            f"This run has {MAX_AMENDMENTS} amendments, which is the most: create a new run."
        )
    if chain.links and at < chain.links[-1].at:
        raise SpecError(
            f"Swarm step {at} is before that of {chain.links[-1]}: name that step or a later one, "
            "amendments come in their order."
        )
    if not 0 <= at <= MAX_STEP:
        raise SpecError(f"Swarm step {at} is not one: expected 0 to {MAX_STEP}.")
    full = _with_admission(Course(run.spec, chain).last, settings)
    previous = sha256(chain.links[-1].document).hexdigest() if chain.links else run.run_id
    number = len(chain.links) + 1
    document = encode(
        {"run": run.run_id, "number": number, "previous": previous, "at": at, "settings": full}
    )
    link = Amendment(number, at, full, document, creator.sign(_PURPOSE, document))
    made = _chain(run.run_id, (*chain.links, link))
    if len(made.data) > MAX_CHAIN_BYTES:
        raise SpecError(
            f"All amendments together would have {len(made.data)} bytes, more than "
            f"{MAX_CHAIN_BYTES}: name fewer members, or create a new run."
        )
    Course(run.spec, made)
    return made


def read_chain(data: bytes, creator: str) -> Chain:
    """Check a chain as it travels. Raises RecordError if it is malformed, SignatureError if
    ``creator`` has not signed it.

    What it does to a run is checked by ``Course``.
    """
    if len(data) > MAX_CHAIN_BYTES:
        raise RecordError(
            f"Amendments of {len(data)} bytes are refused: at most {MAX_CHAIN_BYTES}.",
            reason=Reason.TOO_LARGE,
        )
    try:
        told = json.loads(data)
        pairs = [(str(one["document"]).encode(), bytes.fromhex(one["signature"])) for one in told]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RecordError(
            "Amendments that are no list of documents and signatures are refused."
        ) from None
    if not 1 <= len(pairs) <= MAX_AMENDMENTS or any(
        len(signature) != SIGNATURE_BYTES for _, signature in pairs
    ):
        raise RecordError(f"Amendments are refused: expected 1 to {MAX_AMENDMENTS}, each signed.")
    links: list[Amendment] = []
    run_id = previous = ""
    for number, (document, signature) in enumerate(pairs, 1):
        content = _content(document)
        run_id = run_id or str(content["run"])
        expected = {"run": run_id, "number": number, "previous": previous or run_id}
        if len(run_id) != 64 or any(content[name] != value for name, value in expected.items()):
            raise RecordError("Amendments that are no chain are refused.")
        verify(creator, _PURPOSE, document, signature)
        link = Amendment(number, content["at"], content["settings"], document, signature)
        if links and link.at < links[-1].at:
            raise RecordError("Amendments that come into force out of their order are refused.")
        links.append(link)
        previous = sha256(document).hexdigest()
    return _chain(run_id, tuple(links))


def newest(spec: RunSpec, run_id: str, told: Sequence[bytes]) -> Course:
    """The course of a run, as ``spec`` was signed, by the highest sound chain among those that are
    told."""
    course = Course(spec)
    for data in filter(None, told):
        try:
            chain = read_chain(data, spec.run.creator)
            if chain.run_id == run_id and chain.order > course.chain.order:
                course = Course(spec, chain)
        except LowcommError:
            continue
    return course


def _content(document: bytes) -> dict[str, Any]:
    """What an amendment says, its types and ranges checked."""
    try:
        content = json.loads(document)
        fine = isinstance(content, dict) and encode(cast("dict[str, Any]", content)) == document
    except (ValueError, RecursionError):
        fine, content = False, {}
    found = cast("dict[str, Any]", content)
    if not fine or found.keys() != _FIELDS or not isinstance(found["settings"], dict):
        raise RecordError("An amendment that is not in its canonical form is refused.")
    if (
        type(found["at"]) is not int
        or not 0 <= found["at"] <= MAX_STEP
        or type(found["number"]) is not int
    ):
        raise RecordError("An amendment with a field out of bounds is refused.")
    settings = cast("dict[str, Any]", found["settings"])
    if not settings:
        raise RecordError("An amendment that changes nothing is refused.")
    for name in settings:
        if name not in AMENDABLE:
            raise VersionError(
                f"An amendment changes {name[:80]!r}, which this release can't: install the "
                "release that the run's creator names."
            )
    if ("run.admission" in settings) != ("run.members" in settings):
        raise RecordError(
            "An amendment of who may join names both admission and members, or it is refused."
        )
    members = settings.get("run.members", [])
    if settings.get("run.admission", "open") not in ADMISSIONS or not _is_list_of_texts(members):
        raise RecordError("An amendment of who may join that is none is refused.")
    return found


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, str) for one in cast("list[object]", value)
    )


def _with_admission(spec: RunSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """An amendment names all that may join: storers of the DHT know the chain, not the run."""
    if not {"run.admission", "run.members"} & settings.keys():
        return dict(settings)
    admission = settings.get("run.admission", spec.run.admission)
    kept = list(spec.run.members) if admission == "list" else []
    members = settings.get("run.members", kept)
    return {**settings, "run.admission": admission, "run.members": members}


def _chain(run_id: str, links: tuple[Amendment, ...]) -> Chain:
    """The envelope is made anew, so nobody can pad it."""
    told = [
        {"document": link.document.decode(), "signature": link.signature.hex()} for link in links
    ]
    return Chain(run_id, links, json.dumps(told, separators=(",", ":")).encode())


def _brief(value: object) -> str:
    return (
        f"{len(cast('list[object]', value))} peers" if isinstance(value, list) else str(value)[:80]
    )
