"""Decides a whole step: which microbatch computes each example, then the ranks of each microbatch's items.

A step adds up the gradients of its microbatches, so an example may be computed in any of them. `balance.choose_step`
compares the step as it comes with one that collects the long examples. Groups (`motet.data.groups`) stay together: each
is a microbatch of one rank, which balancing may even out but not exceed. Every rank that sees the same lengths makes
the same decision by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from motet.assign.orchestrator import Decision, Orchestrator
from motet.balance import StepCosts, choose_step
from motet.balance.step_choice import Run
from motet.core.arrays import Int32Array, Int64Array
from motet.core.workload import BatchLengths


@dataclass(frozen=True, eq=False)
class DecidedMicrobatch:
    """One microbatch of a decided step.

    examples: int64 [n], its examples by their index in the step, ascending; n may be 0.
    lengths:  of these examples.
    """

    examples: Int64Array
    lengths: BatchLengths
    decision: Decision


@dataclass(frozen=True, eq=False)
class DecidedStep:
    """What was decided for a step. All fields but `decide_s` are the same on all ranks.

    method:      "defer" or "stay" (see `motet.balance.choose_step`); "" if nothing was compared.
    why:         the reason, a sentence with figures; "" if nothing was compared.
    predicted_s: seconds of the step by method; empty if nothing was compared.
    decide_s:    seconds that deciding took on this rank.

    Example:
        >>> from motet.balance import Link, Packed, StepTimes
        >>> times = StepTimes(lambda lengths: {"backbone": 0.001}, Link(1e9, 0.0), token_bytes=8)
        >>> orchestrator = Orchestrator({"backbone": Packed()}, 2, ["backbone"], times=times, defers=True)
        >>> lengths = BatchLengths(np.array([8, 4, 8, 4]), np.ones(4, int), np.array([0, 1, 0, 1], np.int32), {})
        >>> step = decide_step(orchestrator, lengths, num_microbatches=2)
        >>> [part.examples.tolist() for part in step.microbatches], step.why
        ([[0, 2], [1, 3]], 'defer: 12 ms predicted (stay 16 ms).')
    """

    microbatches: tuple[DecidedMicrobatch, ...]
    decide_s: float
    method: str = ""
    why: str = ""
    predicted_s: dict[str, float] = field(default_factory=dict)


def decide_step(
    orchestrator: Orchestrator, lengths: BatchLengths, num_microbatches: int, *, run: Run = map
) -> DecidedStep:
    """Decide all microbatches of a step.

    lengths: of the whole step. As they come, microbatches are equally many examples, one microbatch after the other;
             `lengths.home` is the rank of an example in the microbatch in which it comes. If `lengths.group` is given,
             it says both.
    run:     maps a function over the microbatches, e.g. in threads.
    Examples stay in their microbatch unless the Orchestrator defers and compares methods.
    Raises ValueError if num_microbatches does not divide the number of examples, and as `Orchestrator.decide` does.
    """
    start_s = time.perf_counter()
    orchestrator.check(lengths)
    if lengths.group is not None:
        return _decide_groups(orchestrator, lengths, lengths.group, num_microbatches, run, start_s)
    count, rest = divmod(lengths.num_examples, num_microbatches)
    if rest:
        raise ValueError(f"{num_microbatches} microbatches do not divide {lengths.num_examples} examples")
    given = np.repeat(np.arange(num_microbatches, dtype=np.int32), count)
    costs = orchestrator.costs
    if num_microbatches == 1 or not orchestrator.defers:
        parts = _parts(lengths, given, num_microbatches)
        decisions = list(run(orchestrator.decide, [part for _, part in parts]))
        return DecidedStep(_microbatches(parts, decisions), time.perf_counter() - start_s)
    assert isinstance(costs, StepCosts), "an Orchestrator that defers has times"
    work = costs.work(lengths)
    choice = choose_step(
        costs.phases(lengths, work),
        given,
        orchestrator.num_ranks,
        costs.times.link,
        methods=orchestrator.methods,
        home=lengths.home,
        room_bytes=costs.times.room_bytes,
        run=run,
    )
    chosen_s = time.perf_counter()
    parts = _parts(lengths, choice.microbatch, num_microbatches)
    decisions = [
        orchestrator.decision_of(
            chosen,
            # The work of an item does not depend on the other items.
            {name: column[(choice.microbatch == index)[lengths.of(name).example]] for name, column in work.items()},
            chosen_s,
        )
        for index, chosen in enumerate(choice.choices)
    ]
    return DecidedStep(
        _microbatches(parts, decisions),
        time.perf_counter() - start_s,
        "defer" if choice.is_deferred else "stay",
        choice.why,
        choice.predicted_s,
    )


def _decide_groups(
    orchestrator: Orchestrator,
    lengths: BatchLengths,
    group: Int64Array,
    num_microbatches: int,
    run: Run,
    start_s: float,
) -> DecidedStep:
    """Decide a step of groups. start_s: when deciding began."""
    microbatch, home = np.divmod(group, orchestrator.num_ranks)
    parts = _parts(replace(lengths, home=home.astype(np.int32)), microbatch, num_microbatches)

    def decide(part: BatchLengths) -> Decision:
        return orchestrator.within_groups(orchestrator.decide(part), part)

    decisions = list(run(decide, [part for _, part in parts]))
    return DecidedStep(_microbatches(parts, decisions), time.perf_counter() - start_s)


def _parts(
    lengths: BatchLengths, microbatch: Int32Array | Int64Array, num_microbatches: int
) -> list[tuple[Int64Array, BatchLengths]]:
    """The examples of each microbatch, and their lengths. microbatch: int [num_examples]."""
    if num_microbatches == 1:
        return [(np.arange(lengths.num_examples), lengths)]
    examples = [np.flatnonzero(microbatch == index) for index in range(num_microbatches)]
    return [(inside, lengths.take(inside)) for inside in examples]


def _microbatches(
    parts: Sequence[tuple[Int64Array, BatchLengths]], decisions: Sequence[Decision]
) -> tuple[DecidedMicrobatch, ...]:
    return tuple(
        DecidedMicrobatch(examples, lengths, decision)
        for (examples, lengths), decision in zip(parts, decisions, strict=True)
    )
