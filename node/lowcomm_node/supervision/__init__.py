"""The trainer's process from outside: its start, what it is asked, and what follows its end.

The child process begins in ``host.py``; ``process.py`` is the daemon's end of it.
"""
