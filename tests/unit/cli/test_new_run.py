"""``create`` tells which servers keep a run, and what to do where none does."""

from lowcomm_node.cli.new_run import keeping_in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import Keeping, read_kept

DAY = 86_400.0


def test_it_tells_how_many_servers_keep_a_run_and_for_how_long():
    kept = {
        "12D3KooWaaaaaa": Keeping(kept=True, seconds=DAY),
        "12D3KooWbbbbbb": Keeping(reason="has no room"),
    }
    told = keeping_in_words(kept)
    assert "kept by 1 of 2 servers, for 24 h without a peer" in told
    assert "bbbbbb does not keep it: has no room" in told
    assert "no server" not in told
    assert "for good" in keeping_in_words({"12D3KooWaaaaaa": Keeping(kept=True)})


def test_where_no_server_keeps_it_the_remedy_is_named():
    told = keeping_in_words({"12D3KooWaaaaaa": Keeping(reason="this server has no room for it")})
    assert told.startswith(
        "aaaaaa does not keep it: this server has no room for it\nno server keeps it"
    )
    assert "--peers" in told and "--run" in told


def test_what_a_server_tells_travels_and_is_safe_to_show():
    for keeping in (Keeping(kept=True, seconds=DAY), Keeping(kept=True), Keeping(reason="full")):
        assert read_kept(pb.Kept.FromString(keeping.to_message().SerializeToString())) == keeping
    assert "\x1b" not in read_kept(pb.Kept(reason="\x1b[2J" + "x" * 999)).reason
