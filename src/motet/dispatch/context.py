"""What a rank runs of packed sequences that it shares with others: some of their rows.

They are the context-parallel ranks of a replica, and those of all replicas in microbatches of which sequences are cut.
They read the tokens of all that they share, which are few bytes, and know from these who has which rows
(`assign/context_rows.py`). The rows of encoders come to these ranks by items, as senders do not know where
they stand (`assign.rows.Dealing`), or stay where their fragments are encoded; a Route brings them to their places. What
generators are given goes the other way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from motet.assign.taken_rows import Taking
from motet.core.arrays import Int64Array
from motet.core.context_rows import ContextRows
from motet.core.plan import Plan
from motet.core.sight import CAUSAL, Sight
from motet.core.workload import BACKBONE
from motet.dispatch.exchange import exchange, exchange_rows
from motet.dispatch.route import Route
from motet.schedule.plan_units import cuts_sequences

if TYPE_CHECKING:
    from motet.dispatch.batch import PackedSequences

ContextExchange = Literal["auto", "group_cast", "all_gather", "ulysses"]
"""How rows of other ranks get to attention: the keys that are seen, all keys, or each head's rows of all ranks."""


class ContextConfig(BaseModel):
    """`[context]` of a recipe.

    exchange: how attention gets rows of other context-parallel ranks; "auto" takes the way that moves least.
    head_groups: groups of heads of keys and values: those of the next travel while attention of one is computed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    exchange: ContextExchange = Field(
        "auto", description="how attention gets rows of other ranks that share a sequence, under a plan with `cp`"
    )
    head_groups: int = Field(
        1,
        ge=1,
        description="groups of heads whose keys and values travel one after the other, while attention of others is "
        "computed; with `exchange` `group_cast` or `all_gather`",
    )

    @model_validator(mode="after")
    def _groups_what_is_cast(self) -> ContextConfig:
        if self.head_groups > 1 and self.exchange not in ("group_cast", "all_gather"):
            raise ValueError(
                f"head_groups = {self.head_groups} lets keys and values of heads travel one group after the other, and "
                f'exchange = "{self.exchange}" takes or may take heads of all rows at once (Ulysses); set exchange = '
                '"group_cast" or "all_gather", or remove head_groups'
            )
        return self


DEFAULT_CONTEXT = ContextConfig()


@dataclass(frozen=True)
class ContextPlace:
    """Where a rank stands among the ranks that share sequences of the backbone.

    c, cp:   its number in its replica, and how many ranks there are.
    sources: encoders that feed the backbone. sinks: generators that it feeds.
    trained: encoders to which gradients go back, and generators from which they come.
    taking:  how rows are taken in of an encoder, or given of a generator's items.
    config:  as of the recipe.
    merges:  whether a merge of the user's own takes sequences whole.
    sight:   what rows of sequences see, by which they are dealt out.
    """

    c: int
    cp: int
    sources: frozenset[str]
    sinks: frozenset[str]
    trained: frozenset[str]
    taking: Mapping[str, Taking]
    config: ContextConfig = DEFAULT_CONTEXT
    merges: bool = False
    sight: Sight = CAUSAL

    @staticmethod
    def of(
        plan: Plan,
        c: int,
        config: ContextConfig = DEFAULT_CONTEXT,
        *,
        merges: bool = False,
        sight: Sight | None = None,
    ) -> ContextPlace | None:
        """The place of a rank of the backbone's unit; None if no other rank shares its sequences in any step.

        sight: None: as the Plan's model says, of which no rows see any behind them.
        """
        unit, model = plan.unit_of(BACKBONE), plan.model
        if unit.cp == 1 and not cuts_sequences(plan):
            return None
        sources, sinks = frozenset(model.sources(BACKBONE)), frozenset(model.generators)
        trained = frozenset(
            name for name in sources if model.module(name).layers[-1].trainable or model.input_gradients[name][-1]
        ) | frozenset(name for name in sinks if model.moved(name)[1])
        taking = {name: Taking.of(plan, name) for name in sources | sinks}
        sight = sight or Sight.of_model(model)
        return ContextPlace(c, unit.cp, sources, sinks, trained, taking, config, merges, sight)


@dataclass(frozen=True, eq=False)
class MergeShare:
    """The sequences that one of several ranks merges whole, by a merge of the user's own, before each rank runs its
    rows. Each sequence is merged on one of the ranks that have some of its rows.

    sequences: these, with all of their rows. item: int64 [num_rows], of each row the sequence among those of the rank.
    routes:    phase -> the way of its rows from the ranks that take them in to those that merge; of phases that have
               any, in the same order on all ranks.
    to_places: the way of merged rows to the ranks that run them.
    """

    sequences: PackedSequences
    item: Int64Array
    routes: Mapping[str, Route]
    to_places: Route

    @staticmethod
    def of(
        packed: PackedSequences, rows: ContextRows, rank: int, merges_on: Int64Array, routes: Mapping[str, Route]
    ) -> MergeShare:
        """What a rank merges. packed: all rows of the sequences that it knows. merges_on: int64 [num_sequences], the
        rank that merges each.
        """
        here, merged_by = np.flatnonzero(merges_on == rank), np.repeat(merges_on, rows.lengths)
        to_places = route_to_places(rows.owner.astype(np.int64), merged_by, rank, rows.num_ranks)
        to_places = replace(to_places, moved_rows=1)  # Some do, on all ranks, or else all know of none.
        return MergeShare(packed.of(here), np.repeat(here, rows.lengths[here]), routes, to_places)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> MergeShare:
        """As of `ContextShare`."""
        routes = {phase: route.with_indices(change) for phase, route in self.routes.items()}
        sequences = self.sequences.with_tensors(change)
        return replace(self, sequences=sequences, routes=routes, to_places=self.to_places.with_indices(change))


@dataclass(frozen=True, eq=False)
class ContextShare:
    """The part of packed sequences that one of several ranks runs.

    whole:     the sequences with all of their rows, on the CPU: who sees whom follows from their places.
    rows:      which rank has which rows. rank: which of them this one is.
    num_whole: the first sequences, of which this rank has all rows; other ranks know nothing of them.
    numbers:   int64 [num_sequences - num_whole], of each other sequence among all that any ranks share, `num_shared`.
    predicted: LongTensor [n], those of its rows behind which a target stands. labels: LongTensor [n], that target: it
               may be a row of another rank.
    ended:     int64 [n], sequences whose last row is here. ends: LongTensor [n], that row among those of this rank.
    routes:    phase -> the way of its rows from the ranks that take them in to the ranks of their places; of phases
               that have any, in the same order on all ranks.
    given:     generator -> the way of what it is given, from the ranks of its places to those that give it away; of
               those that have any items, on all ranks.
    trained:   the phases whose rows' gradients go back; None: rows say it, the same on all ranks.
    group:     the ranks that share the sequences. method: how attention gets rows of others.
    head_groups: as of `ContextConfig`.
    merging:   what the rank merges of sequences; None: what stands at each place is merged by the rank that has it.
    sent:      what `count_bytes` has been told.
    """

    whole: PackedSequences
    rows: ContextRows
    rank: int
    numbers: Int64Array
    num_shared: int
    predicted: Tensor
    labels: Tensor
    ended: Int64Array
    ends: Tensor
    routes: Mapping[str, Route] = field(default_factory=dict)
    given: Mapping[str, Route] = field(default_factory=dict)
    trained: frozenset[str] | None = frozenset()
    group: dist.ProcessGroup | None = None
    method: ContextExchange = "auto"
    sent: deque[float] = field(default_factory=deque)  # FSDP's mixed precision copies lists.
    num_whole: int = 0
    head_groups: int = 1
    merging: MergeShare | None = None

    def count_bytes(self, size_bytes: float) -> None:
        """Note bytes that this rank has given to others that share the sequences."""
        self.sent.append(size_bytes)

    @property
    def own(self) -> Int64Array:
        """The rows of this rank, ascending, int64 [n]."""
        return self.rows.rows[self.rank]

    def placed(self, phase: str, rows: Tensor) -> Tensor:
        """Rows of a phase that this rank has taken in -> those whose places are here. A collective, in backward too."""
        return self._moved(phase, rows, self.routes[phase])

    def to_merge(self, phase: str, rows: Tensor) -> Tensor:
        """Rows of a phase that this rank has taken in -> those of sequences that it merges. As `placed`."""
        assert self.merging is not None, "a merge of the user's own"
        return self._moved(phase, rows, self.merging.routes[phase])

    def merged(self, rows: Tensor) -> Tensor:
        """Rows of the sequences that this rank has merged -> those whose places are here. A collective."""
        assert self.merging is not None, "a merge of the user's own"
        return self._exchanged(rows, self.merging.to_places, torch.is_grad_enabled())

    def collected(self, generator: str, rows: Tensor) -> Tensor:
        """Rows at places of a generator's items -> all rows of the items that this rank gives it. As `placed`."""
        return self._moved(generator, rows, self.given[generator])

    def _moved(self, phase: str, rows: Tensor, route: Route) -> Tensor:
        is_trained = rows.requires_grad if self.trained is None else phase in self.trained
        return self._exchanged(rows, route, is_trained and torch.is_grad_enabled())

    def _exchanged(self, rows: Tensor, route: Route, goes_back: bool) -> Tensor:
        row_bytes = rows.element_size() * rows.shape[1]
        self.count_bytes((route.num_rows_in - route.send_splits[self.rank]) * row_bytes)
        if goes_back:
            self.count_bytes((route.num_rows_out - route.recv_splits[self.rank]) * row_bytes)
        return (exchange if goes_back else exchange_rows)(rows, route, self.group)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> ContextShare:
        """The same with all tensors but those of `whole` changed, as to another device."""
        predicted, labels, ends = (change(tensor) for tensor in (self.predicted, self.labels, self.ends))
        routes, given = (
            {phase: route.with_indices(change) for phase, route in each.items()} for each in (self.routes, self.given)
        )
        merging = self.merging and self.merging.with_tensors(change)
        return replace(self, predicted=predicted, labels=labels, ends=ends, routes=routes, given=given, merging=merging)


