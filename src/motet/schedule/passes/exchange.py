"""The pass that adds exchanges: outputs of encoders go to the ranks that need them, by an all-to-all of each phase
(OrchMLLM sections 4 and 6, post-balancing), and their gradients go back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program, Row


def add_exchanges(program: Program, modules: Collection[str] | None = None) -> Program:
    """Put an EXCHANGE_F after every forward pass that feeds another stage, an EXCHANGE_B before its backward pass.

    modules: whose outputs move between ranks; None is all that feed any, () where whole examples are placed.
    Alone on its rank's group a stage exchanges nothing. Raises ArgumentError for a module that feeds none. O(actions).
    """
    stages = program.stages[: program.num_distinct_stages]
    sinks = {source: sink for source, sink in program.edges if source < len(stages)}
    feeding = list(dict.fromkeys(stages[source].module for source in sinks))
    for name in modules or ():
        if name not in feeding:
            raise ArgumentError(f"add_exchanges: {name!r} feeds no module; {', '.join(feeding) or 'none'} do.")
    if program.num_ranks == 1:
        return program
    moved = {stage: sink for stage, sink in sinks.items() if modules is None or stages[stage].module in modules}

    def exchanged(row: Row) -> Iterator[Action]:
        for place, action in enumerate(row):
            sink = moved.get(action.stage)
            same_pass = row[place + 1 : place + 2]
            if sink is not None and action.kind is Kind.B and action.part <= 0:
                yield Action(action.stage, Kind.EXCHANGE_B, action.microbatch, peer=sink)
            yield action
            is_last = not same_pass or same_pass[0][:3] != action[:3]
            if sink is not None and action.kind is Kind.F and is_last:
                yield Action(action.stage, Kind.EXCHANGE_F, action.microbatch, peer=sink)

    return program.with_rows(exchanged)
