"""A Plan into its Program: a generator makes the passes, then functions add the rest in a fixed order.

- Pipelines: replicated encoders, recomputation, parts, encoders in bubbles, data parallelism, communication.
- "data_parallel": exchanges, then absent modules and exchanges leave; for the simulator also parts and FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError, UserError
from motet.core.plan import Fill, Plan, Unit
from motet.core.workload import BACKBONE
from motet.schedule.check.dry_run import dry_run
from motet.schedule.coordinates import replica_of
from motet.schedule.edges import edge_outputs
from motet.schedule.generators.bubble_filling import EncoderPipeline, coarse_fills, fill_bubbles, global_order
from motet.schedule.generators.dag import dag_1f1b, dag_gpipe
from motet.schedule.generators.data_parallel import data_parallel
from motet.schedule.generators.disaggregated import Island
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b
from motet.schedule.generators.modality_parallel import add_replicas
from motet.schedule.generators.virtual_pipeline import virtual_pipeline
from motet.schedule.generators.zb_h1 import zb_h1
from motet.schedule.generators.zb_v import zb_v
from motet.schedule.layout import LAYER_PARTS, Layout, PlannedStage, part_layers, parts_with_sums
from motet.schedule.passes import (
    Presence,
    Sharding,
    add_communication,
    add_exchanges,
    add_fsdp,
    add_recompute,
    split_parts,
    without_absent,
)
from motet.schedule.passes.data_parallel import add_data_parallel
from motet.schedule.passes.part_runs import PartRun, in_parts, with_runs
from motet.schedule.plan_units import collects_in_islands, meeting_units, moves_items
from motet.schedule.program import AlikeItems, Kind, Program, Stage
from motet.schedule.text import parse_action

_S = TypeVar("_S", PlannedStage, Stage)


class StageKind(NamedTuple):
    """Stages that are alike (`PlannedStage.key`): int64 [num_alike] columns.

    stage:    the first of them.
    numbers:  of the stages.
    replicas: which replica's items each computes, in the first island (`coordinates.replica_of`).
    ranks:    the program rank of each.
    """

    stage: PlannedStage
    numbers: Int64Array
    replicas: Int64Array
    ranks: Int64Array


@dataclass(frozen=True)
class PlannedProgram:
    """A Program of a Plan, and what its stages and edges stand for.

    stages: a PlannedStage for each stage of the Program.
    layout: the Layout of the Plan.

    Example:
        >>> from motet.core.plan import Plan, Unit
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> from motet.cost.catalogue import cluster
        >>> model = multimodal("toy", language_model(Transformer(64, 256, num_heads=4), 8, 1000), [])
        >>> unit = Unit("llm", ({"backbone": 3}, {"backbone": 5}), pp=2)
        >>> print(planned(Plan(model, cluster("H100"), (unit,), batch_size=1)).program)
        rank 0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP
        rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP
    """

    program: Program
    stages: tuple[PlannedStage, ...] | AlikeItems[PlannedStage]
    layout: Layout = field(compare=False)

    @cached_property
    def kinds(self) -> tuple[StageKind, ...]:
        """The stages by kind, in order of their first stages."""
        if isinstance(self.stages, AlikeItems):
            # Of data parallelism, whose replicas are the ranks: one of each rank.
            each, ranks = len(self.stages.first), np.arange(self.stages.num_ranks)
            return tuple(
                StageKind(stage, number + each * ranks, ranks, ranks) for number, stage in enumerate(self.stages.first)
            )
        by_key: dict[object, list[int]] = {}
        for number, stage in enumerate(self.stages):
            by_key.setdefault(stage.key, []).append(number)
        kinds = []
        for alike in by_key.values():
            stages = [self.stages[number] for number in alike]
            replicas = [replica_of(self.layout, stage, 0) for stage in stages]
            columns = alike, replicas, [stage.rank for stage in stages]
            kinds.append(StageKind(stages[0], *map(np.array, columns)))
        return tuple(kinds)

    def ends(self, edge: int) -> tuple[PlannedStage, PlannedStage]:
        """The stages that an edge of the Program joins: its source and its sink. edge: its number."""
        source, sink = self.program.edges[edge]
        return self.stages[source], self.stages[sink]

    def outputs(self, edge: int) -> tuple[tuple[str, int], ...]:
        """What goes along an edge of the Program, as `edge_outputs` says. edge: its number."""
        if edge not in self._outputs:
            self._outputs[edge] = tuple(edge_outputs(self.layout, *self.ends(edge)))
        return self._outputs[edge]

    @cached_property
    def _outputs(self) -> dict[int, tuple[tuple[str, int], ...]]:
        return {}

    def stages_on(self, program_rank: int) -> tuple[int, ...]:
        """The numbers of the stages that a program rank computes."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.rank == program_rank)


