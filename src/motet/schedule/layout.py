"""What the stages of a Plan's Program stand for: layers, ranks of the cluster, examples. A stage is priced by these.

Stages are numbered in this order:

1. units with ranks of their own: by unit (in the Plan's order), replica in the island, and index in the unit;
2. replicated encoders: by encoder, and stage of the backbone;
3. encoders in bubbles: by unit, replica of the backbone, pipeline, and index in the unit.

Program ranks are numbered by unit, replica, and pipeline rank. Under "data_parallel" a rank has one stage a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from motet.core.errors import ArgumentError
from motet.core.plan import Plan, Unit, Zero
from motet.core.spec import ModelSpec
from motet.schedule.check.fit import check_fit
from motet.schedule.generators.disaggregated import Island, Pipeline, UnitEdge, island, touched
from motet.schedule.plan_units import (
    backbone_unit,
    joins_all_replicas,
    meeting_units,
    num_islands,
    pipelined_units,
    rank_of_stage,
    units_in_bubbles,
)
from motet.schedule.program import AlikeItems

MAX_PARTS = 16
"""Most parts of a module's pass in a "data_parallel" Program. It is enough to show which gathers overlap compute."""
LAYER_PARTS = 4
"""Parts of a layer where the backbone's passes are split (Optimus Figure 3). Parts 1 and 3 are the layer's two halves,
attention and MLP. Parts 0 and 2 are the tensor-parallel communication before each half that other work may run beside:
the sum of the half before it or, before the first half of a stage, the gather of its rows (`runtime/parted_pass.py`).
"""

BLOCK_SUMS = 2
"""Sums over tensor-parallel ranks in a block of an encoder, forward and backward: one at the end of each half."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a Plan's Program: its layers, its ranks and its share of the examples.

    unit:         the unit that the stage belongs to.
    layers:       per module, (first, stop) of the blocks (`Module.blocks`) that the stage runs.
    recomputed:   per module, how many of these blocks have their activations recomputed.
    replica:      the replica of the unit, in the first island.
    rank:         the program rank.
    ranks:        the ranks of the cluster, in that replica, that share the stage's work. In bubbles there may be
                  several groups of tp * cp of them, which deal out items (`plan_units.sharing_ranks`).
    data_ranks:   ranks of the cluster that hold the same parameters, over all islands: one of each tensor-parallel
                  group.
    examples:     (first, stop): the examples that the stage takes of the `num_examples` in an island's microbatch. Of
                  the first and the last one it may take some items only (`disaggregated.touched`).
    microbatches: the microbatches that the stage takes: all, except for encoders in bubbles.
    has_backward: whether the stage has a backward pass.
    trainable:    whether any parameter of the stage is updated.
    num_parts:    number of parts of its forward pass, and of its backward pass, in the Program; 1 is whole.
    has_halves:   whether the parts are halves of layers and their communication (LAYER_PARTS). Such passes run in one
                  call.
    has_sums:     whether the parts are those of an encoder whose sums over tensor-parallel ranks are apart
                  (`parts_with_sums`). These ranks then have all rows between branches: of a sum of parts of the rows
                  half would be waited for, where they are gathered.
    index:        its index among the stages of its unit.
    begins_inside, ends_inside: of a part of a stage (`parts_of`): it is without the first half of its first block, and
                  without the second half of its last one.

    Example:
        >>> from motet.core.plan import Plan, Unit
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> from motet.cost.catalogue import cluster
        >>> model = multimodal("toy", language_model(Transformer(64, 256, num_heads=4), 8, 1000), [])
        >>> plan = Plan(model, cluster("H100"), (Unit("llm", ({"backbone": 3}, {"backbone": 5}), pp=2, tp=4),), 8)
        >>> [(stage.layers, stage.ranks) for stage in Layout(plan).stages]
        [({'backbone': (0, 3)}, (0, 1, 2, 3)), ({'backbone': (3, 8)}, (4, 5, 6, 7))]
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
    has_halves: bool = False
    has_sums: bool = False
    index: int = 0
    begins_inside: bool = False
    ends_inside: bool = False

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The key of stages that are alike: of one unit, with the same layers and parts, in any replica."""
        return self.unit.name, self.index, self.num_parts, *self.layers.items(), *self.recomputed.items()

    @property
    def place(self) -> tuple[str, int, int]:
        """What tells the stages of units apart, whatever microbatches they take: unit, replica and index."""
        return self.unit.name, self.replica, self.index

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the stage runs, in order."""
        return tuple(self.layers)

    @property
    def num_layers(self) -> int:
        """Number of blocks that the stage runs, over all its modules."""
        return sum(stop - first for first, stop in self.layers.values())

    def takes(self, microbatch: int) -> bool:
        """Whether the stage computes a microbatch."""
        return microbatch in self.microbatches

    @property
    def zero(self) -> Zero:
        """The ZeRO stage that applies: 0 if shard groups are single ranks, which shard nothing."""
        return 0 if self.unit.shard_size == 1 else self.unit.zero

    @property
    def shard_size(self) -> int:
        """Number of `data_ranks` that share one copy of the sharded state: consecutive ones, from the first on."""
        return (self.unit.shard_size or len(self.data_ranks)) if self.zero else 1


def part_layers(num_layers: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """(first, stop) of the layers of each part of a forward pass that is cut between layers, as evenly as possible."""
    return tuple((part * num_layers // num_parts, (part + 1) * num_layers // num_parts) for part in range(num_parts))


def pieces_of(stage: PlannedStage, model: ModelSpec) -> list[tuple[str, int, int]]:
    """(module, block, half) of the smallest parts of a stage's forward pass (`Module.pieces`)."""
    return [(name, *piece) for name, span in stage.layers.items() for piece in model.module(name).pieces(*span)]


