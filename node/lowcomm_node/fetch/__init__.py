"""State for peers that join or have drifted: in pieces, from several donors at once.

donor.py          the donor's side               queue.py       who is served, and who waits
readahead.py      reads requests as they come    catch_up.py    when a late peer copies, from whom
fetch.py          the joiner's side              download.py    which pieces are here and fit
donor_session.py  ... with one donor             replies.py       what comes on one stream
asking.py         which peers are asked, and when others take their place
"""
