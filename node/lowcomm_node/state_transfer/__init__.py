"""A peer's state for those that join or have drifted: in pieces, from several donors at once.

donor.py      the donor's side                   queue.py       whom a donor serves, and who waits
readahead.py  ... reads requests as they come    catch_up.py    when a late peer copies, and from whom
fetch.py      the joiner's side                  download.py    which pieces are here, and go together
rest.py       how long to wait between copies for a drift
"""
