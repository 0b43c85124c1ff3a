"""The trainer: tensors. It trains one replica, captures and codes fragments, and takes outer steps.

It runs in a process of its own (``node/host.py``); ``node/ipc.py`` connects it with the daemon.
"""
