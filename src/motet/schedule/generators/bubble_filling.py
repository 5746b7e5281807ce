"""Encoders in the bubbles of a backbone's pipeline: a Program with the encoders' actions where fills put them (Optimus
sections 4.2 and 4.3). The planner decides the fills.

Beside each pipeline of the backbone run m = DP_enc / DP_llm pipelines of each encoder, on the same ranks. Each encodes
some of the backbone's microbatches. An encoder action has the number of the backbone's microbatch that takes in its
output (global ordering, Figure 13). A pass may be cut into parts: layers, sub-layers or kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from motet.core.errors import ArgumentError
from motet.core.plan import Fill
from motet.schedule.check.dry_run import dry_run
from motet.schedule.program import COMPUTE_KINDS, Action, Kind, Program, Stage
from motet.schedule.text import parse_action


@dataclass(frozen=True)
class EncoderPipeline:
    """One pipeline of an encoder.

    ranks:        per stage, the program rank of the backbone that runs it.
    microbatches: the backbone's microbatches that it encodes, in order.
    sink:         the stage of the backbone that takes in its output.
    has_backward: per stage; () is all.
    again:        later stages of the backbone that take in its output again.

    Example:
        >>> from motet.schedule import coarse_fills, fill_bubbles, one_f_one_b
        >>> backbone = one_f_one_b(2, num_microbatches=2)
        >>> encoders = [EncoderPipeline("image", ranks=(0,), microbatches=(0, 1))]
        >>> print(fill_bubbles(backbone, encoders, coarse_fills(backbone, encoders)))
        rank 0: 2F0 2F1 0F0 0F1 0B0 0B1 2B0 2B1
        rank 1: 1F0 1B0 1F1 1B1
    """

    module: str
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    sink: int = 0
    has_backward: tuple[bool, ...] = ()
    again: tuple[int, ...] = ()


def global_order(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The backbone's microbatches that each encoder pipeline encodes. counts: how many, per pipeline.

    All pipelines take equally long for a microbatch. So their k-th microbatches end together, and are numbered by
    pipeline.
    """
    ends = sorted((k, pipeline) for pipeline, count in enumerate(counts) for k in range(count))
    microbatches: list[list[int]] = [[] for _ in counts]
    for microbatch, (_, pipeline) in enumerate(ends):
        microbatches[pipeline].append(microbatch)
    return tuple(map(tuple, microbatches))


def encoder_stages(program: Program, encoders: Sequence[EncoderPipeline]) -> tuple[range, ...]:
    """The stage numbers that `fill_bubbles` gives to each pipeline, after those of the backbone."""
    first, numbers = program.num_stages, []
    for encoder in encoders:
        numbers.append(range(first, first + len(encoder.ranks)))
        first += len(encoder.ranks)
    return tuple(numbers)


def coarse_fills(program: Program, encoders: Sequence[EncoderPipeline], num_parts: int = 1) -> tuple[Fill, ...]:
    """Fills that run all encoder forward passes before the backbone's work and all backward passes after it (Optimus
    Figure 9). Forward passes are ordered by their index in a pipeline, backward passes by microbatch.

    num_parts: number of parts of each pass.
    """
    parts = [f".{part}" for part in range(num_parts)] if num_parts > 1 else [""]
    forwards: list[tuple[int, int, Fill]] = []
    backwards: list[tuple[int, int, Fill]] = []
    for encoder, stages in zip(encoders, encoder_stages(program, encoders)):
        for stage, rank, backward in zip(stages, encoder.ranks, _has_backward(encoder)):
            start = next((str(action) for action in program.actions[rank] if action.kind in COMPUTE_KINDS), "")
            for k, i in enumerate(encoder.microbatches):
                forwards += [(k, i, Fill(rank, f"{stage}F{i}{part}", start)) for part in parts]
                backwards += [(i, 0, Fill(rank, f"{stage}B{i}{part}")) for part in parts if backward]
    return tuple(fill for fills in (forwards, backwards) for _, _, fill in sorted(fills, key=lambda one: one[:2]))


def fill_bubbles(program: Program, encoders: Sequence[EncoderPipeline], fills: Sequence[Fill]) -> Program:
    """The backbone's Program with the stages and edges of encoders, and with their actions where the fills put them.

    program: without communication. `add_communication` comes later and serves the encoders' edges too.
    fills:   one for each action of the encoder stages. Fills before the same action of the backbone keep their order.
    Raises ArgumentError for encoders that do not encode each microbatch once, for a fill that names what does not
    exist, is repeated, or waits for an action behind it, and for a missing fill. O(actions log actions).
    """
    if any(action.kind not in COMPUTE_KINDS for row in program.actions for action in row):
        raise ArgumentError("bubbles are filled before communication is added to a Program, not after.")
    _check_encoders(program, encoders)
    filled = _with_stages(program, encoders)
    actions = [_parsed(fill, filled, program.num_stages) for fill in fills]
    _check_complete(actions, encoders, encoder_stages(program, encoders))
    rows = tuple(
        tuple(_filled(rank, row, [(a, f) for a, f in zip(actions, fills) if f.rank == rank]))
        for rank, row in enumerate(program.actions)
    )
    filled = replace(filled, actions=rows)
    _check_order(filled, dict(zip(actions, fills)))
    return filled


