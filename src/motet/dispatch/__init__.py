"""Decisions of a step and the moves that they imply: all that a user's own training loop needs from Motet.

orchestrator = Orchestrator(costs, num_ranks, balanced)     which phases are balanced, at what cost of which work
decision = orchestrator.decide(lengths)                     one Assignment a phase, the same on all ranks
batch = assemble(decision, lengths, rank, sequences, media) what this rank computes
rows = exchange(features, batch.routes["image"], group)     encoder outputs to the backbone's ranks, with autograd

The words are in docs/glossary.md.
"""

from motet.assign.orchestrator import Decision, Orchestrator
from motet.balance import ItemWork, LengthWork, Link, Network, Packed, Padded, StepTimes
from motet.dispatch.batch import PackedSequences, RankBatch, assemble, pack
from motet.dispatch.carrier import Carrier
from motet.dispatch.config import BalanceConfig, LengthCostConfig, SpeedConfig
from motet.dispatch.exchange import exchange, exchange_rows
from motet.dispatch.items import ExchangedItems, ItemExchange
from motet.dispatch.loaded import LoadedExample, Measure
from motet.dispatch.route import GatherRoute, Route, compose_route

__all__ = [
    "BalanceConfig",
    "Carrier",
    "Decision",
    "ExchangedItems",
    "GatherRoute",
    "ItemExchange",
    "ItemWork",
    "LengthCostConfig",
    "LengthWork",
    "Link",
    "LoadedExample",
    "Measure",
    "Network",
    "Orchestrator",
    "Packed",
    "PackedSequences",
    "Padded",
    "RankBatch",
    "Route",
    "SpeedConfig",
    "StepTimes",
    "assemble",
    "compose_route",
    "exchange",
    "exchange_rows",
    "pack",
]
