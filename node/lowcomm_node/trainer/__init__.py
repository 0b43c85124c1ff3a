"""The trainer: tensors. It trains one replica, captures and codes fragments, and takes outer steps.

It runs in a process of its own (``supervision/host.py``); ``ipc/`` connects it with the daemon.
"""
