"""Colocated data-parallel training: every rank holds a share of every module, and runs the encoders in turn, then the
backbone (OrchMLLM sections 4 and 6), then the generators, which the backbone feeds (MMScale section 2.1).

The generator makes the compute actions. Passes over the Program add the rest (`schedule/passes/`):

- `add_exchanges`: outputs of encoders, and their gradients, move between ranks;
- `without_absent`: a microbatch leaves out what it does not have;
- `split_parts`, then `add_fsdp`: slices of parameters are gathered and reduced, each beside a part of a pass.

The simulator applies all of them. The runtime executes the Program without the last two, because FSDP2 gathers and
reduces in hooks of its modules. There is no R: FSDP recomputes a block inside its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from motet.core.errors import ArgumentError
from motet.core.workload import BACKBONE
from motet.schedule.program import Action, AlikeRows, Kind, Program, Stage, alike_edges, alike_stages


def data_parallel(trainable: Mapping[str, bool], num_ranks: int, num_microbatches: int) -> Program:
    """A Program of forward and backward passes, NORM and STEP. Module m on rank r is stage r * len(trainable) + m.

    trainable: by module, whether any parameter of it is updated: encoders in the order in which they run, then the
               backbone, then generators.
    The stages of a module form a group. An encoder has a backward pass if it is trainable; the backbone has one if it
    or any encoder is trainable; a generator has one if any of these or it is. NORM names the backbone's stage; it is
    there even if nothing is trainable, because it sums the loss. STEP names the last trainable module.

    Raises ArgumentError for a number below 1, and without a module. O(actions of one rank).

    Example:
        >>> print(data_parallel({"image": True, "backbone": True}, num_ranks=2, num_microbatches=1))
        rank 0: 0F0 1F0 1B0 0B0 1NORM 1STEP
        rank 1: 2F0 3F0 3B0 2B0 3NORM 3STEP
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ArgumentError(f"num_ranks is {num_ranks}, num_microbatches {num_microbatches}; both must be at least 1.")
    if not trainable:
        raise ArgumentError("there is no module; there must be a backbone.")
    if BACKBONE not in trainable:
        raise ArgumentError(f"the modules are {', '.join(trainable)}; one of them must be {BACKBONE!r}.")
    num_modules, backbone = len(trainable), list(trainable).index(BACKBONE)
    edges = [(encoder, backbone) for encoder in range(backbone)]
    edges += [(backbone, generator) for generator in range(backbone + 1, num_modules)]
    return Program(
        alike_stages([Stage(0, name, group) for group, name in enumerate(trainable)], num_ranks),
        alike_edges(edges, num_ranks, num_modules),
        AlikeRows(tuple(_row(list(trainable.values()), backbone, num_microbatches)), num_ranks, num_modules),
        num_microbatches,
    )


def _row(trainable: list[bool], backbone: int, num_microbatches: int) -> Iterator[Action]:
    """The row of rank 0: in each microbatch all forward passes, then all backward passes in reverse."""
    encoders = [stage for stage in range(backbone) if trainable[stage]]
    is_reached = any(trainable[: backbone + 1])
    generators = [stage for stage in range(backbone + 1, len(trainable)) if is_reached or trainable[stage]]
    backward = [*reversed(generators), *([backbone] if is_reached else []), *reversed(encoders)]
    for microbatch in range(num_microbatches):
        yield from (Action(stage, Kind.F, microbatch) for stage in range(len(trainable)))
        yield from (Action(stage, Kind.B, microbatch) for stage in backward)
    yield Action(backbone, Kind.NORM)
    if any(trainable):
        yield Action(max(stage for stage, flag in enumerate(trainable) if flag), Kind.STEP)
