"""What daemon and trainer share.

Typed messages go over a socket (``messages.py``), coded fragments through shared memory
(``arena.py``). Nothing here loads torch.
"""
