"""Chunks pass around protobuf: the bytes are the same, and nothing is read that protobuf would not
read alike."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from lowcomm_node.transport.chunks import ChunkFrame, chunk_frame, read_frame, write_frame
from lowcomm_protocol.messages import exchange_pb2 as pb

OFFSETS = st.integers(0, 2**63 - 1)
DATA = st.binary(max_size=300)


def by_protobuf(offset: int, data: bytes) -> bytes:
    """A chunk as any other implementation writes it."""
    return pb.Frame(chunk=pb.Chunk(offset=offset, data=data)).SerializeToString()


def meaning(data: bytes) -> tuple[object, ...] | None:
    """What protobuf makes of these bytes; None: they are no frame."""
    try:
        frame = pb.Frame.FromString(data)
    except DecodeError:
        return None
    if frame.WhichOneof("kind") == "chunk":
        return "chunk", frame.chunk.offset, frame.chunk.data
    return (frame.WhichOneof("kind"), frame.SerializeToString(deterministic=True))


@given(OFFSETS, DATA)
def test_a_chunk_travels_as_protobuf_writes_it(offset, data):
    frame = chunk_frame(offset, memoryview(data))
    assert write_frame(frame) == by_protobuf(offset, data)
    assert frame.ByteSize() == len(by_protobuf(offset, data))


@given(OFFSETS, DATA.filter(bool))
def test_a_chunk_is_read_without_a_copy(offset, data):
    told = by_protobuf(offset, data)
    frame = read_frame(told)
    assert isinstance(frame, ChunkFrame)
    assert (frame.WhichOneof("kind"), frame.chunk.offset) == ("chunk", offset)
    assert frame.chunk.data == data and frame.chunk.data.obj is told
    assert frame.ByteSize() == len(told)


BYTES = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from(b"\x2a\x08\x12\x00\x01\x02\x03\x7f\x80\xff"), max_size=24).map(bytes),
)


@given(BYTES)
@example(b"")
@example(b"\x2a")
@example(b"\x2a\x03\x12\x01a\x2a\x00")  # a second chunk, which protobuf merges into the first
@example(b"\x2a\x07\x08\x05\x08\x06\x12\x01a")  # the last offset holds
@example(b"\x2a\x0c\x08" + b"\xff" * 9 + b"\x01\x12\x00")  # 64 bits
@example(b"\x2a\x02\x12\x00")
@example(b"\x2a\x05\x12\x01a\x08\x05")  # in another order
@example(b"\x2a\x05\x12\x83\x00abc")
def test_whatever_comes_is_read_as_protobuf_reads_it(data):
    try:
        frame = read_frame(data)
    except DecodeError:
        assert meaning(data) is None
        return
    if isinstance(frame, ChunkFrame):
        assert meaning(data) == ("chunk", frame.offset, bytes(frame.data))
    else:
        assert meaning(data) is not None


@pytest.mark.parametrize("frame", [pb.Frame(), pb.Frame(abandon=pb.Abandon(reason="no more"))])
def test_other_frames_are_left_to_protobuf(frame):
    assert read_frame(write_frame(frame)) == frame
