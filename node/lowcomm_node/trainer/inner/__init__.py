"""One inner step, cut to what the device holds: micro-batches, and batches prepared ahead."""
