"""The Timeline of a simulated Program. A text is made when it is read, because most of a million texts never are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from motet.core.arrays import Float64Array, IndexArray, Int32Array
from motet.core.timeline import Timeline
from motet.schedule.program import WHOLE_RANK, Action, AlikeItems, Program
from motet.simulate.engine.action_seconds import ActionSeconds
from motet.simulate.engine.streams import STREAMS, TENSOR
from motet.simulate.engine.table import CODES, KINDS, ActionTable


class Labels(Sequence[str]):
    """A sequence with few distinct texts: entry i is names[number[i]]."""

    def __init__(self, names: Sequence[str], number: Int32Array) -> None:
        self.names, self.number = names, number

    @staticmethod
    def of(texts: Sequence[str]) -> Labels:
        """Labels of any sequence of texts."""
        if isinstance(texts, Labels):
            return texts
        numbers: dict[str, int] = {}
        number = [numbers.setdefault(text, len(numbers)) for text in texts]
        return Labels(list(numbers), np.array(number, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.number)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Labels: ...
    def __getitem__(self, index: int | slice) -> str | Labels:
        if isinstance(index, slice):
            return Labels(self.names, self.number[index])
        return self.names[int(self.number[index])]

    def __iter__(self) -> Iterator[str]:
        return map(self.names.__getitem__, self.number.tolist())


class ActionTexts(Sequence[str]):
    """The texts of actions, by their rows in a table."""

    def __init__(self, table: ActionTable, row: IndexArray) -> None:
        self.table, self.row = table, row

    def __len__(self) -> int:
        return len(self.row)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> ActionTexts: ...
    def __getitem__(self, index: int | slice) -> str | ActionTexts:
        if isinstance(index, slice):
            return ActionTexts(self.table, self.row[index])
        return str(self.table.action(int(self.row[index])))

    def __iter__(self) -> Iterator[str]:
        table = self.table
        columns = (table.stage, table.kind, table.microbatch, table.part, table.peer)
        for stage, kind, microbatch, part, peer in zip(*(column[self.row].tolist() for column in columns)):
            yield str(Action(stage, KINDS[kind], microbatch, part, peer))


def timeline_of(table: ActionTable, seconds: ActionSeconds, start_s: Float64Array, end_s: Float64Array) -> Timeline:
    """One span for each action, in the order of the table, then spans of tensor-parallel communication of whole passes.

    seconds: of one copy.

    A pass with such communication has two spans: its compute, then the communication on the tensor stream, during which
    the compute stream idles.
    """
    held_s, tensor_s = seconds.held_s[:, 0], seconds.tensor_s[:, 0]
    tails = np.flatnonzero(tensor_s > 0)
    computed_s = end_s.copy()
    computed_s[tails] = start_s[tails] + held_s[tails]
    row = np.concatenate([np.arange(len(table)), tails])
    module = np.where(np.isin(table.kind, [CODES[kind] for kind in WHOLE_RANK]), table.program.num_stages, table.stage)
    return Timeline(
        rank=table.rank[row],
        start_s=np.concatenate([start_s, computed_s[tails]]),
        end_s=np.concatenate([computed_s, end_s[tails]]),
        action=ActionTexts(table, row),
        kind=Labels([str(kind) for kind in KINDS], table.kind[row]),
        module=Labels([*_modules(table.program), ""], module[row]),
        stream=Labels(STREAMS, np.concatenate([seconds.stream, np.full(len(tails), TENSOR, dtype=np.int32)])),
        microbatch=table.microbatch[row],
        step=np.zeros(len(row), dtype=np.int32),
        num_ranks=table.program.num_ranks,
    )


def _modules(program: Program) -> list[str]:
    """The module of each stage."""
    stages = program.stages
    if isinstance(stages, AlikeItems):
        return [stage.module for stage in stages.first] * stages.num_ranks
    return [stage.module for stage in stages]
