"""A Plan into its Program: the generator that its units and schedule name, then passes in a fixed order: replicated
encoders, recomputation, parts, bubbles, data parallelism, communication; under "data_parallel" those of that schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.schedule.check.dry_run import dry_run
from motet.schedule.generators.bubble_filling import EncoderPipeline, coarse_fills, fill_bubbles, global_order
from motet.schedule.generators.dag import dag_1f1b, dag_gpipe
from motet.schedule.generators.data_parallel import data_parallel
from motet.schedule.generators.disaggregated import Island
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b
from motet.schedule.generators.modality_parallel import add_replicas
from motet.schedule.generators.virtual_pipeline import virtual_pipeline
from motet.schedule.generators.zb_h1 import zb_h1
from motet.schedule.generators.zb_v import zb_v
from motet.schedule.layout import LAYER_PARTS, Layout, PlannedStage, part_layers
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
from motet.schedule.program import Kind, Program
from motet.schedule.text import parse_action


@dataclass(frozen=True)
class Planned:
    """A Program, and what its stages and edges stand for.

    stages: by number. shares: per edge, the share of its source's output that it carries (`disaggregated.broker`).
    layout: of the Plan.
    """

    program: Program
    stages: tuple[PlannedStage, ...]
    shares: tuple[Fraction, ...]
    layout: Layout = field(compare=False)

    def stages_on(self, program_rank: int) -> tuple[int, ...]:
        """The numbers of the stages that a rank of the Program computes."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.rank == program_rank)


def program_of(plan: Plan) -> Program:
    """The Program of a Plan, with its communication and collectives.

    Raises UserError for a Plan that does not fit its model or its cluster, and for fills that cannot be.
    """
    return planned(plan).program


def planned(plan: Plan) -> Planned:
    """The same with what it stands for. Raises as `program_of` does. O(actions log actions)."""
    layout = Layout(plan)
    return _data_parallel(layout) if plan.schedule == "data_parallel" else _pipelined(layout)


def unscheduled(layout: Layout) -> Planned:
    """The stages of units with ranks of their own, without passes: to be priced, which takes none."""
    return Planned(Program((), (), (), layout.num_microbatches), layout.stages, (), layout)


def executed(plan: Plan, present: Sequence[Presence] = ()) -> Program:
    """The Program that the runtime's executor walks: without what FSDP2 does in hooks of modules (`passes/fsdp.py`).

    present: what each microbatch of a batch has, under "data_parallel"; () is everything. Raises as `program_of` does.
    """
    layout = Layout(plan)
    return _walked(layout, present) if plan.schedule == "data_parallel" else _pipelined(layout).program


def of_batch(whole: Planned, present: Sequence[Presence]) -> Program:
    """The Program of a batch, whose microbatches may lack a module or an exchange. whole: of the Plan. present: as of
    `executed`.
    """
    if not present:
        return whole.program
    return _sharded(whole.layout, _walked(whole.layout, present), whole.stages)


def _data_parallel(layout: Layout) -> Planned:
    stages = tuple(layout.data_parallel_stages())
    program = _sharded(layout, _walked(layout, ()), stages)
    return Planned(program, stages, (Fraction(1),) * len(program.edges), layout)


def _walked(layout: Layout, present: Sequence[Presence]) -> Program:
    """Data parallelism without the parts, gathers and reductions of FSDP. present: as of `executed`."""
    names = layout.data_parallel_modules
    trainable = {name: layout.trainable({name: (0, layout.backbone.stages[0][name])}) for name in names}
    program = data_parallel(trainable, layout.backbone.dp, layout.num_microbatches)
    program = add_exchanges(program, None if layout.plan.balance in ("per_phase", "auto") else ())
    if not present:
        return program
    return without_absent(program, present, [stage for stage, name in enumerate(names) if trainable[name]])


def _sharded(layout: Layout, program: Program, stages: Sequence[PlannedStage]) -> Program:
    """The same with them. stages: what those of the Program stand for."""
    unit, units = layout.backbone, {}
    passes = {(action.stage, action.kind) for action in program.distinct_rows[0]}
    for number, stage in enumerate(stages[: program.num_distinct_stages]):
        (name,) = stage.modules
        spans = part_layers(stage.num_layers, stage.num_parts)
        units[number] = [layout.trainable({name: span}) for span in spans]
        if (number, Kind.F) in passes:
            has_backward = (number, Kind.B) in passes
            program = split_parts(program, number, stage.num_parts, stage.num_parts if has_backward else 1)
    sharding = Sharding(1 if unit.zero == 0 else unit.shard_size, reshard_after_forward=unit.zero == 3)
    return add_fsdp(program, units, sharding)


