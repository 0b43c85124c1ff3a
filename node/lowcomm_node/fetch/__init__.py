"""State, tokenizer and weights from other peers, piece by piece, from several at once.

engine.py     the taking end: sessions with a few peers, and what a download is
state.py      a state under download          files.py      files of the run
catch_up.py   when a late peer copies, from whom; weights for an average
giving.py     the giving end: who is served, and who waits
"""
