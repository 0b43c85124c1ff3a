"""A run of packed text that nobody has packed: only its rules are needed."""

from lowcomm_protocol.spec.run import RunSpec

RUN = "ab" * 32


def spec_of(
    pieces: int = 64, parts: int = 1, interval: int = 8, shuffle_pieces: int = 2048
) -> RunSpec:
    """A run whose pieces have 8 windows each, as many as two steps read."""
    texts = [
        {"name": f"t{n}", "pieces": f"{n:02d}" * 32, "tokens": pieces * 8192 - 5000,
         "held_out_tokens": 8192, "piece_bytes": 16384}
        for n in range(parts)
    ]  # fmt: skip
    return RunSpec.model_validate(
        {"run": {"name": "t", "steps": 10**6}, 
         "data": {"source": "packed", "parts": texts, "shuffle_bytes": shuffle_pieces * 16384},
         "model": {"context": 1024}, "train": {"batch": 4},
         "sync": {"method": "noloco", "interval": interval}}
    )  # fmt: skip