def fillable(plan: Plan, *, split: bool = False) -> tuple[Planned, tuple[EncoderPipeline, ...]]:
    """What fills are decided from: the Program of a Plan but for its bubbles, without communication, and the encoder
    pipelines that run in them. The stages are those of the Program: the encoders' are not among them.

    split: the backbone's passes in parts (`layout.LAYER_PARTS`), so that encoders can run beside its tensor-parallel
           communication; a Plan's fills are read so if any runs before a part.
    """
    layout = Layout(plan)
    if plan.schedule == "data_parallel":
        raise UserError("a Plan under 'data_parallel' has no bubbles of a pipeline to fill.")
    program, stages, shares = _unfilled(layout, split)
    whole = Planned(program, tuple(stages), shares + (Fraction(1),) * (len(program.edges) - len(shares)), layout)
    return whole, tuple(encoder for encoder, _ in _encoder_pipelines(layout, program))


def _pipelined(layout: Layout) -> Planned:
    program, stages, shares = _unfilled(layout, any("." in fill.before for fill in layout.plan.fills))
    if layout.colocated:
        program, added = _filled(layout, program)
        stages += added
    zero = {number: stage.zero for number, stage in enumerate(stages) if len(stage.data_ranks) > 1}
    program = add_data_parallel(program, zero, [number for number, stage in enumerate(stages) if stage.trainable])
    device = layout.plan.cluster.device
    if layout.colocated and not device.overlaps and dry_run(program, blocking=True).cycle:
        raise UserError(
            f"encoders in bubbles and the backbone wait for each other on device {device.name!r}, whose communication "
            "holds up computation: encoders need zero 0 there, with no parameters to gather."
        )
    program = add_communication(program, blocking=not device.overlaps)
    return Planned(program, tuple(stages), shares + (Fraction(1),) * (len(program.edges) - len(shares)), layout)


def _unfilled(layout: Layout, split: bool) -> tuple[Program, list[PlannedStage], tuple[Fraction, ...]]:
    """All but encoders in bubbles and communication; its stages; the shares of the edges between and within units."""
    whole = layout.island
    stages = list(layout.stages)
    num_pipelined = len(whole.stages)
    program = _passes(layout, whole, stages[:num_pipelined])
    beside = [number for number, stage in enumerate(stages[:num_pipelined]) if stage.unit is layout.backbone]
    learn = {stage.modules[0]: stage.has_backward for stage in stages[num_pipelined:]}
    program = add_replicas(program, learn, beside)
    served = [n for n, stage in enumerate(stages) if any(stage.recomputed.values()) and stage.has_backward]
    program = add_recompute(program, served)
    for number in beside if split else ():
        num_parts = LAYER_PARTS * stages[number].num_layers
        program = split_parts(program, number, num_parts, num_parts if stages[number].has_backward else 1)
        stages[number] = replace(stages[number], num_parts=num_parts)
    return program, stages, whole.shares


def _passes(layout: Layout, whole: Island, stages: list[PlannedStage]) -> Program:
    """Forward and backward passes of the units with ranks of their own, in the order of the schedule."""
    plan, backward = layout.plan, [stage.has_backward for stage in stages]
    size, unit = layout.num_microbatches, layout.backbone
    if plan.schedule in ("gpipe", "1f1b"):
        generate = dag_gpipe if plan.schedule == "gpipe" else dag_1f1b
        return generate(whole.stages, whole.edges, size, backward)
    if plan.schedule == "interleaved_1f1b":
        if len(layout.units) > 1:
            ranks = [stage.rank for stage in stages]
            own = [number for number, stage in enumerate(stages) if stage.unit is unit]
            chunked = [range(first, first + len(unit.stages)) for first in own[:: len(unit.stages)]]
            return virtual_pipeline(whole, ranks, chunked, size, backward, deferred_warmup=plan.deferred_warmup)
        num_chunks = len(unit.stages) // unit.pp
        program = interleaved_1f1b(unit.pp, num_chunks, size, deferred_warmup=plan.deferred_warmup)
    else:
        program = zb_h1(unit.pp, size) if plan.schedule == "zb_h1" else zb_v(unit.pp, size)
    named = tuple(replace(stage, module=one.module) for stage, one in zip(program.stages, whole.stages))
    rows = tuple(tuple(a for a in row if a.kind is Kind.F or backward[a.stage]) for row in program.actions)
    return replace(program, stages=named, actions=rows)


