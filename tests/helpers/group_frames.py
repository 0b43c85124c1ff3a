"""Frames by which members of a group agree, right or not."""

from collections.abc import Iterable

from lowcomm_protocol.messages import exchange_pb2 as pb


def roll(peers: Iterable[str]) -> pb.Frame:
    return pb.Frame(roll=pb.Roll(peers=peers))


def members(peers: Iterable[str]) -> pb.Frame:
    return pb.Frame(members=pb.Members(peers=peers))


def held(digests: Iterable[bytes]) -> pb.Frame:
    return pb.Frame(held=pb.Held(digests=digests))


def commit(applied: Iterable[bool], known: Iterable[bool]) -> pb.Frame:
    return pb.Frame(commit=pb.Commit(applied=applied, known=known))
