"""The pass that adds exchanges: an all-to-all for each encoder takes its outputs to the ranks that need them, and
another takes their gradients back (OrchMLLM sections 4 and 6, post-balancing). So does one for each generator, with
what the backbone gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program, Row


def add_exchanges(program: Program, modules: Collection[str] | None = None) -> Program:
    """Put an EXCHANGE_F after every forward pass that feeds another stage, and an EXCHANGE_B before its backward pass.

    modules: the modules whose outputs move between ranks, to all that they feed. None is all that feed a module; () is
             none, for assignments of whole examples.
    A Program of one rank gets no exchanges. Raises ArgumentError for a module that feeds no module. O(actions).
    """
    stages = program.stages[: program.num_distinct_stages]
    sinks: dict[int, list[int]] = {}
    for source, sink in program.distinct_edges:
        if source < len(stages):
            sinks.setdefault(source, []).append(sink)
    feeding = list(dict.fromkeys(stages[source].module for source in sinks))
    for name in modules or ():
        if name not in feeding:
            raise ArgumentError(f"add_exchanges: {name!r} feeds no module; {', '.join(feeding) or 'none'} do.")
    if program.num_ranks == 1:
        return program
    moved = {stage: to for stage, to in sinks.items() if modules is None or stages[stage].module in modules}

    def exchanged(row: Row) -> Iterator[Action]:
        for index, action in enumerate(row):
            to = moved.get(action.stage, ())
            if action.kind is Kind.B and action.part <= 0:
                for sink in reversed(to):
                    yield Action(action.stage, Kind.EXCHANGE_B, action.microbatch, peer=sink)
            yield action
            is_last_part = index + 1 == len(row) or row[index + 1][:3] != action[:3]
            if action.kind is Kind.F and is_last_part:
                for sink in to:
                    yield Action(action.stage, Kind.EXCHANGE_F, action.microbatch, peer=sink)

    return program.with_rows(exchanged)
