"""A replica's state for peers that copy it: in pieces, each with its digest."""
