"""Records to JSON and back, for ``--json``, the API and its clients."""

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from lowcomm_node.errors import Unhealthy

T = TypeVar("T")


_ANYTHING = TypeAdapter[Any](Any)


def to_json(record: object) -> Any:
    """Records as JSON has them, in dictionaries and lists; a number that is not finite is null."""
    return _ANYTHING.dump_python(record, mode="json")


def read(kind: type[T], told: object) -> T:
    """What a node has told, as a record. Fields that only a newer node tells are ignored.

    Raises Unhealthy if a field is missing or of another type.
    """
    try:
        return _reader(kind).validate_python(told)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise Unhealthy(
            f"The node's answer can't be read ({place}: {first['msg']}): node and command are of "
            "different releases. Start the node again with the release of this command."
        ) from None


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
