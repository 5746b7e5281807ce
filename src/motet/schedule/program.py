"""A Program: for each pipeline rank, the ordered list of actions of one step. What a Plan implies, and what both the
simulator and the runtime execute.

A *program rank* is one pipeline rank of one replica that is told apart from the others: it stands for a group of
tensor-parallel ranks, and for all replicas that are alike. A *stage* is what one program rank runs of one module (or of
several, one after the other) for a microbatch; edges say whose output a stage takes in. Program ranks, stages and
microbatches are numbered from 0.

An action prints as in torch's pipelining: `2F0` is stage 2's forward pass of microbatch 0; `2F0.3` part 3 of it;
`2SEND_F0>5` sends its output to stage 5; `5RECV_F0<2` receives it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, overload


class Kind(StrEnum):
    """What an action does to its stage."""

    F = "F"  # forward
    B = "B"  # backward, for the input and for the weights
    I = "I"  # backward for the input alone (zero-bubble)  # noqa: E741
    W = "W"  # backward for the weights alone, after I
    R = "R"  # forward again, before backward, for the activations that were not kept
    SEND_F = "SEND_F"  # the output of F, to the stage `peer`
    RECV_F = "RECV_F"  # the input of F, from the stage `peer`
    SEND_B = "SEND_B"  # the gradient of the input, back to the stage `peer`
    RECV_B = "RECV_B"  # the gradient of the output, from the stage `peer`
    EXCHANGE_F = "EXCHANGE_F"  # all-to-all: outputs of F of the stage's group to the stages of the group of `peer`
    EXCHANGE_B = "EXCHANGE_B"  # and the gradients of those outputs back
    GATHER = "GATHER"  # all-gather of the stage's parameters within its group, for forward
    GATHER_B = "GATHER_B"  # the same again for backward, where they were freed after forward
    REDUCE = "REDUCE"  # reduction of the stage's gradients within its group
    NORM = "NORM"  # all-reduce of (squared gradient norm, loss, targets) of the step, and clipping; for all stages
    STEP = "STEP"  # optimizer, for all stages of the rank

    @property
    def words(self) -> str:
        """What metrics, reports and tables call it, e.g. "exchange gradients"."""
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
"""Kinds that occupy the compute stream; the others communicate."""
EXCHANGES = (Kind.EXCHANGE_F, Kind.EXCHANGE_B)
"""Kinds that join the groups of two stages, of which `peer` names the second."""
FROM_SOURCE = (Kind.SEND_F, Kind.RECV_B, *EXCHANGES)
"""Kinds whose stage is the source of the edge that they serve; of the other transfers it is the sink."""
WHOLE_RANK = (Kind.NORM, Kind.STEP)
"""Kinds of which a rank has one, for all its stages together; the action names one of these stages."""


def action_words(kind: str, module: str) -> str:
    """An action as metrics name it, by kind and module: "forward image", "optimizer"."""
    return f"{Kind(kind).words} {module}".rstrip()


class Action(NamedTuple):
    """One action of one program rank.

    part: a slice of a pass, numbered in execution order (of backward, for backward); of GATHER, GATHER_B and REDUCE, a
          slice of the stage's parameters, numbered as forward's parts are; -1 is the whole.
    peer: the stage at the other end, -1 where there is none.
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
    """rank: the program rank that runs it. module: names it in pictures, e.g. "backbone", "image".

    group: stages of one group hold the same parameters on different ranks, and take part in each other's collectives;
           -1 is a stage that has none.
    microbatches: those that it takes; () is all. Encoders in bubbles share them out (`bubbles.py`).
    """

    rank: int
    module: str = "stage"
    group: int = -1
    microbatches: tuple[int, ...] = ()

    def takes(self, microbatch: int) -> bool:
        return not self.microbatches or microbatch in self.microbatches


Row = tuple[Action, ...]
"""What a program rank does, in order."""


class AlikeRows(Sequence[Row]):
    """The rows of num_ranks ranks that all do the same, each on its own num_stages stages.

    first: of rank 0; rank r's stages and peers are r * num_stages above it. Rows are made when they are read: those of
    thousands of ranks are millions of actions, of which simulating needs none.
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
        by = rank * self.num_stages
        return tuple(
            Action(stage + by, kind, microbatch, part, peer if peer < 0 else peer + by)
            for stage, kind, microbatch, part, peer in self.first
        )


@dataclass(frozen=True)
class Program:
    """stages: by number. edges: (from, to), the stages whose output a stage takes in. actions: by program rank."""

    stages: tuple[Stage, ...]
    edges: tuple[tuple[int, int], ...]
    actions: tuple[Row, ...] | AlikeRows
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_actions(self) -> int:
        if isinstance(self.actions, AlikeRows):
            return len(self.actions.first) * self.num_ranks
        return sum(len(actions) for actions in self.actions)

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages whose output a stage takes in."""
        return tuple(source for source, sink in self.edges if sink == stage)

    def sinks(self, stage: int) -> tuple[int, ...]:
        """The stages that take in a stage's output."""
        return tuple(sink for source, sink in self.edges if source == stage)

    def with_rows(self, change: Callable[[Row], Iterable[Action]]) -> Program:
        """The Program with every row changed. Of rows that are all alike the first alone is changed, for all ranks."""
        rows = self.actions
        if isinstance(rows, AlikeRows):
            return replace(self, actions=AlikeRows(tuple(change(rows.first)), rows.num_ranks, rows.num_stages))
        return replace(self, actions=tuple(tuple(change(row)) for row in rows))

    @property
    def distinct_rows(self) -> Sequence[Row]:
        """The rows that `with_rows` changes: all, or the first of rows that are all alike."""
        return (self.actions.first,) if isinstance(self.actions, AlikeRows) else self.actions

    @property
    def num_distinct_stages(self) -> int:
        """Number of the stages of `distinct_rows`, which are numbered first."""
        return self.actions.num_stages if isinstance(self.actions, AlikeRows) else self.num_stages

    def __str__(self) -> str:
        return grid(self.actions)


def grid(actions: Sequence[Sequence[Action]]) -> str:
    """A line a rank: `rank 0: 0F0 0F1 0B0 0B1`."""
    width = len(str(max(len(actions) - 1, 0)))
    return "\n".join(f"rank {rank:>{width}}: {' '.join(map(str, row))}" for rank, row in enumerate(actions))
