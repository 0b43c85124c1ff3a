"""What a node remembers of a run, so that it can be looked at later: a SQLite file in its home."""
