"""Amendments: what the creator of a run changes while it trains (docs/specification.md).

All amendments of a run form a signed chain, which peers pass on whole. Of two chains the longer one
holds. The settings at a swarm step follow from run, chain and step alone (`SpecTimeline`). Peers on
both sides of an amendment can still exchange: the run id, the plan and the codec never change.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from lowcomm_protocol.errors import LowcommError, Reason, RecordError, SpecError, VersionError
from lowcomm_protocol.identity import Identity, verify
from lowcomm_protocol.spec.document import encode
from lowcomm_protocol.spec.run import SHARES, RunSpec, SignedRun, amended

SCHEDULE = (
    *("run.steps", "train.learning_rate", "train.final_learning_rate"),
    *("train.warmup", "train.schedule", "train.decay", SHARES),
)
"""What changes training; `SHARES`: new shares of all ``data.parts``, in their order."""
AMENDABLE = (*SCHEDULE, "sync.cells", "run.description", "run.admission", "run.members")
MAX_AMENDMENTS = 32
MAX_CHAIN_BYTES = 20 * 1024
"""Of an encoded chain."""
MAX_STEP = 100_000_000
_PURPOSE = "amendment"
_WHO_MAY_JOIN = TypeAdapter(tuple[Literal["open", "invite", "list"], list[str]])


@dataclass(frozen=True)
class Amendment:
    """One change of a run."""

    number: int
    """From 1."""
    at: int
    """The swarm step from which it holds."""
    settings: Mapping[str, Any]
    """New values by name, as in `AMENDABLE`."""
    document: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {_shortened(value)}" for name, value in self.settings.items())
        when = f" from swarm step {self.at}" if self.at else ""
        return f"amendment {self.number}: {values}{when}"

    def to_json(self) -> dict[str, Any]:
        """As in ``status`` and in events."""
        return {"number": self.number, "at": self.at, "settings": dict(self.settings)}


class _Document(BaseModel):
    """The signed part of an amendment."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: Annotated[str, Field(min_length=64, max_length=64)]
    number: int
    previous: str
    """SHA-256 of the document before it; the first has the run id."""
    at: Annotated[int, Field(ge=0, le=MAX_STEP)]
    settings: Annotated[dict[str, Any], Field(min_length=1)]


@dataclass(frozen=True)
class Chain:
    """All amendments of one run, by number."""

    run_id: str = ""
    links: tuple[Amendment, ...] = ()
    data: bytes = field(default=b"", repr=False)
    """Encoded; empty without amendments."""

    @property
    def order(self) -> tuple[int, bytes]:
        """Of two chains the one with the higher order holds."""
        # An honest creator never signs two chains of one length. If one does, the digest makes all
        # peers take the same.
        return len(self.links), sha256(self.data).digest() if self.data else b""

    @property
    def admissions(self) -> tuple[tuple[int, Any, frozenset[str]], ...]:
        """Who may join, as (first swarm step, admission, members), in order of steps."""
        changing = (link for link in self.links if "run.admission" in link.settings)
        return tuple(
            (link.at, link.settings["run.admission"], frozenset(link.settings["run.members"]))
            for link in changing
        )


class SpecTimeline:
    """The settings of a run over its swarm steps."""

    def __init__(self, spec: RunSpec, chain: Chain | None = None) -> None:
        """Raises SpecError if an amendment makes the specification invalid."""
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
        """The settings after the last amendment."""
        return self._specs[-1]

    @property
    def longest(self) -> int:
        """The largest ``run.steps`` that the run has had or will have."""
        return max(spec.run.steps for spec in self._specs)

    def is_over(self, swarm_step: int) -> bool:
        """Whether the run has ended by a swarm step."""
        return swarm_step >= self.at(swarm_step).run.steps