def parts_with_sums(stage: PlannedStage, model: ModelSpec) -> int:
    """The parts of an encoder's pass whose sums over tensor-parallel ranks are apart (Optimus Figure 7); 0 if it has
    none: ranks share no products, or a block has no halves.

    Even parts compute: each half of a block up to its sum, which is the part behind it, and in the last part what
    stands behind the last sum. So it is two parts for each half, and one, in the order of execution, forward and
    backward. A sum begins as the part before it ends, and the part behind it waits for it (`runtime/paused_pass.py`).
    """
    pieces = pieces_of(stage, model)
    return 2 * len(pieces) + 1 if stage.unit.tp > 1 and all(half >= 0 for _, _, half in pieces) else 0


def parts_of(stage: PlannedStage, model: ModelSpec) -> tuple[PlannedStage, ...]:
    """A stage for each part of a stage's forward pass, with the part's blocks; its backward pass has them in reverse.

    Parts are spans of blocks; if there are more parts than blocks, of pieces of blocks. Passes that run in one call are
    one part, and those with sums apart have a part for each block here.
    Raises ArgumentError for more parts than pieces.
    """
    if stage.num_parts == 1 or stage.has_halves:
        return (stage,)
    pieces = [(name, block, -1) for name, (first, stop) in stage.layers.items() for block in range(first, stop)]
    if stage.has_sums:
        return tuple(_part(stage, [piece]) for piece in pieces)
    if stage.num_parts > len(pieces):
        num_blocks, pieces = len(pieces), pieces_of(stage, model)
        if stage.num_parts > len(pieces):
            raise ArgumentError(
                f"passes of a stage with {num_blocks} blocks are in {stage.num_parts} parts; parts that are executed "
                f"are blocks and halves of blocks, of which there are {len(pieces)}."
            )
    return tuple(_part(stage, pieces[first:stop]) for first, stop in part_layers(len(pieces), stage.num_parts))


def _part(stage: PlannedStage, pieces: list[tuple[str, int, int]]) -> PlannedStage:
    layers: dict[str, tuple[int, int]] = {}
    for name, block, _ in pieces:
        layers[name] = layers.get(name, (block, block))[0], block + 1
    recomputed = {
        name: min(max(stage.layers[name][0] + stage.recomputed.get(name, 0) - begin, 0), end - begin)
        for name, (begin, end) in layers.items()
    }
    inside = pieces[0][2] == 1, pieces[-1][2] == 0
    return replace(
        stage, layers=layers, recomputed=recomputed, num_parts=1, begins_inside=inside[0], ends_inside=inside[1]
    )


def num_microbatches(plan: Plan) -> int:
    """Microbatches that a replica of the backbone takes in a step."""
    return plan.batch_size // (backbone_unit(plan).dp * plan.microbatch_size)


