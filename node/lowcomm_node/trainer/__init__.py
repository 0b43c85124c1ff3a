"""The trainer: tensors. It trains one replica, captures and codes fragments, and takes outer steps.

It runs in a process of its own (``process.py``), speaks JSON lines over a socket and shares one memory file with the
daemon, through which coded fragments pass without being copied.
"""
