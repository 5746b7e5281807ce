"""Functions that take a Program and return one with more or fewer actions, one a file. Each can be used alone."""

from motet.schedule.passes.absent import Presence, without_absent
from motet.schedule.passes.communication import add_communication
from motet.schedule.passes.exchange import add_exchanges
from motet.schedule.passes.fsdp import Sharding, add_fsdp
from motet.schedule.passes.parts import split_parts
from motet.schedule.passes.recompute import add_recompute

__all__ = [
    "Presence",
    "Sharding",
    "add_communication",
    "add_exchanges",
    "add_fsdp",
    "add_recompute",
    "split_parts",
    "without_absent",
]