def write_amendment(
    creator: Identity, run: SignedRun, chain: Chain, at: int, settings: Mapping[str, Any]
) -> Chain:
    """The chain with one more amendment, signed.

    Raises SpecError if it is not allowed, makes the specification invalid, or makes the chain long.
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
    previous = sha256(chain.links[-1].document).hexdigest() if chain.links else run.run_id
    complete = _with_admission(SpecTimeline(run.spec, chain).last, settings)
    content = _Document(
        run=run.run_id, number=len(chain.links) + 1, previous=previous, at=at, settings=complete
    )
    document = encode(content.model_dump())
    signature = creator.sign(_PURPOSE, document)
    link = Amendment(content.number, at, complete, document, signature)
    longer = _chain(run.run_id, (*chain.links, link))
    if len(longer.data) > MAX_CHAIN_BYTES:
        raise SpecError(
            f"All amendments together would have {len(longer.data)} bytes, more than "
            f"{MAX_CHAIN_BYTES}: name fewer members, or create a new run."
        )
    SpecTimeline(run.spec, longer)  # raises where the outcome is no valid specification
    return longer


def _with_admission(spec: RunSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with both admission and members if either changes."""
    # DHT nodes check who may join. They know the chain but not the run, so an amendment of the one
    # without the other would mean nothing to them.
    if not {"run.admission", "run.members"} & settings.keys():
        return dict(settings)
    admission = settings.get("run.admission", spec.run.admission)
    kept = list(spec.run.members) if admission == "list" else []
    members = settings.get("run.members", kept)
    return {**settings, "run.admission": admission, "run.members": members}


def read_chain(data: bytes, creator: str) -> Chain:
    """Decode a chain, and check form, order and the signatures of ``creator``.

    Raises RecordError, SignatureError, or VersionError for a setting that this release can't
    change.
    """
    links: list[Amendment] = []
    run_id = previous = ""
    for number, (document, signature) in enumerate(_decode(data), 1):
        content = _read_document(document)
        run_id = run_id or content.run
        place = run_id, number, previous or run_id
        if (content.run, content.number, content.previous) != place:
            raise RecordError("Amendments that are no chain are refused.")
        verify(creator, _PURPOSE, document, signature)
        if links and content.at < links[-1].at:
            raise RecordError("Amendments that come into force out of their order are refused.")
        links.append(Amendment(number, content.at, content.settings, document, signature))
        previous = sha256(document).hexdigest()
    return _chain(run_id, tuple(links))


def newest(spec: RunSpec, run_id: str, chains: Sequence[bytes]) -> SpecTimeline:
    """The timeline by the best valid one of several encoded chains; ``spec``: without them."""
    course = SpecTimeline(spec)
    for data in filter(None, chains):
        try:
            chain = read_chain(data, spec.run.creator)
            if chain.run_id == run_id and chain.order > course.chain.order:
                course = SpecTimeline(spec, chain)
        except LowcommError:
            continue
    return course


def _chain(run_id: str, links: tuple[Amendment, ...]) -> Chain:
    # Encoded anew, not as it came: otherwise anybody could pad a chain, and every copy would have
    # an order of its own.
    pairs = [
        {"document": link.document.decode(), "signature": link.signature.hex()} for link in links
    ]
    return Chain(run_id, links, json.dumps(pairs, separators=(",", ":")).encode())


def _decode(data: bytes) -> list[tuple[bytes, bytes]]:
    """The documents and signatures of an encoded chain; nothing else is checked."""
    if len(data) > MAX_CHAIN_BYTES:
        raise RecordError(
            f"Amendments of {len(data)} bytes are refused: at most {MAX_CHAIN_BYTES}.",
            reason=Reason.TOO_LARGE,
        )
    try:
        pairs = [
            (str(entry["document"]).encode(), bytes.fromhex(entry["signature"]))
            for entry in json.loads(data)
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        pairs = []
    if not 1 <= len(pairs) <= MAX_AMENDMENTS:
        raise RecordError(f"Amendments are refused: expected 1 to {MAX_AMENDMENTS}, each signed.")
    return pairs


def _read_document(document: bytes) -> _Document:
    """Check form, types and ranges of an amendment."""
    try:
        content = _Document.model_validate(json.loads(document))
        # One content has one form: else there were several digests of it to chain to.
        is_canonical = encode(content.model_dump()) == document
    except (ValueError, RecursionError):
        raise RecordError("An amendment that is malformed is refused.") from None
    if not is_canonical:
        raise RecordError("An amendment that is not in its canonical form is refused.")
    for name in content.settings:
        if name not in AMENDABLE:
            raise VersionError(
                f"An amendment changes {name[:80]!r}, which this release can't: install the "
                "release that the run's creator names."
            )
    names = ("run.admission", "run.members")
    changed = tuple(content.settings[name] for name in names if name in content.settings)
    try:
        if changed:
            _WHO_MAY_JOIN.validate_python(changed, strict=True)
    except ValueError:
        raise RecordError(
            "An amendment of who may join names a valid admission and its members, or it is "
            "refused."
        ) from None
    return content


def _shortened(value: object) -> str:
    values = cast("list[object]", value) if isinstance(value, list) else []
    are_peers = any(isinstance(one, str) for one in values)
    return f"{len(values)} peers" if are_peers or value == [] else str(cast("object", value))[:80]