def pairs_of_rows(packed: PackedSequences, sight: Sight) -> Int64Array | None:
    """As of `Sight.pairs`. packed: sequences with all of their rows. Raises ValueError as `Sight.together` does."""
    offsets = packed.offsets.numpy().astype(np.int64)
    places = {phase: positions.numpy() for phase, positions in packed.feature_positions.items()}
    return sight.pairs(np.diff(offsets), sight.together(offsets, packed.targets.numpy(), places))


def share_sequences(rows: ContextRows, rank: int, whole: PackedSequences) -> ContextShare:
    """The part of a rank in sequences; no rows of encoders yet.

    whole: with all rows; without tokens and targets on a rank that has read none.
    """
    tokens, targets, own, starts = whole.tokens, whole.targets, rows.rows[rank], whole.offsets[:-1].long()
    is_own = torch.from_numpy(rows.owner == rank)
    predicted = torch.empty(0, dtype=torch.int64)
    if len(tokens):
        is_target = targets.clone()
        is_target[starts[starts < len(is_target)]] = False  # Nothing predicts a first token.
        predicted = is_target.nonzero()[:, 0]
        predicted = predicted[is_own[predicted - 1]]
    last = np.cumsum(rows.lengths) - 1
    ended = (
        np.flatnonzero((rows.lengths > 0) & (rows.owner[np.maximum(last, 0)] == rank)) if rows.num_rows else last[:0]
    )
    return ContextShare(
        whole,
        rows,
        rank,
        np.arange(len(rows.lengths)),
        len(rows.lengths),
        torch.from_numpy(np.searchsorted(own, predicted.numpy() - 1)),
        tokens[predicted] if len(tokens) else predicted,
        ended,
        torch.from_numpy(np.searchsorted(own, last[ended])),
    )