def program_of(plan: Plan) -> Program:
    """The Program of a Plan, with its communication and collectives.

    Raises UserError for a Plan that does not fit its model or its cluster, and for fills that cannot run.
    """
    return planned(plan).program


def planned(plan: Plan) -> PlannedProgram:
    """The Program of a Plan, and what it stands for. Raises as `program_of` does. O(actions log actions)."""
    layout = Layout(plan)
    return _data_parallel(layout) if plan.schedule == "data_parallel" else _pipelined(layout)


def unscheduled(layout: Layout) -> PlannedProgram:
    """The stages of units with ranks of their own, and a Program without passes: enough to price the stages."""
    return PlannedProgram(Program((), (), (), layout.num_microbatches), layout.stages, layout)


def executed_program(plan: Plan, present: Sequence[Presence] = ()) -> Program:
    """The Program that the runtime's executor walks. FSDP2's collectives are not in it (`passes/fsdp.py`).

    present: under "data_parallel", what each microbatch of the step has; () is everything.
    Raises as `program_of` does.
    """
    layout = Layout(plan)
    return _without_fsdp(layout, present) if plan.schedule == "data_parallel" else _pipelined(layout).program


def program_of_batch(plan_program: PlannedProgram, present: Sequence[Presence]) -> Program:
    """The Program of one step, in which microbatches may lack a module or an exchange.

    plan_program: of the Plan. present: as of `executed_program`.
    """
    layout = plan_program.layout
    encoders = set(layout.plan.unit_of(BACKBONE).modules) - {BACKBONE} if present else set()
    if all(encoders <= one.exchanged and {BACKBONE, *encoders} <= one.modules for one in present):
        return plan_program.program  # Nothing is left out.
    return _with_fsdp(layout, _without_fsdp(layout, present), plan_program.stages)


def _data_parallel(layout: Layout) -> PlannedProgram:
    stages = layout.data_parallel_stages()
    program = _with_fsdp(layout, _without_fsdp(layout, ()), stages)
    return PlannedProgram(program, stages, layout)


def _without_fsdp(layout: Layout, present: Sequence[Presence]) -> Program:
    """Data parallelism without the parts, gathers and reductions of FSDP. present: as of `executed_program`."""
    names = layout.data_parallel_modules
    trainable = {name: layout.trainable({name: (0, layout.backbone.stages[0][name])}) for name in names}
    program = data_parallel(trainable, layout.backbone.dp, layout.num_microbatches)
    program = add_exchanges(program, None if moves_items(layout.plan) else ())
    if not present:
        return program
    return without_absent(program, present, [stage for stage, name in enumerate(names) if trainable[name]])


def _with_fsdp(layout: Layout, program: Program, stages: Sequence[PlannedStage]) -> Program:
    """The Program of `_without_fsdp` with FSDP's parts, gathers and reductions. stages: those of the Program."""
    unit, trainable_slices = layout.backbone, {}
    passes = {(action.stage, action.kind) for action in program.distinct_rows[0]}
    for number, stage in enumerate(stages[: program.num_distinct_stages]):
        (name,) = stage.modules
        spans = part_layers(stage.num_layers, stage.num_parts)
        trainable_slices[number] = [layout.trainable({name: span}) for span in spans]
        if (number, Kind.F) in passes:
            has_backward = (number, Kind.B) in passes
            program = split_parts(program, number, stage.num_parts, stage.num_parts if has_backward else 1)
    shard_size = 1 if unit.zero == 0 else unit.shard_size
    sharding = Sharding(shard_size, reshard_after_forward=unit.zero == 3, once_a_step=unit.zero == 1)
    return add_fsdp(program, trainable_slices, sharding)


def fillable(plan: Plan, *, split: bool = False) -> tuple[PlannedProgram, tuple[EncoderPipeline, ...]]:
    """A Plan's Program with empty bubbles and without communication, and the encoder pipelines that can fill them.

    The planner decides fills by these. The encoders' stages are not among those of the Program.

    split: cut the backbone's passes into parts (`layout.LAYER_PARTS`), so that encoders can run beside its
           tensor-parallel communication. A Plan is split if any of its fills runs before a part.
    """
    layout = Layout(plan)
    if plan.schedule == "data_parallel":
        raise UserError("a Plan under 'data_parallel' has no bubbles of a pipeline to fill.")
    program, stages = _unfilled(layout, split)
    unfilled = PlannedProgram(program, tuple(stages), layout)
    return unfilled, tuple(encoder for encoder, _ in _encoder_pipelines(layout, program, plan.fills))


