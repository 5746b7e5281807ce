"""A Program: for each program rank, the ordered list of actions of one step. It follows from a Plan; the simulator and
the runtime both execute it.

A *program rank* stands for tp * cp ranks of the cluster in every island (`coordinates.py`). A *stage* is what one
program rank runs of one module, or of several in turn, for a microbatch. An edge goes from a stage to a stage that
takes in its output. Program ranks, stages and microbatches are numbered from 0.

An action prints as in torch's pipelining: `2F0` is stage 2's forward pass of microbatch 0; `2F0.3` is part 3 of it;
`2SEND_F0>5` sends its output to stage 5; `5RECV_F0<2` receives it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Generic, NamedTuple, TypeVar, overload


class Kind(StrEnum):
    """What an action does to its stage.

    Example:
        >>> str(Kind.EXCHANGE_B), Kind.EXCHANGE_B.words
        ('EXCHANGE_B', 'exchange gradients')
    """

    F = "F"  # forward
    B = "B"  # backward, for the input and for the weights
    I = "I"  # backward for the input alone (zero-bubble)  # noqa: E741
    W = "W"  # backward for the weights alone, after I
    R = "R"  # recomputation: forward again, right before backward, for activations that were not kept
    SEND_F = "SEND_F"  # the output of F, to the stage `peer`
    RECV_F = "RECV_F"  # the input of F, from the stage `peer`
    SEND_B = "SEND_B"  # the gradient of the input, back to the stage `peer`
    RECV_B = "RECV_B"  # the gradient of the output, from the stage `peer`
    EXCHANGE_F = "EXCHANGE_F"  # all-to-all of outputs of F, from the stage's group to the group of `peer`
    EXCHANGE_B = "EXCHANGE_B"  # all-to-all of the gradients of those outputs, back
    GATHER = "GATHER"  # all-gather of the stage's parameters within its group, for forward
    GATHER_B = "GATHER_B"  # the same for backward, if the parameters were freed after forward
    REDUCE = "REDUCE"  # reduction of the stage's gradients within its group
    NORM = "NORM"  # all-reduce of (squared gradient norm, loss, targets) of the step, and clipping; for all stages
    STEP = "STEP"  # optimizer, for all stages of the rank

    @property
    def words(self) -> str:
        """The name of the kind in metrics, reports and tables, e.g. "exchange gradients"."""
        return _WORDS[self]


_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the input",
    Kind.W: "backward for the weights",
    Kind.R: "recompute",
    Kind.SEND_F: "send",
    Kind.RECV_F: "receive",
    Kind.SEND_B: "send gradients",
    Kind.RECV_B: "receive gradients",
    Kind.EXCHANGE_F: "exchange",
    Kind.EXCHANGE_B: "exchange gradients",
    Kind.GATHER: "gather",
    Kind.GATHER_B: "gather for backward",
    Kind.REDUCE: "reduce",
    Kind.NORM: "norm",
    Kind.STEP: "optimizer",
}


COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.STEP})
"""Kinds that occupy the compute stream. The other kinds communicate."""
MEETING_KINDS = frozenset({Kind.F, Kind.R, Kind.B, Kind.I})
"""The passes that stages that meet run together. In W, a rank multiplies what it has."""
EXCHANGES = (Kind.EXCHANGE_F, Kind.EXCHANGE_B)
"""Kinds that join the groups of two stages. `peer` names the second stage."""
FROM_SOURCE = (Kind.SEND_F, Kind.RECV_B, *EXCHANGES)
"""Kinds whose stage is the source of their edge and whose peer is its sink. In SEND_B and RECV_F it is the reverse."""
WHOLE_RANK = (Kind.NORM, Kind.STEP)
"""Kinds that occur once a rank, for all its stages together. The action names one of these stages."""


def action_words(kind: str, module: str) -> str:
    """The name of an action in metrics: "forward image", "optimizer"."""
    return f"{Kind(kind).words} {module}".rstrip()


class Action(NamedTuple):
    """One action of one program rank.

    microbatch: -1 if the action serves the whole step.
    part: in a pass, the number of a piece of it, in execution order. In GATHER, GATHER_B and REDUCE, the number of a
          slice of the stage's parameters, in the order of forward. -1 is the whole.
    peer: the stage at the other end of a transfer or an exchange, else -1.

    Example:
        >>> str(Action(2, Kind.F, 0, part=3)), str(Action(5, Kind.RECV_F, 0, peer=2))
        ('2F0.3', '5RECV_F0<2')
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    part: int = -1
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"
        if self.part >= 0:
            text += f".{self.part}"
        if self.peer >= 0:
            text += f"{'<' if self.kind in (Kind.RECV_F, Kind.RECV_B) else '>'}{self.peer}"
        return text


