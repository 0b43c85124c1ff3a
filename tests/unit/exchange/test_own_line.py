"""What must hold when contents do not come: one peer is slow, several in a row are our own line."""

from lowcomm_protocol.exchange.position import OwnLine


def test_one_peer_that_stalls_is_to_blame_however_often():
    line = OwnLine()
    assert [line.stalled("a") for _ in range(3)] == [True] * 3
    assert line.trouble is None


def test_several_in_a_row_are_our_own_line_and_that_is_told():
    line = OwnLine()
    assert [line.stalled(peer) for peer in "abcab"] == [True, False, False, False, False]
    assert line.trouble is not None and "3 peers" in line.trouble and "doctor" in line.trouble


def test_what_comes_whole_clears_our_line():
    line = OwnLine()
    for peer in "ab":
        line.stalled(peer)
    line.came()
    assert line.trouble is None
    assert line.stalled("b"), "so the next one is slow itself"
