"""What the stages of a Plan's Program stand for: layers, ranks of the cluster, examples. From this a stage is priced.

Stages are numbered by unit with ranks of its own (in the Plan's order), replica in the island, and place; then come
replicated encoders, by encoder and stage; then encoders in bubbles, by unit, replica of the backbone, pipeline and
place. Program ranks are numbered alike: by unit, replica, and pipeline rank. Under "data_parallel" a rank has one stage
a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Literal

from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.schedule.check.fit import backbone_unit, check_fit, colocated_units, pipelined_units
from motet.schedule.generators.disaggregated import Island, Pipeline, UnitEdge, island

MAX_PARTS = 16
"""Units in which the layers of a module are gathered in a "data_parallel" Program: enough to tell what overlaps."""
LAYER_PARTS = 4
"""Slices of a layer where the backbone's passes are split: tensor-parallel communication before each of the layer's two
halves (attention, MLP), and the halves: parts 0 and 2 of the four are communication (Optimus Figure 3)."""


@dataclass(frozen=True)
class PlannedStage:
    """layers:       per module, the blocks (`Module.blocks`) that the stage runs: first, and first after.
    recomputed:   per module, of how many of them the activations are recomputed.
    replica:      which one of the unit's, in the first island.
    rank:         the program rank.
    ranks:        of the cluster, in that replica: those that share the stage's work. tp * cp of them share an example;
                  where there are more, they share the examples (`num_shares`).
    data_ranks:   of the cluster: one of each tensor-parallel group that holds the same parameters, over all islands.
    examples:     (first, stop) of an island's microbatch, that one of `num_examples`, which the stage takes.
    microbatches: which the stage takes; all, but for encoders in bubbles.
    has_backward: backward runs through it. trainable: something in it is updated.
    num_parts:    of its forward pass, and of its backward pass, in the Program; 1 is whole.
    place:        among the stages of its unit.
    """

    unit: Unit
    layers: Mapping[str, tuple[int, int]]
    recomputed: Mapping[str, int]
    replica: int
    rank: int
    ranks: tuple[int, ...]
    data_ranks: tuple[int, ...]
    examples: tuple[int, int]
    microbatches: tuple[int, ...]
    has_backward: bool
    trainable: bool
    num_parts: int = 1
    place: int = 0

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for stages of one unit that hold the same layers and parts, in whichever replica."""
        return self.unit.name, self.place, self.num_parts, *self.layers.items(), *self.recomputed.items()

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.layers)

    @property
    def num_layers(self) -> int:
        return sum(stop - first for first, stop in self.layers.values())

    @property
    def num_shares(self) -> int:
        return len(self.ranks) // (self.unit.tp * self.unit.cp)

    @property
    def zero(self) -> Literal[0, 1, 2, 3]:
        """What is sharded: a unit whose shard groups are single ranks shards nothing."""
        return 0 if self.unit.shard_size == 1 else self.unit.zero

    @property
    def shard_size(self) -> int:
        """Of `data_ranks`, those from the first on that share one copy of what is sharded."""
        return (self.unit.shard_size or len(self.data_ranks)) if self.zero else 1


