"""The trainer: tensors. It trains one replica, captures and codes fragments, and takes outer steps.

It runs in a process of its own (``host.py``). Daemon and trainer exchange typed messages over a
socket (``messages.py``) and coded fragments through shared memory (``arena.py``).
"""