@dataclass(frozen=True)
class Stage:
    """One stage of a Program.

    rank:         the program rank that runs it.
    module:       its name in pictures, e.g. "backbone", "image".
    group:        stages of one group hold the same parameters on different ranks and enter the same collectives; -1 is
                  a stage without a group.
    microbatches: the microbatches that it takes; () is all. Pipelines of an encoder in bubbles share them
                  (`generators/bubble_filling.py`).
    meets:        whether the stages of its group run each pass together, as do replicas that share sequences or
                  experts.

    Example:
        >>> Stage(rank=1, module="image", microbatches=(0, 2)).takes(1)
        False
    """

    rank: int
    module: str = "stage"
    group: int = -1
    microbatches: tuple[int, ...] = ()
    meets: bool = False

    def takes(self, microbatch: int) -> bool:
        """Whether the stage computes a microbatch."""
        return not self.microbatches or microbatch in self.microbatches


_Item = TypeVar("_Item")


class AlikeItems(Sequence[_Item], Generic[_Item]):
    """What num_ranks ranks have that are alike, rank by rank: stages, or edges.

    first:   what rank 0 has.
    on_rank: (an item of rank 0, a rank) -> the same of that rank.

    An item is made when it is read: of thousands of ranks, they are more than all else that a search holds.

    Example:
        >>> ranks = AlikeItems(("a", "b"), 1000, lambda item, rank: f"{item}{rank}")
        >>> len(ranks), ranks[3], ranks[-1]
        (2000, 'b1', 'b999')
    """

    def __init__(self, first: Sequence[_Item], num_ranks: int, on_rank: Callable[[_Item, int], _Item]) -> None:
        self.first, self.num_ranks, self.on_rank = tuple(first), num_ranks, on_rank

    def __len__(self) -> int:
        return len(self.first) * self.num_ranks

    @overload
    def __getitem__(self, number: int) -> _Item: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[_Item, ...]: ...
    def __getitem__(self, number: int | slice) -> _Item | tuple[_Item, ...]:
        numbers = range(len(self))[number]
        return self._item(numbers) if isinstance(numbers, int) else tuple(map(self._item, numbers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _item(self, number: int) -> _Item:
        rank, item = divmod(number, len(self.first))
        return self.on_rank(self.first[item], rank)


def alike_stages(first: Sequence[Stage], num_ranks: int) -> AlikeItems[Stage]:
    """The stages of ranks that have the same ones. first: those of rank 0."""
    return AlikeItems(first, num_ranks, _stage_on)


def alike_edges(first: Sequence[Edge], num_ranks: int, num_stages: int) -> AlikeItems[Edge]:
    """The edges inside ranks that have the same num_stages stages. first: those of rank 0."""
    return AlikeItems(first, num_ranks, partial(_edge_on, num_stages))


def _stage_on(stage: Stage, rank: int) -> Stage:
    return replace(stage, rank=rank)


def _edge_on(num_stages: int, edge: Edge, rank: int) -> Edge:
    source, sink = edge
    return source + rank * num_stages, sink + rank * num_stages


Edge = tuple[int, int]
Row = tuple[Action, ...]
"""The actions of one program rank, in order."""


class AlikeRows(Sequence[Row]):
    """The rows of num_ranks ranks that all do the same, each on its own num_stages stages.

    first: the row of rank 0. In the row of rank r, stages and peers are higher by r * num_stages.

    A row is made when it is read. The rows of thousands of ranks are millions of actions, and the simulator reads none.
    """

    def __init__(self, first: Row, num_ranks: int, num_stages: int) -> None:
        self.first, self.num_ranks, self.num_stages = first, num_ranks, num_stages

    def __len__(self) -> int:
        return self.num_ranks

    @overload
    def __getitem__(self, rank: int) -> Row: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, rank: int | slice) -> Row | tuple[Row, ...]:
        ranks = range(self.num_ranks)[rank]
        return self._row(ranks) if isinstance(ranks, int) else tuple(map(self._row, ranks))

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, range(self.num_ranks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _row(self, rank: int) -> Row:
        offset = rank * self.num_stages
        return tuple(
            Action(stage + offset, kind, microbatch, part, peer if peer < 0 else peer + offset)
            for stage, kind, microbatch, part, peer in self.first
        )


@dataclass(frozen=True)
class Program:
    """What every program rank does in a step.

    stages:  by number.
    edges:   (source, sink): stage `sink` takes in the output of stage `source`.
    actions: a row a program rank.

    Example:
        >>> from motet.schedule import one_f_one_b
        >>> print(one_f_one_b(num_stages=2, num_microbatches=3))
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """

    stages: tuple[Stage, ...] | AlikeItems[Stage]
    edges: tuple[Edge, ...] | AlikeItems[Edge]
    actions: tuple[Row, ...] | AlikeRows
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """Number of program ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_actions(self) -> int:
        """Number of actions over all ranks."""
        if isinstance(self.actions, AlikeRows):
            return len(self.actions.first) * self.num_ranks
        return sum(len(actions) for actions in self.actions)

    def stages_on(self, rank: int) -> dict[int, Stage]:
        """The stages of a rank, by number. O(stages); where ranks are alike, O(stages of a rank)."""
        if isinstance(self.stages, AlikeItems):
            each = len(self.stages.first)
            return {number: self.stages[number] for number in range(rank * each, (rank + 1) * each)}
        return {number: stage for number, stage in enumerate(self.stages) if stage.rank == rank}

    def edges_near(self, rank: int) -> Sequence[Edge]:
        """Edges, among which are all of a rank's stages: its own where ranks are alike, and none leaves one."""
        if isinstance(self.edges, AlikeItems):
            each = len(self.edges.first)
            return self.edges[rank * each : (rank + 1) * each]
        return self.edges

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages whose output a stage takes in."""
        return tuple(source for source, sink in self.edges if sink == stage)

    def sinks(self, stage: int) -> tuple[int, ...]:
        """The stages that take in a stage's output."""
        return tuple(sink for source, sink in self.edges if source == stage)

    def with_rows(self, change: Callable[[Row], Iterable[Action]]) -> Program:
        """The Program with every row changed. If the rows are `AlikeRows`, only the first is changed, for all ranks."""
        rows = self.actions
        if isinstance(rows, AlikeRows):
            return replace(self, actions=AlikeRows(tuple(change(rows.first)), rows.num_ranks, rows.num_stages))
        return replace(self, actions=tuple(tuple(change(row)) for row in rows))

    def with_row(self, rank: int, change: Callable[[Row], Iterable[Action]]) -> Program:
        """The Program with one of `distinct_rows` changed: for `AlikeRows` the first, for all ranks."""
        rows = self.actions
        if isinstance(rows, AlikeRows):
            return self.with_rows(change)
        return replace(self, actions=(*rows[:rank], tuple(change(rows[rank])), *rows[rank + 1 :]))

    @property
    def distinct_rows(self) -> Sequence[Row]:
        """The rows that `with_rows` changes: all, or the first one of `AlikeRows`."""
        return (self.actions.first,) if isinstance(self.actions, AlikeRows) else self.actions

    @property
    def distinct_edges(self) -> Sequence[Edge]:
        """The edges between the stages of `distinct_rows`: all, or the first ones, of rank 0."""
        edges = self.edges
        return edges.first if isinstance(edges, AlikeItems) and isinstance(self.actions, AlikeRows) else edges

    @property
    def num_distinct_stages(self) -> int:
        """Number of stages in `distinct_rows`. These stages have the lowest numbers."""
        return self.actions.num_stages if isinstance(self.actions, AlikeRows) else self.num_stages

    def __str__(self) -> str:
        return grid(self.actions)


def grid(actions: Sequence[Sequence[Action]]) -> str:
    """A line a rank: `rank 0: 0F0 0F1 0B0 0B1`."""
    width = len(str(max(len(actions) - 1, 0)))
    return "\n".join(f"rank {rank:>{width}}: {' '.join(map(str, row))}" for rank, row in enumerate(actions))