def _has_backward(encoder: EncoderPipeline) -> tuple[bool, ...]:
    return encoder.has_backward or (True,) * len(encoder.ranks)


def _check_encoders(program: Program, encoders: Sequence[EncoderPipeline]) -> None:
    encoded: dict[tuple[str, int], list[int]] = {}
    for encoder in encoders:
        if not encoder.ranks or any(not 0 <= rank < program.num_ranks for rank in encoder.ranks):
            raise ArgumentError(f"encoder {encoder.module} is on ranks {encoder.ranks}; there are {program.num_ranks}.")
        for sink in (encoder.sink, *encoder.again):
            if not 0 <= sink < program.num_stages:
                raise ArgumentError(f"encoder {encoder.module} feeds stage {sink}; there are {program.num_stages}.")
        if len(_has_backward(encoder)) != len(encoder.ranks):
            raise ArgumentError(
                f"encoder {encoder.module}: has_backward has {len(encoder.has_backward)} flags; it must have one a "
                f"stage, {len(encoder.ranks)}."
            )
        encoded.setdefault((encoder.module, encoder.sink), []).extend(encoder.microbatches)
    for (module, _), microbatches in encoded.items():
        if sorted(microbatches) != list(range(program.num_microbatches)):
            raise ArgumentError(
                f"the pipelines of encoder {module} encode microbatches {sorted(microbatches)}; between them they must "
                f"encode each of the {program.num_microbatches} once."
            )


def _with_stages(program: Program, encoders: Sequence[EncoderPipeline]) -> Program:
    stages, edges = list(program.stages), list(program.edges)
    group = 1 + max((stage.group for stage in stages), default=-1)
    groups: dict[tuple[str, int], int] = {}
    for encoder, numbers in zip(encoders, encoder_stages(program, encoders)):
        for index, rank in enumerate(encoder.ranks):
            stage_group = groups.setdefault((encoder.module, index), group + len(groups))
            stages.append(Stage(rank, encoder.module, stage_group, tuple(sorted(encoder.microbatches))))
        edges += [*pairwise(numbers), *((numbers[-1], sink) for sink in (encoder.sink, *encoder.again))]
    return replace(program, stages=tuple(stages), edges=tuple(edges))


def _parsed(fill: Fill, program: Program, first: int) -> Action:
    """The action of a fill. first: the first stage of an encoder."""
    action = parse_action(fill.action)
    stage = action.stage
    if not first <= stage < program.num_stages:
        raise ArgumentError(
            f"fill {fill.action}: stage {stage} is no encoder's; they are {first} to {program.num_stages - 1}."
        )
    rank = program.stages[stage].rank
    if rank != fill.rank:
        raise ArgumentError(f"fill {fill.action} is on rank {fill.rank}; stage {stage} is on rank {rank}.")
    return action


def _check_complete(actions: list[Action], encoders: Sequence[EncoderPipeline], stages: Sequence[range]) -> None:
    """Every pass of every encoder stage occurs once. All passes of a kind of a stage have equally many parts."""
    num_parts: dict[tuple[int, Kind], int] = {}
    for action in actions:
        key = action.stage, action.kind
        num_parts[key] = max(num_parts.get(key, 0), action.part + 1)
    for (stage, _), num in num_parts.items():
        if num and (backward := num_parts.get((stage, Kind.B))) and backward != num:
            raise ArgumentError(
                f"stage {stage} has forward passes in {num} parts and backward passes in {backward}; they must have as "
                "many, or one of the two be whole."
            )
    expected = {
        Action(stage, kind, microbatch, part)
        for encoder, numbers in zip(encoders, stages)
        for stage, backward in zip(numbers, _has_backward(encoder))
        for kind in ((Kind.F, Kind.B) if backward else (Kind.F,))
        for microbatch in encoder.microbatches
        for part in (range(num_parts[stage, kind]) if num_parts.get((stage, kind)) else (-1,))
    }
    seen: set[Action] = set()
    for action in actions:
        if action not in expected:
            raise ArgumentError(
                f"fill {action} is no pass of its stage, or the stage's other passes have another number of parts."
            )
        if action in seen:
            raise ArgumentError(f"fill {action} comes twice.")
        seen.add(action)
    if missing := expected - seen:
        raise ArgumentError(f"no fill says where {min(missing)} runs.")


def _filled(rank: int, row: Sequence[Action], fills: Sequence[tuple[Action, Fill]]) -> Iterator[Action]:
    """The row of a rank with the actions of its fills."""
    before: dict[str, list[Action]] = {}
    for action, fill in fills:
        before.setdefault(fill.before, []).append(action)
    for action in row:
        yield from before.pop(str(action), ())
        yield action
    yield from before.pop("", ())
    for name, actions in before.items():
        raise ArgumentError(f"fill {actions[0]} runs before {name!r}, which rank {rank} does not do.")


def _check_order(program: Program, fills: dict[Action, Fill]) -> None:
    """Every action can run."""
    cycle = dry_run(program).cycle
    if not cycle:
        return
    blamed = next((action for action in cycle if action in fills), cycle[0])
    where = f"before {fills[blamed].before}" if blamed in fills and fills[blamed].before else "at the end"
    names = ", ".join(map(str, cycle[:8])) + (", ..." if len(cycle) > 8 else "")
    raise ArgumentError(f"fill {blamed} can never run {where}: {names} wait for each other in a ring.")
