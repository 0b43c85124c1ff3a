"""Follows a journal into another program: TensorBoard, Weights & Biases, Trackio, or a collector of
OpenTelemetry traces.

    journal ─► batches.py ─► Batch ─► a Sink ─► position.py

A sink is told everything once, in the order of time, and the position is kept beside the journal.
So a tracker may be stopped, killed or without a network: the next start goes on where the last one
ended. The node knows nothing of it.
"""
