"""The whole catalogue, by the kind of code."""

from collections.abc import Mapping

from lowcomm_node.catalogue.errors import ERRORS
from lowcomm_node.catalogue.exchanges import EXCHANGES
from lowcomm_node.catalogue.message import Message
from lowcomm_node.catalogue.refusals import REFUSALS
from lowcomm_node.catalogue.waits import PHASES, WAITS
from lowcomm_node.catalogue.warnings import WARNINGS

CATALOGUE: Mapping[str, Mapping[str, Message]] = {
    "phases": PHASES,
    "waits": WAITS,
    "warnings": WARNINGS,
    "exchanges": EXCHANGES,
    "errors": ERRORS,
    "refusals": REFUSALS,
}