def check_fills(plan: Plan) -> None:
    """Raise UserError, with the first of them, if the fills of a Plan that fits cannot run."""
    BubbleProgram(Layout(plan)).bare(plan.fills)


class BubbleProgram:
    """The Program of a Plan with stages, for any fills of its bubbles. What does not depend on them is made once.

    program: without encoders in bubbles and without communication. stages: its stages.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.program, self.stages = _unfilled(layout, any("." in fill.before for fill in layout.plan.fills))

    def bare(self, fills: Sequence[Fill]) -> tuple[Program, list[PlannedStage]]:
        """The Program without communication and collectives, and its stages. fills: () runs encoders around all else.

        Raises UserError for fills that cannot run.
        """
        if not self.layout.in_bubbles:
            return self.program, self.stages
        program, added = _filled(self.layout, self.program, fills)
        return program, self.stages + added

    def filled(self, fills: Sequence[Fill]) -> PlannedProgram:
        """The whole Program. Raises as `bare` does."""
        return _communicating(self.layout, *self.bare(fills))

    def refilled(self, own: PlannedProgram, runs: Sequence[Sequence[PartRun]]) -> PlannedProgram | None:
        """The whole Program with encoders elsewhere. They must have a time after all that they wait for.

        None: replicas that meet in passes, or in collectives of each microbatch, would wait for each other, as each has
        fills of its own.

        own: of the Plan's own fills. runs: per program rank, what its encoders do, in order. In time a run counts as
        one action, however many parts it has: O(actions log actions) of passes and runs.
        """
        joined, rows, parts = with_runs(self.program, runs)
        microbatches = {stage: tuple(sorted(taken)) for stage, taken in joined.items()}

        def taking(stages: Sequence[_S]) -> list[_S]:
            return [
                replace(stage, microbatches=microbatches[number]) if number in microbatches else stage
                for number, stage in enumerate(stages)
            ]

        program = replace(own.program, stages=tuple(taking(own.program.stages)), actions=rows)
        collects = collects_in_islands(self.layout.plan)
        try:
            planned_program = _communicating(self.layout, program, taking(own.stages))
        except UserError:
            if not collects and not meeting_units(self.layout.plan):
                raise
            return None
        # What is proven of the Plan's own fills before the first step.
        holds_up = not self.layout.plan.cluster.device.overlaps
        if collects and dry_run(planned_program.program, holds_up=holds_up, host_waits=True).cycle:
            return None
        return replace(planned_program, program=in_parts(planned_program.program, parts))


def _pipelined(layout: Layout) -> PlannedProgram:
    return BubbleProgram(layout).filled(layout.plan.fills)


def _communicating(layout: Layout, program: Program, stages: list[PlannedStage]) -> PlannedProgram:
    """A Program of passes with its collectives and messages."""
    _check_taken_together(layout, stages)
    zero = {number: stage.zero for number, stage in enumerate(stages) if len(stage.data_ranks) > 1}
    copied = [number for number, stage in enumerate(stages) if len(stage.data_ranks) > stage.shard_size]
    device, trainable = layout.plan.cluster.device, [number for number, stage in enumerate(stages) if stage.trainable]
    at_ends = bool(layout.in_bubbles) and not device.overlaps
    program = add_data_parallel(
        program,
        zero,
        trainable,
        copied=copied,
        at_ends=at_ends,
        gathers_first=bool(layout.in_bubbles),
        islands_differ=layout.plan.filling == "by_step",
    )
    if at_ends and dry_run(program, blocking=True).cycle:
        raise UserError(
            f"encoders in bubbles and the backbone wait for each other on device {device.name!r}, whose communication "
            "holds up computation: units need zero 0 or 1 there, with no collectives in each microbatch."
        )
    if layout.backbone.replicated and dry_run(program, blocking=not device.overlaps).cycle:
        raise UserError(
            f"unit {layout.backbone.name!r}: zero is {layout.backbone.zero}, and stages that share out a replicated "
            f"module take passes in different orders under {layout.plan.schedule!r}, so that they would wait for each "
            "other in its collectives; use zero 0 or 1."
        )
    try:
        program = add_communication(program, holds_up=not device.overlaps)
    except ArgumentError:
        if not (units := meeting_units(layout.plan)):
            raise
        raise UserError(
            f"replicas of unit {units[0].name!r} share sequences, items or experts, and would wait for each other: "
            "they have other work before the same pass; let encoders run outside bubbles, or replicas share nothing."
        ) from None
    return PlannedProgram(program, tuple(stages), layout)


def _check_taken_together(layout: Layout, stages: Sequence[PlannedStage]) -> None:
    """Raise UserError if encoders in bubbles that meet in collectives of each microbatch take others of these."""
    taken: dict[object, tuple[int, ...]] = {}
    for stage in stages:
        if stage.unit in layout.in_bubbles and stage.zero > 1:
            pipeline = stage.replica % (layout.backbone.pp // stage.unit.pp)
            if taken.setdefault((stage.unit.name, stage.index, pipeline), stage.microbatches) != stage.microbatches:
                raise UserError(
                    f"unit {stage.unit.name!r}: zero is {stage.zero}, and fills give its pipelines beside each replica "
                    "of the backbone different microbatches; give the replicas the same fills, or set zero to 0 or 1."
                )


def _unfilled(layout: Layout, split: bool) -> tuple[Program, list[PlannedStage]]:
    """A Program without encoders in bubbles and without communication, and its stages."""
    island = layout.island
    stages = list(layout.stages)
    num_pipelined = len(island.stages)
    # 1. The passes of units with ranks of their own.
    program = _passes(layout, island, stages[:num_pipelined])
    # 2. Replicated encoders, beside the backbone's stages.
    backbone = [number for number, stage in enumerate(stages[:num_pipelined]) if stage.unit is layout.backbone]
    encoders = {stage.modules[0]: stage.has_backward for stage in stages[num_pipelined:]}
    program = add_replicas(program, encoders, backbone)
    # 3. Recomputation.
    recomputed = [n for n, stage in enumerate(stages) if any(stage.recomputed.values()) and stage.has_backward]
    program = add_recompute(program, recomputed)
    # 4. Parts of the backbone's passes.
    for number in backbone if split else ():
        num_parts = LAYER_PARTS * stages[number].num_layers
        program = split_parts(program, number, num_parts, num_parts if stages[number].has_backward else 1)
        stages[number] = replace(stages[number], num_parts=num_parts, has_halves=True)
    return program, stages


def _passes(layout: Layout, island: Island, stages: list[PlannedStage]) -> Program:
    """Forward and backward passes of the units with ranks of their own, in the order of the schedule."""
    plan, unit, num_microbatches = layout.plan, layout.backbone, layout.num_microbatches
    has_backward = [stage.has_backward for stage in stages]
    if plan.schedule in ("gpipe", "1f1b"):
        generate = dag_gpipe if plan.schedule == "gpipe" else dag_1f1b
        return generate(island.stages, island.edges, num_microbatches, has_backward)
    if plan.schedule == "interleaved_1f1b" and len(layout.units) > 1:
        ranks = [stage.rank for stage in stages]
        backbone = [number for number, stage in enumerate(stages) if stage.unit is unit]
        replicas = [range(first, first + len(unit.stages)) for first in backbone[:: len(unit.stages)]]
        return virtual_pipeline(
            island, ranks, replicas, num_microbatches, has_backward, deferred_warmup=plan.deferred_warmup
        )
    if plan.schedule == "interleaved_1f1b":
        num_chunks = len(unit.stages) // unit.pp
        program = interleaved_1f1b(unit.pp, num_chunks, num_microbatches, deferred_warmup=plan.deferred_warmup)
    else:
        program = (zb_h1 if plan.schedule == "zb_h1" else zb_v)(unit.pp, num_microbatches)
    named = tuple(replace(stage, module=one.module) for stage, one in zip(program.stages, island.stages))
    rows = tuple(tuple(a for a in row if a.kind is Kind.F or has_backward[a.stage]) for row in program.actions)
    return replace(program, stages=named, actions=rows)


def _filled(layout: Layout, program: Program, fills: Sequence[Fill]) -> tuple[Program, list[PlannedStage]]:
    """The Program with encoders in bubbles, and their stages. They run where the fills say; without fills, all forward
    passes run before the backbone's work and all backward passes after it.
    """
    pipelines = list(_encoder_pipelines(layout, program, fills))
    encoders = [encoder for encoder, _ in pipelines]
    fills = fills or coarse_fills(program, encoders)
    filled = fill_bubbles(program, encoders, fills)
    num_parts = [1] * filled.num_stages
    for row in filled.actions:
        for action in row:
            num_parts[action.stage] = max(num_parts[action.stage], action.part + 1)
    stages = [stage for _, pipeline_stages in pipelines for stage in pipeline_stages]
    first, model = program.num_stages, layout.plan.model
    in_parts = [replace(stage, num_parts=num) for stage, num in zip(stages, num_parts[first:], strict=True)]
    return filled, [replace(stage, has_sums=stage.num_parts == parts_with_sums(stage, model)) for stage in in_parts]


def _encoder_pipelines(
    layout: Layout, program: Program, fills: Sequence[Fill]
) -> Iterator[tuple[EncoderPipeline, list[PlannedStage]]]:
    """The encoder pipelines beside each replica of the backbone, with their stages.

    A unit with pp stages has k = (pp of the backbone) / pp pipelines beside each replica. Stage s of pipeline j is on
    the backbone's pipeline rank s * k + j, because the unit's own ranks lie there.
    """
    backbone = [stage for stage in layout.stages if stage.unit is layout.backbone]
    number = program.num_stages
    for unit in layout.in_bubbles:
        num_pipelines = layout.backbone.pp // unit.pp
        sinks = _sinks(layout, unit)
        for replica in range(layout.num_replicas(layout.backbone)):
            on_rank = {stage.rank: stage for stage in backbone if stage.replica == replica}
            numbers = [range(number + j * unit.pp, number + (j + 1) * unit.pp) for j in range(num_pipelines)]
            number += num_pipelines * unit.pp
            for j, microbatches in enumerate(_encoded_microbatches(layout, fills, numbers)):
                ranks = tuple(min(on_rank) + index * num_pipelines + j for index in range(unit.pp))
                hosts = [on_rank[rank] for rank in ranks]
                stages = _encoder_stages(layout, unit, replica * num_pipelines + j, hosts, microbatches)
                has_backward = tuple(stage.has_backward for stage in stages)
                module = "+".join(unit.modules)
                sink, *again = sinks[replica]
                yield EncoderPipeline(module, ranks, microbatches, sink, has_backward, tuple(again)), stages


def _encoder_stages(
    layout: Layout, unit: Unit, replica: int, hosts: Sequence[PlannedStage], microbatches: tuple[int, ...]
) -> list[PlannedStage]:
    """The stages of one encoder pipeline. hosts: for each stage, a stage of the backbone on the same program rank."""
    return [
        PlannedStage(
            unit,
            layers,
            unit.recompute[index] if unit.recompute else {},
            replica,
            host.rank,
            host.ranks,
            layout.data_ranks(unit, range(index, index + 1)),
            host.examples,
            microbatches,
            layout.has_backward[unit.name][index],
            layout.trainable(layers),
            index=index,
        )
        for index, (host, layers) in enumerate(zip(hosts, layout.layers(unit)))
    ]


def _sinks(layout: Layout, unit: Unit) -> dict[int, list[int]]:
    """For each replica of the backbone, the numbers of the stages that take in the outputs of a unit's modules."""
    model = layout.plan.model
    entries = {block for name in unit.modules for block in model.entries(name, BACKBONE)}
    sinks: dict[int, list[int]] = {}
    for number, stage in enumerate(layout.stages):
        if entries.intersection(range(*stage.layers.get(BACKBONE, (0, 0)))):
            sinks.setdefault(stage.replica, []).append(number)
    return sinks


def _encoded_microbatches(layout: Layout, fills: Sequence[Fill], pipelines: list[range]) -> tuple[tuple[int, ...], ...]:
    """The microbatches that each encoder pipeline encodes: those in the fills, or without fills an even share.

    pipelines: the numbers of each pipeline's stages.
    """
    if not fills:
        num, size = len(pipelines), layout.num_microbatches
        return global_order([size // num + (j < size % num) for j in range(num)])
    encoded: list[dict[int, None]] = [{} for _ in pipelines]
    for fill in fills:
        action = parse_action(fill.action)
        for microbatches, stages in zip(encoded, pipelines):
            if action.kind is Kind.F and action.stage == stages.start:
                microbatches[action.microbatch] = None
    if not all(encoded):
        empty = pipelines[encoded.index({})].start
        raise UserError(f"no fill says where the forward passes of stage {empty} run; every pass needs a place.")
    return tuple(map(tuple, encoded))