def _filled(layout: Layout, program: Program) -> tuple[Program, list[PlannedStage]]:
    """The Program with the encoders in bubbles: where the fills say, or else before and after the backbone's work."""
    pipelines = list(_encoder_pipelines(layout, program))
    encoders = [encoder for encoder, _ in pipelines]
    fills = layout.plan.fills or coarse_fills(program, encoders)
    filled = fill_bubbles(program, encoders, fills)
    num_parts = [1] * filled.num_stages
    for row in filled.actions:
        for action in row:
            num_parts[action.stage] = max(num_parts[action.stage], action.part + 1)
    stages = [stage for _, own in pipelines for stage in own]
    first = program.num_stages
    return filled, [replace(stage, num_parts=num) for stage, num in zip(stages, num_parts[first:])]


def _encoder_pipelines(layout: Layout, program: Program) -> Iterator[tuple[EncoderPipeline, list[PlannedStage]]]:
    """The encoder pipelines beside each replica of the backbone: pp of the backbone / pp of the encoder each.

    Place p of pipeline j of k is on the backbone's pipeline rank p * k + j, which is where a unit's ranks lie.
    """
    backbone = [stage for stage in layout.stages if stage.unit is layout.backbone]
    number = program.num_stages
    sinks = _sinks(layout)
    for unit in layout.colocated:
        num_pipelines = layout.backbone.pp // unit.pp
        for replica in range(layout.num_replicas(layout.backbone)):
            on_rank = {stage.rank: stage for stage in backbone if stage.replica == replica}
            first_rank = min(on_rank)
            numbers = [range(number + j * unit.pp, number + (j + 1) * unit.pp) for j in range(num_pipelines)]
            number += num_pipelines * unit.pp
            for j, taken in enumerate(_microbatches(layout, numbers)):
                at = [first_rank + place * num_pipelines + j for place in range(unit.pp)]
                stages = [
                    PlannedStage(
                        unit,
                        layers,
                        unit.recompute[place] if unit.recompute else {},
                        replica * num_pipelines + j,
                        rank,
                        on_rank[rank].ranks,
                        layout.data_ranks(unit, range(place, place + 1)),
                        on_rank[rank].examples,
                        taken,
                        layout.has_backward[unit.name][place],
                        layout.trainable(layers),
                        place=place,
                    )
                    for place, (rank, layers) in enumerate(zip(at, layout.layers(unit)))
                ]
                flags = tuple(stage.has_backward for stage in stages)
                module = "+".join(unit.modules)
                yield EncoderPipeline(module, tuple(at), taken, sinks[replica], flags), stages


def _sinks(layout: Layout) -> dict[int, int]:
    """Per replica of the backbone, the number of the first stage that runs any of it."""
    found: dict[int, int] = {}
    for number, stage in enumerate(layout.stages):
        if BACKBONE in stage.modules:
            found.setdefault(stage.replica, number)
    return found


def _microbatches(layout: Layout, numbers: list[range]) -> tuple[tuple[int, ...], ...]:
    """Per pipeline, what its stages encode: as the fills say, or else every one in turn."""
    if not layout.plan.fills:
        num, size = len(numbers), layout.num_microbatches
        return global_order([size // num + (j < size % num) for j in range(num)])
    taken: list[dict[int, None]] = [{} for _ in numbers]
    for fill in layout.plan.fills:
        action = parse_action(fill.action)
        for own, stages in zip(taken, numbers):
            if action.kind is Kind.F and action.stage == stages.start:
                own[action.microbatch] = None
    if not all(taken):
        empty = numbers[taken.index({})].start
        raise UserError(f"no fill says where the forward passes of stage {empty} run; every pass needs a place.")
    return tuple(tuple(own) for own in taken)