def part_layers(num_layers: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """(first, stop) of the layers of each part of a forward pass that is cut between layers, as evenly as can be."""
    return tuple((part * num_layers // num_parts, (part + 1) * num_layers // num_parts) for part in range(num_parts))


def num_microbatches(plan: Plan) -> int:
    return plan.batch_size // (backbone_unit(plan).dp * plan.microbatch_size)


class Layout:
    """A Plan that fits, laid out in stages. Raises UserError for one that does not (`fit.py`)."""

    def __init__(self, plan: Plan) -> None:
        check_fit(plan)
        self.plan = plan
        self.backbone = backbone_unit(plan)
        self.units = pipelined_units(plan)
        self.colocated = colocated_units(plan)
        whole = plan.schedule == "data_parallel"
        self.num_islands = 1 if whole else gcd(*(unit.dp for unit in self.units))
        self.num_microbatches = num_microbatches(plan)

    @property
    def num_examples(self) -> int:
        """Of a microbatch of an island."""
        return self.backbone.dp // self.num_islands * self.plan.microbatch_size

    def num_replicas(self, unit: Unit) -> int:
        """Of a unit with ranks of its own, in an island."""
        return unit.dp // self.num_islands

    def first_program_rank(self, unit: Unit) -> int:
        """Of a unit with ranks of its own: the program rank at which its replicas' begin."""
        before = self.units[: self.units.index(unit)]
        return sum(self.num_replicas(other) * other.pp for other in before)

    @cached_property
    def feeds(self) -> tuple[UnitEdge, ...]:
        """Which stages of the units with ranks of their own feed which of another."""
        place = {unit.name: number for number, unit in enumerate(self.units)}
        found = []
        for source, sink in self.plan.model.edges:
            unit, other = self.plan.unit_of(source), self.plan.unit_of(sink)
            if unit.name in place and unit is not other:
                ends = [number for number, stage in enumerate(unit.stages) if source in stage]
                starts = [number for number, stage in enumerate(other.stages) if sink in stage]
                found.append(UnitEdge(place[unit.name], place[other.name], ends[-1], starts[0]))
        return tuple(dict.fromkeys(found))

    @cached_property
    def island(self) -> Island:
        """Of the units with ranks of their own."""
        units = [Pipeline(tuple("+".join(stage) for stage in unit.stages), unit.dp) for unit in self.units]
        return island(units, self.feeds)

    def layers(self, unit: Unit) -> list[dict[str, tuple[int, int]]]:
        """Per stage of a unit, its layers of each module, in the order in which they run."""
        reached = dict.fromkeys(unit.modules, 0)
        found = []
        for stage in unit.stages:
            found.append({name: (reached[name], reached[name] + count) for name, count in stage.items()})
            reached.update({name: stop for name, (_, stop) in found[-1].items()})
        return found

    def trainable(self, layers: Mapping[str, tuple[int, int]]) -> bool:
        modules = self.plan.model.module
        return any(
            modules(name).layers[place].trainable
            for name, span in layers.items()
            for place in modules(name).block_layers(*span)
        )

    @cached_property
    def has_backward(self) -> Mapping[str, tuple[bool, ...]]:
        """Per unit and stage: something in it learns, or its gradient goes to a stage before it that has backward."""
        flags = {
            unit.name: [self.trainable(layers) or self._feeds_back(layers) for layers in self.layers(unit)]
            for unit in self.plan.units
        }
        for _ in self.plan.units:  # along the longest way between units
            for unit in self.units:
                own = flags[unit.name]
                for stage in range(1, len(own)):
                    own[stage] |= own[stage - 1]
            for feed in self.feeds:
                source, sink = self.units[feed.source].name, self.units[feed.sink].name
                flags[sink][feed.sink_stage] |= flags[source][feed.source_stage]
        return {name: tuple(found) for name, found in flags.items()}

    def _feeds_back(self, layers: Mapping[str, tuple[int, int]]) -> bool:
        model = self.plan.model
        return any(
            model.input_gradients[name][place]
            for name, span in layers.items()
            for place in model.module(name).block_layers(*span)
        )

    def pipeline_rank(self, unit: Unit, stage: int) -> int:
        if self.plan.schedule == "zb_v" and stage >= unit.pp:
            return 2 * unit.pp - 1 - stage
        return stage % unit.pp

    def ranks(self, unit: Unit, pipeline_rank: int, replica: int) -> tuple[int, ...]:
        """Of the cluster: those of one replica of a unit that share the work of one pipeline rank."""
        first = unit.rank(pipeline_rank, replica)
        return tuple(range(first, first + unit.cp * unit.tp))

    def data_ranks(self, unit: Unit, pipeline_ranks: range) -> tuple[int, ...]:
        """The first of each tensor-parallel group of some pipeline ranks, over all replicas."""
        return tuple(unit.rank(p, d, c) for p in pipeline_ranks for d in range(unit.dp) for c in range(unit.cp))

    @cached_property
    def stages(self) -> tuple[PlannedStage, ...]:
        """Of the units with ranks of their own, then the replicated encoders' (not those in bubbles)."""
        pipelined = list(self._pipelined())
        return (*pipelined, *self._replicated(pipelined))

    def _pipelined(self) -> Iterator[PlannedStage]:
        for unit in self.units:
            first_rank = self.first_program_rank(unit)
            for replica in range(self.num_replicas(unit)):
                size = self.num_examples // self.num_replicas(unit)
                for stage, layers in enumerate(self.layers(unit)):
                    pipeline_rank = self.pipeline_rank(unit, stage)
                    yield PlannedStage(
                        unit,
                        layers,
                        unit.recompute[stage] if unit.recompute else {},
                        replica,
                        first_rank + replica * unit.pp + pipeline_rank,
                        self.ranks(unit, pipeline_rank, replica),
                        self.data_ranks(unit, range(pipeline_rank, pipeline_rank + 1)),
                        (replica * size, (replica + 1) * size),
                        tuple(range(self.num_microbatches)),
                        self.has_backward[unit.name][stage],
                        self.trainable(layers),
                        place=stage,
                    )

    def _replicated(self, pipelined: list[PlannedStage]) -> Iterator[PlannedStage]:
        for name in self.backbone.replicated:
            layers = {name: (0, len(self.plan.model.module(name).blocks))}
            trainable = self.trainable(layers)
            for stage in pipelined:
                if stage.unit is self.backbone:
                    yield replace(
                        stage,
                        layers=layers,
                        recomputed={},
                        data_ranks=self.data_ranks(self.backbone, range(self.backbone.pp)),
                        has_backward=trainable,
                        trainable=trainable,
                    )

    @property
    def data_parallel_modules(self) -> tuple[str, ...]:
        """In the order in which a data-parallel rank runs them: encoders, then the backbone."""
        return (*(module.name for module in self.plan.model.modules if module.name != BACKBONE), BACKBONE)

    def data_parallel_stages(self) -> Iterator[PlannedStage]:
        """A stage a module on each data-parallel rank."""
        unit = self.backbone
        recompute = unit.recompute[0] if unit.recompute else {}
        names = self.data_parallel_modules
        layers = [{name: (0, unit.stages[0][name])} for name in names]
        learning = [self.trainable(span) for span in layers]
        alike = [
            PlannedStage(
                unit,
                span,
                {name: recompute[name]} if name in recompute else {},
                0,
                0,
                (),
                self.data_ranks(unit, range(1)),
                (0, 0),
                tuple(range(self.num_microbatches)),
                any(learning) if name == BACKBONE else trainable,
                trainable,
                min(unit.stages[0][name], MAX_PARTS),
            )
            for name, span, trainable in zip(names, layers, learning)
        ]
        size = self.plan.microbatch_size
        for rank in range(unit.dp):
            ranks = self.ranks(unit, 0, rank)
            examples = rank * size, (rank + 1) * size
            for stage in alike:
                yield replace(stage, replica=rank, rank=rank, ranks=ranks, examples=examples)