def route_to_places(
    owner: Int64Array, taken_in: Int64Array, rank: int, num_ranks: int, turn: Int64Array | None = None
) -> Route:
    """The Route of one rank for the rows of a phase.

    owner:    int64 [num_rows], the rank that has the place of each row. taken_in: int64 [num_rows], the rank that has
              the row before. All rows are those of the ranks that share sequences, in the order of their places.
    turn:     int64 [num_rows], by which a rank has its rows, then by their places; None: they are in this order.
    """
    here, wanted = np.flatnonzero(taken_in == rank), np.flatnonzero(owner == rank)
    send, received = (np.argsort(ranks, kind="stable") for ranks in (owner[here], taken_in[wanted]))
    if turn is not None:
        stands_at = np.empty_like(here)
        stands_at[np.argsort(turn[here], kind="stable")] = np.arange(len(here))
        send = stands_at[send]
    return Route(
        send_index=torch.from_numpy(send),
        send_splits=np.bincount(owner[here], minlength=num_ranks).tolist(),
        recv_splits=np.bincount(taken_in[wanted], minlength=num_ranks).tolist(),
        recv_index=torch.from_numpy(np.argsort(received, kind="stable")),
        moved_rows=int((owner != taken_in).sum()),
        crossing_rows=0,
    )
