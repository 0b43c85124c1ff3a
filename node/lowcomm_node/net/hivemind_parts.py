"""All that we use of hivemind, imported without the rest of it. Other modules import it from here.

The ``__init__`` of hivemind, and those of its ``utils`` and ``dht``, import torch and scipy, which
its Kademlia and its client of p2pd do not need, and a bootstrap server has not. So these three
packages are put into ``sys.modules`` without executing their ``__init__``; ``hivemind.utils`` gets
the names that other modules take from it. If hivemind was imported as a whole before, that is used.

tests/unit/net/test_hivemind_parts.py fails if an upgrade of hivemind needs more.
"""
# ruff: noqa: E402, F401

import logging
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any

_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")
_NAMES_OF_UTILS = {
    "MSGPackSerializer": "serializer",
    "SerializerBase": "serializer",
    "get_dht_time": "timed_storage",
    "get_logger": "logging",
}
"""What hivemind's modules take from ``hivemind.utils``, and the modules that define it."""


def _put_packages_in_place() -> None:
    if "hivemind" in sys.modules:
        return
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        package = sys.modules[name] = module_from_spec(spec)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    for name, module in _NAMES_OF_UTILS.items():
        known = getattr(import_module(f"hivemind.utils.{module}"), name)
        setattr(sys.modules["hivemind.utils"], name, known)


def _is_news(record: logging.LogRecord) -> bool:
    """False for asyncio's complaint about a search that hivemind cancelled. For each peer that it
    asks, hivemind/dht/traverse.py waits for an event in a task that nobody keeps."""
    text = record.getMessage()
    return not (
        text.startswith("Task was destroyed but it is pending!") and "coro=<Event.wait()" in text
    )


_put_packages_in_place()
logging.getLogger("asyncio").addFilter(_is_news)

import hivemind.proto.dht_pb2
import hivemind.proto.p2pd_pb2
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

# protobuf builds these modules at import, so a type checker can't see their contents.
dht_pb2: Any = hivemind.proto.dht_pb2
p2pd_pb2: Any = hivemind.proto.p2pd_pb2
