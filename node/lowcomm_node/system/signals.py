"""Signals that ask a process to end."""

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP of a terminal that closes, unless ``nohup`` has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
