"""Models: how they are built, loaded from a checkpoint, and sampled from."""
