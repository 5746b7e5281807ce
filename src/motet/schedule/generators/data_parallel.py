"""Colocated data-parallel training: every rank holds a share of every module, encoders run one after the other, then
the backbone (OrchMLLM sections 4 and 6).

The generator makes what is computed. Passes add the rest, each by itself (`schedule/passes/`):

- `add_exchanges`: outputs of encoders, and their gradients, move between ranks;
- `without_absent`: a microbatch leaves out what it does not have;
- `split_parts`, then `add_fsdp`: units are gathered and reduced, in a part of a pass each.

The simulator applies all of them. The runtime executes the Program without the last two: FSDP2 gathers and reduces in
hooks of its modules. Recomputation is no action of its own here, since FSDP recomputes a unit inside its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, AlikeRows, Kind, Program, Stage


def data_parallel(trainable: Mapping[str, bool], num_ranks: int, num_microbatches: int) -> Program:
    """Forward and backward passes, NORM and STEP; stage `rank * len(trained) + place` is a rank's module at a place.

    trained: by module, whether anything in it learns: encoders in the order in which they run, then the backbone. The
             stages of a module form a group.
    An encoder has a backward pass if anything in it learns, the backbone if anything does. NORM is of the backbone's
    stage, also where nothing learns: it sums the loss, too. STEP is of the last module that learns.

    >>> print(data_parallel({"image": True, "backbone": True}, 2, 1))
    rank 0: 0F0 1F0 1B0 0B0 1NORM 1STEP
    rank 1: 2F0 3F0 3B0 2B0 3NORM 3STEP

    Raises ArgumentError for a number below 1, and without a module. O(stages + actions of one rank).
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ArgumentError(f"num_ranks is {num_ranks}, num_microbatches {num_microbatches}; both must be at least 1.")
    if not trainable:
        raise ArgumentError("there is no module; there must be a backbone.")
    num_modules = len(trainable)
    edges = [(place, num_modules - 1) for place in range(num_modules - 1)]
    firsts = range(0, num_ranks * num_modules, num_modules)
    return Program(
        tuple(Stage(rank, name, group) for rank in range(num_ranks) for group, name in enumerate(trainable)),
        tuple((first + source, first + sink) for first in firsts for source, sink in edges),
        AlikeRows(tuple(_row(list(trainable.values()), num_microbatches)), num_ranks, num_modules),
        num_microbatches,
    )


def _row(trainable: list[bool], num_microbatches: int) -> Iterator[Action]:
    """What rank 0 does: in each microbatch all forward passes, then all backward passes in reverse."""
    backbone = len(trainable) - 1
    learning = [stage for stage in range(backbone) if trainable[stage]]
    backward = [backbone, *reversed(learning)] if any(trainable) else []
    for microbatch in range(num_microbatches):
        yield from (Action(stage, Kind.F, microbatch) for stage in range(len(trainable)))
        yield from (Action(stage, Kind.B, microbatch) for stage in backward)
    yield Action(backbone, Kind.NORM)
    if backward:
        yield Action(max(stage for stage, learns in enumerate(trainable) if learns), Kind.STEP)
