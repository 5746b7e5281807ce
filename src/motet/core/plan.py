"""The placement of a job: which ranks run which layers, with which parallelism, recomputation and schedule.

A Plan is made once a job, by hand or by the planner, and is read alike by the simulator and by the runtime. It carries
the model and the cluster that it was made for, so that a file of it stands alone.

An *island* is the smallest part of a job whose ranks speak to no others before gradients are reduced: with g the
greatest common divisor of the units' dp, there are g islands, alike, each with dp / g replicas of every unit (MMScale
section 4.1; schedule/generators/disaggregated.py). Under "data_parallel" the whole job is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from motet.core.cluster import Cluster
from motet.core.limits import MAX_RANKS, Count, NumExamples, NumRanks
from motet.core.spec import ModelSpec

ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "data_parallel"]
Order = Literal["given", "intra", "inter", "both"]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


@dataclass(frozen=True)
class Unit:
    """Ranks that run the same modules with the same parallelism: MMScale's parallelism unit (section 4.1).

    first_rank:  its ranks are first_rank ... first_rank + num_ranks - 1; tensor-parallel ranks are neighbours, then
                 context-, data- and pipeline-parallel ones: rank = first + ((p * dp + d) * cp + c) * tp + t. Units
                 may share ranks: encoders that run in the backbone's bubbles (Optimus section 3.1).
    stages:      per stage, in the order of the data: how many layers of which modules, e.g. {"image": 10}. Counted are
                 transformer layers; what stands before, between and after them goes along (`Module.blocks`). A module's
                 layers go to its stages in order. With more stages than pp, a rank has several (chunks): stage s is on
                 pipeline rank s % pp (zb_v: in a V, down and up again).
    replicated:  modules that every stage computes whole, beside its own layers (Cornstarch section 2.2, Figure 1b).
    recompute:   per stage, of how many of those layers the activations are recomputed in backward; () is none.
    zero:        what is sharded over data-parallel ranks: nothing, optimizer state, and gradients, and parameters.
    shard_size:  data-parallel ranks that share one copy of what is sharded (hybrid sharding); 0 is all.
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
    zero: Literal[0, 1, 2, 3] = 1
    shard_size: Annotated[int, Field(ge=0, le=MAX_RANKS)] = 0

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.tp * self.cp

    @property
    def ranks(self) -> range:
        """Of the cluster."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def rank(self, p: int, d: int, c: int = 0, t: int = 0) -> int:
        """Of the cluster, by pipeline-, data-, context- and tensor-parallel coordinates."""
        return self.first_rank + ((p * self.dp + d) * self.cp + c) * self.tp + t

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(p, d, c, t) of one of its ranks: the inverse of `rank`."""
        rest, t = divmod(rank - self.first_rank, self.tp)
        rest, c = divmod(rest, self.cp)
        p, d = divmod(rest, self.dp)
        return p, d, c, t

    @property
    def modules(self) -> tuple[str, ...]:
        """All that it computes, in the order of the data."""
        return tuple(dict.fromkeys([*self.replicated, *(name for stage in self.stages for name in stage)]))


@dataclass(frozen=True)
class Fill:
    """A slice of an encoder's work in a bubble of the backbone, as the planner placed it (Optimus section 4.2).

    rank:   pipeline rank of the Program. action: what runs, e.g. "9F3.2". before: the action of the backbone on that
            rank that it runs just before, in its compute stream, e.g. "2F5.1"; "" is the end of the step.
    """

    rank: Rank
    action: str
    before: str = ""


@dataclass(frozen=True)
class Plan:
    """A placement of a model on a cluster.

    units:           between them they hold every layer of every module.
    schedule:        in which order a pipeline rank takes its microbatches.
    batch_size:      examples of a step, over all ranks.
    microbatch_size: examples of a microbatch of one replica of the backbone's unit; the other units take as many
                     microbatches, of more or fewer examples, as they have fewer or more replicas (MMScale section 4.2).
    deferred_warmup: interleaved only: warm-up microbatches are taken as late as delays nothing (Optimus Figure 12).
    balance:         how the items of colocated phases are placed: "off", "joint", "per_phase" or "auto".
    fills:           what runs in bubbles; they name microbatches by their place in the step, whatever is in them.
    order:           of a pipeline's examples, decided anew in every step (MMScale section 5): "given", as they come;
                     "intra", dealt out so that replicas, and microbatches, are even; "inter", the microbatches of each
                     replica in the order with the shortest bubbles; "both".
    microbatch_caps: of a pipeline: a microbatch of one replica is a group of examples, microbatch_size of them in the
                     mean, up to these lengths (OmniBal section 4.1): of an encoder's items and of the backbone's
                     sequences, e.g. {"image": 9225, "backbone": 4096}. {}: microbatch_size of them in each.
    """

    model: ModelSpec
    cluster: Cluster
    units: tuple[Unit, ...]
    batch_size: NumExamples
    microbatch_size: NumExamples = 1
    schedule: ScheduleKind = "1f1b"
    deferred_warmup: bool = False
    precision: str = "bf16"
    balance: Literal["off", "joint", "per_phase", "auto"] = "off"
    fills: tuple[Fill, ...] = field(default=())
    order: Order = "given"
    microbatch_caps: Mapping[str, Count] = field(default_factory=dict)

    def unit_of(self, module: str) -> Unit:
        """The unit that runs a module."""
        return next(unit for unit in self.units if module in unit.modules)
