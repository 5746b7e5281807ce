"""Encoders colocated with a backbone's pipeline, their work in its bubbles: how a placement is expressed (Optimus
sections 4.2 and 4.3). Which placement is good, the planner decides.

Beside each pipeline of the backbone run m = DP_enc / DP_llm pipelines of each encoder, on the same ranks; each encodes
some of the backbone's microbatches, and an encoder action bears the number of the backbone's microbatch that its output
becomes (global ordering, Figure 13). A slice of a pass is a part: a layer, a sub-layer or a kernel.
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
    microbatches: those of the backbone that it encodes, in the order in which it does.
    sink:         the stage of the backbone that takes in its output.
    has_backward: per stage; () if all have.
    """

    module: str
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    sink: int = 0
    has_backward: tuple[bool, ...] = ()


def global_order(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per encoder pipeline, the backbone's microbatches that it encodes, if pipeline j encodes counts[j] of them.

    All pipelines take equally long for one, so the k-th ones end together, and are taken by number of pipeline.
    """
    ends = sorted((k, pipeline) for pipeline, count in enumerate(counts) for k in range(count))
    found: list[list[int]] = [[] for _ in counts]
    for microbatch, (_, pipeline) in enumerate(ends):
        found[pipeline].append(microbatch)
    return tuple(map(tuple, found))


def encoder_stages(program: Program, encoders: Sequence[EncoderPipeline]) -> tuple[range, ...]:
    """The stage numbers that `fill_bubbles` gives to each pipeline: after the backbone's, in order."""
    first, found = program.num_stages, []
    for encoder in encoders:
        found.append(range(first, first + len(encoder.ranks)))
        first += len(encoder.ranks)
    return tuple(found)


def coarse_fills(program: Program, encoders: Sequence[EncoderPipeline], num_parts: int = 1) -> tuple[Fill, ...]:
    """All encoder forward passes before, all backward passes after the backbone's work (Optimus Figure 9).

    num_parts: slices of each pass. The microbatches that a pipeline encodes first come first.
    """
    parts = [f".{part}" for part in range(num_parts)] if num_parts > 1 else [""]
    forwards: list[tuple[int, int, Fill]] = []
    backwards: list[tuple[int, int, Fill]] = []
    for encoder, stages in zip(encoders, encoder_stages(program, encoders)):
        for stage, rank, backward in zip(stages, encoder.ranks, _flags(encoder)):
            start = next((str(action) for action in program.actions[rank] if action.kind in COMPUTE_KINDS), "")
            for k, i in enumerate(encoder.microbatches):
                forwards += [(k, i, Fill(rank, f"{stage}F{i}{part}", start)) for part in parts]
                backwards += [(i, 0, Fill(rank, f"{stage}B{i}{part}")) for part in parts if backward]
    return tuple(fill for fills in (forwards, backwards) for _, _, fill in sorted(fills, key=lambda one: one[:2]))


def fill_bubbles(program: Program, encoders: Sequence[EncoderPipeline], fills: Sequence[Fill]) -> Program:
    """The backbone's Program with the encoders' stages, edges and actions, these where the fills say.

    program: without communication: `add_communication` comes after, and so finds the encoders' edges too.
    fills:   all actions of all encoder stages; those before one action of the backbone run in the order given.
    Raises ArgumentError for encoders that do not encode each microbatch once, and for a fill that names what does not
    exist, comes twice, is missing, or waits for what comes after it. O(actions log actions).
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


def _flags(encoder: EncoderPipeline) -> tuple[bool, ...]:
    return encoder.has_backward or (True,) * len(encoder.ranks)


def _check_encoders(program: Program, encoders: Sequence[EncoderPipeline]) -> None:
    encoded: dict[tuple[str, int], list[int]] = {}
    for encoder in encoders:
        if not encoder.ranks or any(not 0 <= rank < program.num_ranks for rank in encoder.ranks):
            raise ArgumentError(f"encoder {encoder.module} is on ranks {encoder.ranks}; there are {program.num_ranks}.")
        if not 0 <= encoder.sink < program.num_stages or len(_flags(encoder)) != len(encoder.ranks):
            raise ArgumentError(f"encoder {encoder.module} feeds no stage, or has_backward is not one a stage.")
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
        for place, rank in enumerate(encoder.ranks):
            own = groups.setdefault((encoder.module, place), group + len(groups))
            stages.append(Stage(rank, encoder.module, own, tuple(sorted(encoder.microbatches))))
        edges += [*pairwise(numbers), (numbers[-1], encoder.sink)]
    return replace(program, stages=tuple(stages), edges=tuple(edges))


def _parsed(fill: Fill, program: Program, first: int) -> Action:
    action = parse_action(fill.action)
    stage = action.stage
    if not first <= action.stage < program.num_stages:
        raise ArgumentError(
            f"fill {fill.action}: stage {stage} is no encoder's; they are {first} to {program.num_stages - 1}."
        )
    if program.stages[action.stage].rank != fill.rank:
        rank = program.stages[action.stage].rank
        raise ArgumentError(f"fill {fill.action} is on rank {fill.rank}; stage {stage} is on rank {rank}.")
    return action


def _check_complete(actions: list[Action], encoders: Sequence[EncoderPipeline], stages: Sequence[range]) -> None:
    """Every pass of every encoder stage is there once, in as many parts as the other passes of the stage."""
    num_parts: dict[tuple[int, Kind], int] = {}
    for action in actions:
        key = action.stage, action.kind
        num_parts[key] = max(num_parts.get(key, 0), action.part + 1)
    expected = {
        Action(stage, kind, microbatch, part)
        for encoder, numbers in zip(encoders, stages)
        for stage, backward in zip(numbers, _flags(encoder))
        for kind in ((Kind.F, Kind.B) if backward else (Kind.F,))
        for microbatch in encoder.microbatches
        for part in (range(num_parts[stage, kind]) if num_parts.get((stage, kind)) else (-1,))
    }
    seen: set[Action] = set()
    for action in actions:
        if action not in expected:
            raise ArgumentError(f"fill {action} is no pass of its stage, or whole where others of it are in parts.")
        if action in seen:
            raise ArgumentError(f"fill {action} comes twice.")
        seen.add(action)
    if missing := expected - seen:
        raise ArgumentError(f"no fill says where {min(missing)} runs.")


def _filled(rank: int, row: Sequence[Action], fills: Sequence[tuple[Action, Fill]]) -> Iterator[Action]:
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
    cycle = dry_run(program).cycle
    if not cycle:
        return
    blamed = next((action for action in cycle if action in fills), cycle[0])
    place = f"before {fills[blamed].before}" if blamed in fills and fills[blamed].before else "at the end"
    names = ", ".join(map(str, cycle[:8])) + (", ..." if len(cycle) > 8 else "")
    raise ArgumentError(f"fill {blamed} can never run {place}: {names} wait for each other in a ring.")
