"""The placement of a job: which ranks run which layers, with which parallelism, recomputation and schedule.

A Plan is made once a job, by hand or by the planner. The simulator and the runtime read it alike. It contains the model
and the cluster that it was made for, so that a Plan's file is complete.

An *island* is the smallest part of a job whose ranks send to no other ranks before gradients are reduced. With g the
greatest common divisor of the units' dp, there are g equal islands, each with dp / g replicas of every unit (MMScale
section 4.1; schedule/generators/disaggregated.py). Under "data_parallel" the whole job is one island.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Annotated, Literal

from pydantic import Field

from motet.core.cluster import Cluster
from motet.core.limited import Count, NumExamples, NumRanks
from motet.core.limits import MAX_RANKS
from motet.core.nodes import ranks_by_node
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE

Policy = Literal["packed", "padded", "padded_attention"]
"""How the work of a rank's items adds up to its load (balance/costs.py; OrchMLLM section 5.1 and appendix A)."""
ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "data_parallel"]
SPLITS_BACKWARD: tuple[ScheduleKind, ...] = ("zb_h1", "zb_v")
"""The schedules in which gradients of weights wait: backward is in two passes, I and W."""
Order = Literal["given", "intra", "inter", "both"]
BalancingMethod = Literal["off", "joint", "per_phase", "auto", "split"]
MOVES_ITEMS: tuple[BalancingMethod, ...] = ("per_phase", "auto")
"""The ways of balancing under which items may be computed apart from their examples, on ranks of their own."""
MOVES_COLOCATED: tuple[BalancingMethod, ...] = (*MOVES_ITEMS, "split")
"""Those under which they may on the ranks of colocated phases ("data_parallel")."""
PROPOSED_BALANCES: tuple[BalancingMethod, ...] = ("off", "joint", "per_phase", "auto")
"""The ways that a planner tries. "split" must be asked for; what it gains is said (`planner/what_if.py`)."""
ORDERED_BALANCES: tuple[BalancingMethod, ...] = ("off", "split")
"""The ways beside which `order` may deal microbatches out. The others deal them out themselves."""
FillingMethod = Literal["static", "by_step"]
Zero = Literal[0, 1, 2, 3]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


