"""What must hold for frames with a chunk: they are what protobuf reads and writes."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from helpers.tunnelling import whole
from lowcomm_node.net.stream import ChunkFrame, read_frame, write_frame
from lowcomm_protocol.messages import exchange_pb2 as pb


def message(offset: int, data: bytes) -> pb.Frame:
    return pb.Frame(chunk=pb.Chunk(offset=offset, data=data))


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 2**32, 2**63 - 1])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 2**14, 2**20])
def test_a_chunk_is_written_as_protobuf_does_and_read_back(offset: int, size: int):
    frame, data = ChunkFrame(offset, memoryview(b"x" * size)), b"x" * size
    wanted = message(offset, data)
    assert write_frame(frame) == write_frame(wanted) == wanted.SerializeToString()
    assert frame.ByteSize() == wanted.ByteSize()
    assert whole(frame) == wanted
    back = read_frame(write_frame(frame))
    assert back.WhichOneof("kind") == "chunk"
    assert (back.chunk.offset, bytes(back.chunk.data)) == (offset, data)
    assert isinstance(back, ChunkFrame) == bool(size)


@given(
    st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(lambda rest: b"\x2a" + rest),
        st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=20), st.binary(max_size=4)).map(
            lambda one: message(*one[:2]).SerializeToString() + one[2]
        ),
        st.tuples(st.binary(max_size=12), st.binary(max_size=12)).map(
            lambda one: b"\x2a" + bytes([len(one[0] + one[1])]) + one[0] + b"\x12" + one[1]
        ),
    )
)
def test_whatever_comes_is_read_as_protobuf_reads_it(data: bytes):
    try:
        wanted = pb.Frame.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            read_frame(data)
        return
    got = read_frame(data)
    assert whole(got) == wanted