class Layout:
    """A Plan laid out in stages. Raises UserError for a Plan that does not fit (`check/fit.py`).

    backbone:         the backbone's unit.
    units:            the units with ranks of their own, in the Plan's order.
    in_bubbles:       the units that run in the backbone's bubbles.
    num_islands:      number of islands of the job (`core/plan.py`).
    num_microbatches: microbatches of a step.

    Example:
        >>> from motet.core.plan import Plan, Unit
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> from motet.cost.catalogue import cluster
        >>> model = multimodal("toy", language_model(Transformer(64, 256, num_heads=4), 8, 1000), [])
        >>> layout = Layout(Plan(model, cluster("H100"), (Unit("llm", ({"backbone": 8},), dp=4, tp=2),), batch_size=8))
        >>> layout.num_islands, layout.num_microbatches, layout.num_examples
        (4, 2, 1)
    """

    def __init__(self, plan: Plan) -> None:
        check_fit(plan)
        self.plan = plan
        self.backbone = backbone_unit(plan)
        self.units = pipelined_units(plan)
        self.in_bubbles = units_in_bubbles(plan)
        self.num_islands = 1 if plan.schedule == "data_parallel" else num_islands(plan)
        self.num_microbatches = num_microbatches(plan)
        self._data_ranks: dict[tuple[str, range], tuple[int, ...]] = {}

    @property
    def num_examples(self) -> int:
        """Examples of a microbatch of an island."""
        return self.backbone.dp // self.num_islands * self.plan.microbatch_size

    def num_replicas(self, unit: Unit) -> int:
        """Replicas that an island has of a unit with ranks of its own."""
        return unit.dp // self.num_islands

    def first_program_rank(self, unit: Unit) -> int:
        """The first program rank of a unit with ranks of its own."""
        before = self.units[: self.units.index(unit)]
        return sum(self.num_replicas(other) * other.pp for other in before)

    @cached_property
    def feeds(self) -> tuple[UnitEdge, ...]:
        """The edges between units with ranks of their own: from the last stage of a module to those that take it in."""
        index = {unit.name: number for number, unit in enumerate(self.units)}
        edges = []
        for source, sink in self.plan.model.edges:
            unit, other = self.plan.unit_of(source), self.plan.unit_of(sink)
            if unit.name in index and unit is not other:
                ends = [number for number, stage in enumerate(unit.stages) if source in stage]
                entries = self.plan.model.entries(source, sink)
                for number, layers in enumerate(self.layers(other)):
                    if any(block in range(*layers.get(sink, (0, 0))) for block in entries):
                        edges.append(UnitEdge(index[unit.name], index[other.name], ends[-1], number))
        return tuple(dict.fromkeys(edges))

    @cached_property
    def island(self) -> Island:
        """The island that the units with ranks of their own form."""
        units = [Pipeline(tuple("+".join(stage) for stage in unit.stages), unit.dp) for unit in self.units]
        meeting = {self.units.index(unit) for unit in meeting_units(self.plan)}
        joins_all = joins_all_replicas(self.plan)
        return island(units, self.feeds, self.num_examples, joins_all=joins_all, meeting=meeting)

    def layers(self, unit: Unit) -> list[dict[str, tuple[int, int]]]:
        """Per stage of a unit: (first, stop) of its blocks, by module, in the order in which they run."""
        next_block = dict.fromkeys(unit.modules, 0)
        stages = []
        for stage in unit.stages:
            stages.append({name: (next_block[name], next_block[name] + count) for name, count in stage.items()})
            next_block.update({name: stop for name, (_, stop) in stages[-1].items()})
        return stages

    def trainable(self, layers: Mapping[str, tuple[int, int]]) -> bool:
        """Whether any of these layers is updated. layers: as of `PlannedStage`."""
        modules = self.plan.model.module
        return any(
            modules(name).layers[index].trainable
            for name, span in layers.items()
            for index in modules(name).block_layers(*span)
        )

    @cached_property
    def has_backward(self) -> Mapping[str, tuple[bool, ...]]:
        """Per unit and stage, whether it has a backward pass: it is trainable, or a stage before it needs a gradient.

        A need for gradients spreads from stage to stage within a unit, and from unit to unit along `feeds`. A round of
        both reaches one unit further, so that as many rounds as units are enough.
        """
        flags = {
            unit.name: [self.trainable(layers) or self._has_input_gradient(layers) for layers in self.layers(unit)]
            for unit in self.plan.units
        }
        for _ in self.plan.units:
            for unit in self.plan.units:
                of_unit = flags[unit.name]
                for stage in range(1, len(of_unit)):
                    of_unit[stage] |= of_unit[stage - 1]
            for feed in self.feeds:
                source, sink = self.units[feed.source].name, self.units[feed.sink].name
                flags[sink][feed.sink_stage] |= flags[source][feed.source_stage]
        return {name: tuple(of_unit) for name, of_unit in flags.items()}

    def _has_input_gradient(self, layers: Mapping[str, tuple[int, int]]) -> bool:
        model = self.plan.model
        return any(
            model.input_gradients[name][index]
            for name, span in layers.items()
            for index in model.module(name).block_layers(*span)
        )

    def pipeline_rank(self, unit: Unit, stage: int) -> int:
        """The pipeline rank of a unit's stage. stage: its index in the unit."""
        return rank_of_stage(self.plan, unit, stage)

    def ranks(self, unit: Unit, pipeline_rank: int, replica: int) -> tuple[int, ...]:
        """The ranks of the cluster that share the work of one pipeline rank of one replica of a unit."""
        first = unit.rank(pipeline_rank, replica)
        return tuple(range(first, first + unit.cp * unit.tp))

    def data_ranks(self, unit: Unit, pipeline_ranks: range) -> tuple[int, ...]:
        """The first rank of each tensor-parallel group of these pipeline ranks, over all replicas of a unit."""
        key = unit.name, pipeline_ranks
        if key not in self._data_ranks:
            # The ranks of a pipeline rank are a run of dp * cp * tp.
            first = unit.rank(pipeline_ranks.start, 0)
            stop = first + len(pipeline_ranks) * unit.dp * unit.cp * unit.tp
            self._data_ranks[key] = tuple(range(first, stop, unit.tp))
        return self._data_ranks[key]

    @cached_property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages of units with ranks of their own, then those of replicated encoders; none in bubbles."""
        pipelined = list(self._pipelined())
        return (*pipelined, *self._replicated(pipelined))

    def _pipelined(self) -> Iterator[PlannedStage]:
        for unit in self.units:
            first_rank = self.first_program_rank(unit)
            for replica in range(self.num_replicas(unit)):
                examples = touched(replica, self.num_replicas(unit), self.num_examples)
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
                        (examples.start, examples.stop),
                        tuple(range(self.num_microbatches)),
                        self.has_backward[unit.name][stage],
                        self.trainable(layers),
                        index=stage,
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
        """The modules in the order in which a data-parallel rank runs them: encoders, the backbone, generators."""
        return tuple(module.name for module in self.plan.model.modules)

    def data_parallel_stages(self) -> AlikeItems[PlannedStage]:
        """The stages of a "data_parallel" Program: on each rank one for each module, which differ by rank in `replica`,
        `rank`, `ranks` and `examples` alone.
        """
        unit = self.backbone
        recompute = unit.recompute[0] if unit.recompute else {}
        names = self.data_parallel_modules
        layers = [{name: (0, unit.stages[0][name])} for name in names]
        flags = [self.trainable(span) for span in layers]
        model = self.plan.model
        is_reached = [flag or model.input_gradients[name][0] for name, flag in zip(names, flags)]
        first = [
            PlannedStage(
                unit,
                span,
                {name: recompute[name]} if name in recompute else {},
                replica=0,
                rank=0,
                ranks=(),
                data_ranks=self.data_ranks(unit, range(1)),
                examples=(0, 0),
                microbatches=tuple(range(self.num_microbatches)),
                has_backward=has_backward,
                trainable=trainable,
                num_parts=min(unit.stages[0][name], MAX_PARTS),
            )
            for name, span, trainable, has_backward in zip(names, layers, flags, is_reached)
        ]
        return AlikeItems([self._on_rank(stage, 0) for stage in first], unit.dp, self._on_rank)

    def _on_rank(self, stage: PlannedStage, rank: int) -> PlannedStage:
        """The stage of a data-parallel rank that is like one of another rank."""
        size = self.plan.microbatch_size
        examples = rank * size, (rank + 1) * size
        return replace(stage, replica=rank, rank=rank, ranks=self.ranks(stage.unit, 0, rank), examples=examples)