@dataclass(frozen=True)
class Unit:
    """Ranks that run the same modules with the same parallelism: MMScale's parallelism unit (section 4.1).

    first_rank:  the unit has the ranks first_rank ... first_rank + num_ranks - 1, where
                 rank = first_rank + ((p * dp + d) * cp + c) * tp + t. Units may share ranks: encoders in the backbone's
                 bubbles do (Optimus section 3.1).
    stages:      per stage, in the order of the data, the number of layers of each module, e.g. {"image": 10}. Only
                 transformer layers count; the layers around them belong to their blocks (`Module.blocks`). A module's
                 layers go to its stages in order. With more stages than pp, a rank has several (chunks): stage s is on
                 pipeline rank s % pp (zb_v: in a V, down and up again).
    replicated:  modules that every stage computes whole, beside its own layers (Cornstarch section 2.2, Figure 1b).
    recompute:   per stage, the number of layers of each module whose activations are recomputed; () is none.
    zero:        ZeRO stage: data-parallel ranks shard nothing (0), optimizer state (1), also gradients (2), also
                 parameters (3).
    shard_size:  the number of data-parallel ranks that share one sharded copy (hybrid sharding); 0 is all.
    ep:          expert parallelism: so many ranks that follow each other among the dp * cp ones share the experts of
                 each layer, whole ones each, and exchange rows. It adds no ranks.

    Example:
        >>> unit = Unit("backbone", stages=({"backbone": 14}, {"backbone": 14}), first_rank=8, dp=2, pp=2, tp=4)
        >>> unit.num_ranks, unit.rank(p=1, d=0), unit.coordinates(21)
        (16, 16, (1, 1, 0, 1))
    """

    name: str
    stages: tuple[Mapping[str, Count], ...]
    first_rank: Rank = 0
    dp: NumRanks = 1
    pp: NumRanks = 1
    tp: NumRanks = 1
    cp: NumRanks = 1
    replicated: tuple[str, ...] = ()
    recompute: tuple[Mapping[str, Count], ...] = ()
    zero: Zero = 1
    shard_size: Annotated[int, Field(ge=0, le=MAX_RANKS)] = 0
    ep: NumRanks = 1

    @property
    def num_ranks(self) -> int:
        """The number of its ranks."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def ranks(self) -> range:
        """Its ranks of the cluster."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def rank(self, p: int, d: int, c: int = 0, t: int = 0) -> int:
        """The rank of the cluster at pipeline-, data-, context- and tensor-parallel coordinates."""
        return self.first_rank + ((p * self.dp + d) * self.cp + c) * self.tp + t

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(p, d, c, t) of one of its ranks: the inverse of `rank`."""
        rest, t = divmod(rank - self.first_rank, self.tp)
        rest, c = divmod(rest, self.cp)
        p, d = divmod(rest, self.dp)
        return p, d, c, t

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that share experts with one of its ranks, in the order of the experts that they have."""
        p, d, c, t = self.coordinates(rank)
        first = (d * self.cp + c) // self.ep * self.ep
        return tuple(self.rank(p, 0, number, t) for number in range(first, first + self.ep))

    @property
    def expert_replicas(self) -> int:
        """How many replicas, one after the other, share experts with each other, directly or not."""
        return lcm(self.cp, self.ep) // self.cp

    @property
    def waits(self) -> bool:
        """Whether its replicas wait for each other in each pass, as they gather parameters or sum gradients."""
        return self.zero > 1 and (self.shard_size or self.dp) > 1

    def expert_parts(self, rank: int) -> tuple[int, ...]:
        """The ranks that have one copy of all experts between them, this one included, in the order of their experts:
        the tensor-parallel ranks of the first of `expert_ranks`, then those of the next."""
        t = self.coordinates(rank)[-1]
        return tuple(one - t + other for one in self.expert_ranks(rank) for other in range(self.tp))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules that it computes, replicated ones first, then in the order of the data."""
        return tuple(dict.fromkeys([*self.replicated, *(name for stage in self.stages for name in stage)]))


def expert_shard_size(shard_size: int, ep: int) -> int:
    """The number of ranks that share one copy of an expert, of those that share one copy of all else.

    1, so that each of its ranks holds it whole, where these are not whole groups of `ep` ranks.
    """
    return 1 if shard_size % ep else shard_size // ep


ADAM_MOMENTS = 2
"""Numbers that AdamW keeps of each parameter: no optimizer keeps more."""
NumMoments = Annotated[int, Field(ge=0, le=ADAM_MOMENTS)]


@dataclass(frozen=True)
class Fill:
    """A part of an encoder's work in a bubble of the backbone (Optimus section 4.2).

    rank:   the program rank.
    action: the action that runs, e.g. "9F3.2".
    before: the backbone's action that follows it in the rank's compute stream, e.g. "2F5.1"; "" is the end of the step.
    """

    rank: Rank
    action: str
    before: str = ""


@dataclass(frozen=True)
class Plan:
    """A placement of a model on a cluster.

    units:           together they hold every layer of every module.
    schedule:        the order in which a pipeline rank takes its microbatches.
    batch_size:      the number of examples of a step, over all ranks.
    microbatch_size: the number of examples of a microbatch in one replica of the backbone's unit. All units take
                     the same microbatches; a unit with fewer replicas has more examples in each (MMScale section 4.2),
                     and one with more may have some items of an example (assign/pipeline.py).
    deferred_warmup: interleaved schedules only: warm-up microbatches start as late as they can without a delay
                     (Optimus Figure 12).
    balance:         the balancing method: "off", "joint", "per_phase" or "auto". Under "data_parallel" it is of
                     colocated phases; in a pipeline of whole microbatches, and of items of encoders with ranks of their
                     own (assign/pipeline_balance.py). "split" also cuts sequences that are too long for one replica of
                     the backbone over several, and items of encoders with ranks of their own over replicas of their
                     unit: under "data_parallel" where that is predicted to be faster than "auto". In a pipeline it
                     alone may stand beside an `order`.
    policy:          phases that are balanced as if they were computed otherwise than they are, and how: an ablation
                     (OrchMLLM section 8.3). What is computed stays the same.
    fills:           the encoders' work in bubbles. A fill names a microbatch by its number in the step.
    filling:         "static": `fills` hold for every step, so that what is read in a Plan is what runs. "by_step": each
                     step decides from its lengths which encoder pipeline takes which microbatch, and where its passes
                     go, in the parts in which `fills` have them; `fills` hold where that is predicted to gain nothing
                     (simulate/filling).
    order:           how each step of a pipeline orders its examples (MMScale section 5). "given": as they come.
                     "intra": replicas and microbatches get even loads. "inter": the microbatches of each replica get
                     the order with the shortest bubbles; of all replicas one order, where these share sequences.
                     "both": "intra", then "inter".
    microbatch_caps: a microbatch of one replica is a group of examples under these caps, with microbatch_size examples
                     in the mean (OmniBal section 4.1). A cap is the largest summed length of an encoder's items, and of
                     the backbone's sequences, e.g. {"image": 9225, "backbone": 4096}: of one encoder in a pipeline, of
                     every module under "data_parallel". Replicas that share a sequence share the groups beside it.
                     {}: every microbatch has microbatch_size examples.
    moments:         numbers that the optimizer keeps of each parameter beside its value: 2 of AdamW, 0 of plain SGD.

    Example:
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> from motet.cost.catalogue import cluster
        >>> model = multimodal("tiny", language_model(Transformer(64, 256, 4), num_layers=4, vocab_size=1000), [])
        >>> unit = Unit("backbone", ({"backbone": 2}, {"backbone": 2}), dp=4, pp=2)
        >>> plan = Plan(model, cluster("h100"), (unit,), batch_size=32, microbatch_size=2, schedule="1f1b")
        >>> plan.unit_of("backbone").ranks
        range(0, 8)
    """

    model: ModelSpec
    cluster: Cluster
    units: tuple[Unit, ...]
    batch_size: NumExamples
    microbatch_size: NumExamples = 1
    schedule: ScheduleKind = "1f1b"
    deferred_warmup: bool = False
    precision: str = "bf16"
    balance: BalancingMethod = "off"
    fills: tuple[Fill, ...] = field(default=())
    order: Order = "given"
    microbatch_caps: Mapping[str, Count] = field(default_factory=dict)
    policy: Mapping[str, Policy] = field(default_factory=dict)
    filling: FillingMethod = "static"
    moments: NumMoments = ADAM_MOMENTS

    def unit_of(self, module: str) -> Unit:
        """The unit that runs a module."""
        return next(unit for unit in self.units if module in unit.modules)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of its units, without those that it leaves over."""
        return frozenset(rank for unit in self.units for rank in unit.ranks)

    @property
    def copies_pieces(self) -> bool:
        """Whether ranks share products, whose pieces travel by copies between GPUs."""
        return self.cluster.tensor_transport == "copy_engines" and any(unit.tp > 1 for unit in self.units)

    @property
    def needed_cluster(self) -> Cluster:
        """The part of its cluster that is started to train it: its first nodes, or the first ranks of one, up to the
        last rank that it uses. Ranks before and beside these that it leaves over end at once.
        """
        last, per_node = max(self.ranks), self.cluster.ranks_per_node
        return replace(self.cluster, num_nodes=last // per_node + 1, ranks_per_node=min(last + 1, per_node))

    @property
    def replicas_by_node(self) -> tuple[int, ...]:
        """How many replicas of the backbone each node has of which "data_parallel" uses any, in order.

        One of a replica's tensor-parallel ranks exchanges for all: a replica counts as on the node of the first.
        """
        unit = self.unit_of(BACKBONE)
        return ranks_by_node(self.cluster.nodes_of(unit.ranks[:: unit.tp]).tolist())

    @property
    def closed_up(self) -> Plan:
        """The same on ranks that are numbered without those that it leaves over: as they are while it trains."""
        ranks = sorted(self.ranks)
        units = (replace(unit, first_rank=bisect_left(ranks, unit.first_rank)) for unit in self.units)
        return self if ranks[-1] == len(ranks) - 1 else replace(self, units=tuple(units))
