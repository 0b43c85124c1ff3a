"""``sync.fragments = "auto"`` in a run.toml: a number is put in its place before the run is signed.
So a document always holds a number, and every release reads it."""

from lowcomm_protocol.errors import SpecError

AUTO = "auto"
VALUES, MOST_VALUES = 16_000_000, 64_000_000
"""Of a fragment: about so many, 64 MB in fp32, so that what exchanges hold stays small beside the
model; and at most so many."""


def fragment_count(parameters: int, interval: int, least: int) -> int:
    """How many fragments a model of so many parameters is cut into: ``least``, or more.

    There are no more than steps in an ``interval``, or two would be due at once. Raises SpecError
    where that leaves them too large.
    """
    count = min(interval, max(least, -(-parameters // VALUES)))
    if parameters > count * MOST_VALUES:
        raise SpecError(
            f'fragments = "auto": {parameters:,} parameters in interval = {interval} fragments are '
            f"more than {MOST_VALUES:,} values each: set interval = "
            f"{-(-parameters // MOST_VALUES)} or more"
        )
    return count
