from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHOLE: _ClassVar[Part]
    SHARE: _ClassVar[Part]
    MEAN: _ClassVar[Part]
    MISSED: _ClassVar[Part]
    SLOW: _ClassVar[Part]
WHOLE: Part
SHARE: Part
MEAN: Part
MISSED: Part
SLOW: Part

class Frame(_message.Message):
    __slots__ = ("hello", "accept", "refuse", "content", "chunk", "confirm", "abandon", "resend", "roll", "members", "held", "commit", "ask")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    hello: Offer
    accept: Offer
    refuse: Refuse
    content: Content
    chunk: Chunk
    confirm: Confirm
    abandon: Abandon
    resend: Resend
    roll: Roll
    members: Members
    held: Held
    commit: Commit
    ask: Ask
    def __init__(self, hello: _Optional[_Union[Offer, _Mapping]] = ..., accept: _Optional[_Union[Offer, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., resend: _Optional[_Union[Resend, _Mapping]] = ..., roll: _Optional[_Union[Roll, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("protocol", "run_id", "plan", "codec", "fragment", "round", "swarm_step", "steps", "tokens", "version", "slow_digest", "seconds", "momentum_digest", "previous")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SWARM_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOW_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    plan: bytes
    codec: str
    fragment: int
    round: int
    swarm_step: int
    steps: int
    tokens: int
    version: int
    slow_digest: bytes
    seconds: int
    momentum_digest: bytes
    previous: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., plan: _Optional[bytes] = ..., codec: _Optional[str] = ..., fragment: _Optional[int] = ..., round: _Optional[int] = ..., swarm_step: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., version: _Optional[int] = ..., slow_digest: _Optional[bytes] = ..., seconds: _Optional[int] = ..., momentum_digest: _Optional[bytes] = ..., previous: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("fragment", "start", "codes")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    start: int
    codes: bytes
    def __init__(self, fragment: _Optional[int] = ..., start: _Optional[int] = ..., codes: _Optional[bytes] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("size", "digest", "part")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    size: int
    digest: bytes
    part: Part
    def __init__(self, size: _Optional[int] = ..., digest: _Optional[bytes] = ..., part: _Optional[_Union[Part, str]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Resend(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: bytes
    def __init__(self, members: _Optional[bytes] = ...) -> None: ...

class Roll(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("applied", "known")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    applied: _containers.RepeatedScalarFieldContainer[bool]
    known: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, applied: _Optional[_Iterable[bool]] = ..., known: _Optional[_Iterable[bool]] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("enter", "wanted")
    ENTER_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    enter: Enter
    wanted: Wanted
    def __init__(self, enter: _Optional[_Union[Enter, _Mapping]] = ..., wanted: _Optional[_Union[Wanted, _Mapping]] = ...) -> None: ...

class Enter(_message.Message):
    __slots__ = ("file", "state", "pack", "listed")
    FILE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    file: bytes
    state: bytes
    pack: bytes
    listed: bool
    def __init__(self, file: _Optional[bytes] = ..., state: _Optional[bytes] = ..., pack: _Optional[bytes] = ..., listed: _Optional[bool] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("piece", "offset", "size")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    piece: int
    offset: int
    size: int
    def __init__(self, piece: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("position", "opened", "chunk")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    position: int
    opened: Opened
    chunk: Chunk
    def __init__(self, position: _Optional[int] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("name", "size", "here")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    size: int
    here: bytes
    def __init__(self, name: _Optional[bytes] = ..., size: _Optional[int] = ..., here: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run_id", "plan", "swarm_step", "moments", "versions", "slow_digests", "digests")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SWARM_STEP_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SLOW_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    plan: bytes
    swarm_step: int
    moments: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    slow_digests: _containers.RepeatedScalarFieldContainer[bytes]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run_id: _Optional[bytes] = ..., plan: _Optional[bytes] = ..., swarm_step: _Optional[int] = ..., moments: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., slow_digests: _Optional[_Iterable[bytes]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("record", "uses", "amendments", "pulse", "known_ms", "wants_links", "full", "passed", "removals", "removal_list")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_MS_FIELD_NUMBER: _ClassVar[int]
    WANTS_LINKS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_LIST_FIELD_NUMBER: _ClassVar[int]
    record: SignedRecord
    uses: _containers.RepeatedCompositeFieldContainer[Use]
    amendments: bytes
    pulse: SignedRecord
    known_ms: int
    wants_links: int
    full: bool
    passed: _containers.RepeatedCompositeFieldContainer[SignedRecord]
    removals: int
    removal_list: bytes
    def __init__(self, record: _Optional[_Union[SignedRecord, _Mapping]] = ..., uses: _Optional[_Iterable[_Union[Use, _Mapping]]] = ..., amendments: _Optional[bytes] = ..., pulse: _Optional[_Union[SignedRecord, _Mapping]] = ..., known_ms: _Optional[int] = ..., wants_links: _Optional[int] = ..., full: _Optional[bool] = ..., passed: _Optional[_Iterable[_Union[SignedRecord, _Mapping]]] = ..., removals: _Optional[int] = ..., removal_list: _Optional[bytes] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("peer_id", "issued_ms", "phase", "swarm_step", "steps", "tokens_per_second", "tokens", "held_out_loss", "exchanges", "reading", "gives_text", "bits")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_MS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SWARM_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_LOSS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    GIVES_TEXT_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    issued_ms: int
    phase: str
    swarm_step: int
    steps: int
    tokens_per_second: float
    tokens: int
    held_out_loss: float
    exchanges: int
    reading: bytes
    gives_text: bool
    bits: int
    def __init__(self, peer_id: _Optional[str] = ..., issued_ms: _Optional[int] = ..., phase: _Optional[str] = ..., swarm_step: _Optional[int] = ..., steps: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., tokens: _Optional[int] = ..., held_out_loss: _Optional[float] = ..., exchanges: _Optional[int] = ..., reading: _Optional[bytes] = ..., gives_text: _Optional[bool] = ..., bits: _Optional[int] = ...) -> None: ...

class SignedRecord(_message.Message):
    __slots__ = ("payload", "signature")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signature: bytes
    def __init__(self, payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("protocol", "run_id", "peer_id", "issued_ms", "expires_ms", "phase", "addresses", "certificate", "swarm_step", "steps", "tokens_per_second", "entry_points", "claim", "report", "reading", "gives_text")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SWARM_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ENTRY_POINTS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    GIVES_TEXT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    peer_id: str
    issued_ms: int
    expires_ms: int
    phase: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    certificate: bytes
    swarm_step: int
    steps: int
    tokens_per_second: float
    entry_points: _containers.RepeatedScalarFieldContainer[str]
    claim: bytes
    report: SelfReport
    reading: bytes
    gives_text: bool
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., peer_id: _Optional[str] = ..., issued_ms: _Optional[int] = ..., expires_ms: _Optional[int] = ..., phase: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., certificate: _Optional[bytes] = ..., swarm_step: _Optional[int] = ..., steps: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., entry_points: _Optional[_Iterable[str]] = ..., claim: _Optional[bytes] = ..., report: _Optional[_Union[SelfReport, _Mapping]] = ..., reading: _Optional[bytes] = ..., gives_text: _Optional[bool] = ...) -> None: ...

class PiecesRead(_message.Message):
    __slots__ = ("run_id", "peer_id", "issued_ms", "part", "epoch", "pieces")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_MS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    peer_id: str
    issued_ms: int
    part: int
    epoch: int
    pieces: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., peer_id: _Optional[str] = ..., issued_ms: _Optional[int] = ..., part: _Optional[int] = ..., epoch: _Optional[int] = ..., pieces: _Optional[bytes] = ...) -> None: ...

class SelfReport(_message.Message):
    __slots__ = ("name", "release", "tokens", "held_out_loss", "exchanges", "sample", "sample_step")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_LOSS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    release: str
    tokens: int
    held_out_loss: float
    exchanges: int
    sample: str
    sample_step: int
    def __init__(self, name: _Optional[str] = ..., release: _Optional[str] = ..., tokens: _Optional[int] = ..., held_out_loss: _Optional[float] = ..., exchanges: _Optional[int] = ..., sample: _Optional[str] = ..., sample_step: _Optional[int] = ...) -> None: ...

class Credential(_message.Message):
    __slots__ = ("caller", "callee", "run_id", "issued_ms", "nonce", "claim")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CALLEE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_MS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    caller: str
    callee: str
    run_id: bytes
    issued_ms: int
    nonce: bytes
    claim: bytes
    def __init__(self, caller: _Optional[str] = ..., callee: _Optional[str] = ..., run_id: _Optional[bytes] = ..., issued_ms: _Optional[int] = ..., nonce: _Optional[bytes] = ..., claim: _Optional[bytes] = ...) -> None: ...

class SignedCredential(_message.Message):
    __slots__ = ("payload", "signature")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signature: bytes
    def __init__(self, payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("run_id", "key", "expires_ms", "uses", "peer_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    key: bytes
    expires_ms: int
    uses: int
    peer_id: str
    def __init__(self, run_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., expires_ms: _Optional[int] = ..., uses: _Optional[int] = ..., peer_id: _Optional[str] = ...) -> None: ...

class SignedInvite(_message.Message):
    __slots__ = ("payload", "signature")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signature: bytes
    def __init__(self, payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("invite", "claimed_ms", "signature")
    INVITE_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_MS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    invite: SignedInvite
    claimed_ms: int
    signature: bytes
    def __init__(self, invite: _Optional[_Union[SignedInvite, _Mapping]] = ..., claimed_ms: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Use(_message.Message):
    __slots__ = ("peer_id", "claim")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    claim: bytes
    def __init__(self, peer_id: _Optional[str] = ..., claim: _Optional[bytes] = ...) -> None: ...

class Uses(_message.Message):
    __slots__ = ("uses",)
    USES_FIELD_NUMBER: _ClassVar[int]
    uses: _containers.RepeatedCompositeFieldContainer[Use]
    def __init__(self, uses: _Optional[_Iterable[_Union[Use, _Mapping]]] = ...) -> None: ...

class InviteToken(_message.Message):
    __slots__ = ("invite", "secret")
    INVITE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    invite: SignedInvite
    secret: bytes
    def __init__(self, invite: _Optional[_Union[SignedInvite, _Mapping]] = ..., secret: _Optional[bytes] = ...) -> None: ...

class RemovalList(_message.Message):
    __slots__ = ("run_id", "version", "keys")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    version: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run_id: _Optional[bytes] = ..., version: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SignedRemovalList(_message.Message):
    __slots__ = ("payload", "signature")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signature: bytes
    def __init__(self, payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("content", "wanted")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    wanted: int
    def __init__(self, content: _Optional[bytes] = ..., wanted: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("content", "refused")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    refused: str
    def __init__(self, content: _Optional[bytes] = ..., refused: _Optional[str] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("look", "dial_back", "ping", "keep")
    LOOK_FIELD_NUMBER: _ClassVar[int]
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    look: Look
    dial_back: DialBack
    ping: Ping
    keep: Keep
    def __init__(self, look: _Optional[_Union[Look, _Mapping]] = ..., dial_back: _Optional[_Union[DialBack, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("seen", "dialed_back", "pong", "refused", "kept")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    DIALED_BACK_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    seen: Seen
    dialed_back: DialedBack
    pong: Pong
    refused: str
    kept: Kept
    def __init__(self, seen: _Optional[_Union[Seen, _Mapping]] = ..., dialed_back: _Optional[_Union[DialedBack, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., refused: _Optional[str] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("run_id", "only_tell")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_TELL_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    only_tell: bool
    def __init__(self, run_id: _Optional[bytes] = ..., only_tell: _Optional[bool] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("kept", "seconds", "reason", "swarm_step", "own")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SWARM_STEP_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    seconds: int
    reason: str
    swarm_step: int
    own: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kept: _Optional[bool] = ..., seconds: _Optional[int] = ..., reason: _Optional[str] = ..., swarm_step: _Optional[int] = ..., own: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Look(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Seen(_message.Message):
    __slots__ = ("address", "time_ms", "entry_points")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_POINTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    time_ms: int
    entry_points: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[str] = ..., time_ms: _Optional[int] = ..., entry_points: _Optional[_Iterable[str]] = ...) -> None: ...

class DialBack(_message.Message):
    __slots__ = ("peer_id", "targets")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    def __init__(self, peer_id: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("kind", "port", "certificate")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DIRECT: _ClassVar[Target.Kind]
        TCP: _ClassVar[Target.Kind]
        QUIC: _ClassVar[Target.Kind]
    DIRECT: Target.Kind
    TCP: Target.Kind
    QUIC: Target.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    kind: Target.Kind
    port: int
    certificate: bytes
    def __init__(self, kind: _Optional[_Union[Target.Kind, str]] = ..., port: _Optional[int] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class DialedBack(_message.Message):
    __slots__ = ("reached",)
    REACHED_FIELD_NUMBER: _ClassVar[int]
    reached: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, reached: _Optional[_Iterable[bool]] = ...) -> None: ...
