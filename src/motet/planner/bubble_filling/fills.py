"""Where the work of encoders goes in the bubbles of a backbone's pipeline (Optimus sections 4.2 to 4.4, Algorithm 2).

Decided from the Timeline of the backbone alone, which is not simulated again: it stays as it is, and starts later by
the *lead*, what of the encoders' forward passes must come before it. A slice of a pass goes into a bubble that holds
all of it, so nothing of the backbone is delayed.

- Coarse: forward passes before a rank's first pass of the backbone, backward passes after its last.
- Fine: in all bubbles. The paper moves the critical pipeline's microbatches one at a time from before the backbone into
  bubbles, while the encoders' outputs are in time; where that ends is found at once. Passes are placed from the last
  one back, each as late as the time allows at which the backbone takes its output in (F_i, section 4.3); what is left
  over is the least lead. From that lead on forward passes run as early as they can, and then backward passes, as early
  as B_i and the bubbles allow.
- Which microbatches each pipeline takes: all partitions of their number where these are few, else several to begin
  with, and then moves and exchanges of one microbatch of a critical pipeline, while that shortens the step. A pipeline
  is alone on its ranks, so that only the two pipelines of a move are placed anew.

As printed, Algorithm 2 checks dependencies on the schedule before a move; here they hold for what is placed. Several
encoders are placed as if their slices were of one (section 4.4). What is frozen has no backward passes to place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, pairwise, product
from math import comb
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.errors import ArgumentError
from motet.core.plan import Fill
from motet.planner.bubble_filling.backbone_bubbles import BackbonePipeline, BubbleRoom, Slices
from motet.schedule.generators.bubble_filling import global_order
from motet.schedule.program import Kind

MAX_PARTITIONS = 64
"""Of microbatches among pipelines, that are all tried."""
MAX_MOVES, MAX_PASSES = 400, 50_000
"""Moves that are tried, in all; and passes that are placed until no more are."""

Passes = tuple[tuple[Slices, ...], ...]
"""Per place of an encoder pipeline, and per encoder: a pass of one microbatch; num 0 is none."""

Pipelines = tuple[tuple[int, ...], ...]
"""Per encoder pipeline, the microbatches that it encodes."""

_SAME = 1e-9
"""Of a slice: what starts so little later than an action of the backbone runs before it, as far as that goes."""


@dataclass(frozen=True)
class Encoders:
    """Encoders beside one pipeline of the backbone: place p of pipeline j of k is on its rank p * k + j.

    send_s:   a message from place to place, and between the last place and the backbone.
    gather_s: of the encoders' parameters, before a rank's first pass.
    finish_s: per place, after the last pass on all of its ranks: reducing the encoders' gradients, which these ranks do
              together, and the optimizer; () is nothing.
    most:     microbatches that a pipeline may take, all of whose activations it may hold at once; 0 is any number.
    """

    forward: Passes
    backward: Passes
    send_s: float = 0.0
    gather_s: float = 0.0
    finish_s: tuple[float, ...] = ()
    most: int = 0

    @property
    def num_places(self) -> int:
        return len(self.forward)

    @property
    def has_backward(self) -> bool:
        return any(slices.num for place in self.backward for slices in place)

    @property
    def microbatch_s(self) -> float:
        """Of all passes of one microbatch."""
        places = (*self.forward, *self.backward)
        return sum(slices.slice_s * slices.num for place in places for slices in place)


@dataclass(frozen=True)
class PlacedFills:
    """step_s:    what the step takes.
    hidden:    the share of the encoders' computation that is within the backbone's own step, in its bubbles:
               Eff_coarse or Eff_fine of section 5.3.2. The rest is before that step or after it.
    pipelines: per encoder pipeline, the microbatches that it encodes.
    fills:     where each slice runs, for `Plan.fills`.
    """

    step_s: float
    hidden: float
    pipelines: Pipelines
    fills: tuple[Fill, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Filling:
    """Placements of encoders in the bubbles of a backbone, each found when it is asked for.

    pipelines: which microbatches each encoder pipeline takes; () is to be searched for.
    """

    backbone: BackbonePipeline
    encoders: Encoders
    first_stage: int
    pipelines: Pipelines = ()

    @cached_property
    def coarse(self) -> PlacedFills:
        """Before and after the backbone's work."""
        return _placement(*self._coarse, self.first_stage)

    @cached_property
    def fine(self) -> PlacedFills:
        """In all bubbles; never slower than coarse."""
        return _placement(*self._fine, self.first_stage)

    def sliced(self, encoders: Encoders) -> Filling:
        """The same encoders with other slices, and each microbatch where the best fine placement has it."""
        return Filling(self.backbone, encoders, self.first_stage, self._fine[1].pipelines)

    @property
    def fine_s(self) -> float:
        """The step of `fine`."""
        return self._fine[1].step_s

    @cached_property
    def _coarse(self) -> tuple[_Search, _Found]:
        search = _Search(self.backbone, self.encoders, fine=False)
        return search, search.judge(self.pipelines) if self.pipelines else search.best()

    @cached_property
    def _fine(self) -> tuple[_Search, _Found]:
        search = _Search(self.backbone, self.encoders, fine=True)
        return search, search.judge(self.pipelines) if self.pipelines else search.best(self._coarse[1].pipelines)


def fill(backbone: BackbonePipeline, encoders: Encoders, first_stage: int) -> Filling:
    """Encoders in the bubbles of a backbone.

    first_stage: the number of the encoders' first stage, after those of the backbone.
    Raises ArgumentError for places that do not divide the backbone's ranks, for fewer microbatches than pipelines, and
    for backward passes where the backbone has none. Deterministic; each assignment of microbatches that is tried costs
    O(microbatches * ranks * log bubbles) at most.
    """
    num_pipelines, left = divmod(backbone.num_ranks, max(encoders.num_places, 1))
    if left or len(encoders.backward) != encoders.num_places:
        raise ArgumentError(
            f"encoders have {encoders.num_places} places forward and {len(encoders.backward)} backward; both must be "
            f"one number, which divides the {backbone.num_ranks} ranks of the backbone."
        )
    if not num_pipelines <= backbone.num_microbatches <= num_pipelines * (encoders.most or backbone.num_microbatches):
        raise ArgumentError(
            f"{num_pipelines} encoder pipelines cannot share {backbone.num_microbatches} microbatches, each taking "
            f"from 1 to {encoders.most or 'all'}."
        )
    if encoders.has_backward and not np.isfinite(backbone.ready_s).all():
        raise ArgumentError("encoders have backward passes, and the backbone has none that give them gradients.")
    return Filling(backbone, encoders, first_stage)


class _Stay(NamedTuple):
    """A pass of encoders on a rank: it may begin at begin_s, and takes bubbles until end_s."""

    rank: int
    place: int
    begin_s: float
    end_s: float


class _Run(NamedTuple):
    stay: _Stay
    kind: Kind
    microbatch: int


@dataclass(frozen=True)
class _Single:
    """One encoder pipeline. lead_s: that it must begin before the backbone. late_s: per place, when its passes end."""

    lead_s: float
    late_s: tuple[float, ...]


@dataclass(frozen=True)
class _Found:
    """What an assignment of microbatches leads to. outside_s: of all ranks, about, that no bubble hides."""

    pipelines: Pipelines
    singles: tuple[_Single, ...]
    step_s: float
    outside_s: float

    @property
    def key(self) -> tuple[float, float]:
        return self.step_s, self.outside_s


class _Search:
    """For the assignment of microbatches to encoder pipelines that makes the step shortest."""

    def __init__(self, backbone: BackbonePipeline, encoders: Encoders, *, fine: bool) -> None:
        self.backbone, self.encoders = backbone, encoders
        self.num_pipelines = backbone.num_ranks // encoders.num_places
        gaps = [self._gaps(row.busy_s, fine) for row in backbone.rows]
        self.rooms = [BubbleRoom(start, stop) for start, stop in gaps]
        self._mirrored = [BubbleRoom(-stop[-2::-1], -start[-2::-1]) for start, stop in gaps]
        self._forward_mirrored = tuple(place[::-1] for place in encoders.forward)
        ranks = np.array(backbone.done_s).reshape(encoders.num_places, -1)
        self._done_s = ranks.max(axis=1).tolist()
        self._needed_s = (encoders.send_s - backbone.needed_s).tolist()
        self._ready_s = (backbone.ready_s + encoders.send_s).tolist()
        self._most = encoders.most or backbone.num_microbatches
        self._singles: dict[tuple[int, tuple[int, ...]], _Single] = {}
        self._num_placed = 0

    def _gaps(self, busy_s: Float64Array, fine: bool) -> tuple[Float64Array, Float64Array]:
        """Where a rank's compute stream is idle, from long before the step to long after it."""
        sends_s = self.encoders.num_places * self.encoders.send_s
        far_s = 2 * (self.backbone.end_s + self.backbone.num_microbatches * (self.encoders.microbatch_s + sends_s)) + 1
        start, stop = np.append(-far_s, busy_s[1]), np.append(busy_s[0], far_s)
        return (start, stop) if fine else (start[[0, -1]], stop[[0, -1]])

    def places(self, pipeline: int) -> list[tuple[int, int]]:
        """(place, rank)."""
        return list(enumerate(range(pipeline, self.backbone.num_ranks, self.num_pipelines)))

    def best(self, *known: Pipelines) -> _Found:
        """known: assignments to be no worse than."""
        found = min(map(self.judge, dict.fromkeys([*self._starts(), *known])), key=lambda one: one.key)
        left = MAX_MOVES
        moves = self._moves(found)
        while left and self._num_placed < MAX_PASSES and (moved := next(moves, None)):
            left -= 1
            if (better := self.judge(moved)).key < found.key:
                found, moves = better, self._moves(better)
        return found

    def _starts(self) -> Iterator[Pipelines]:
        size, num = self.backbone.num_microbatches, self.num_pipelines
        if comb(size - 1, num - 1) <= MAX_PARTITIONS:
            cuts: Iterable[tuple[int, ...]] = ((0, *cut, size) for cut in combinations(range(1, size), num - 1))
        else:
            cuts = [tuple(pipeline * size // num for pipeline in range(num + 1))]
        for cut in cuts:
            sizes = [stop - start for start, stop in pairwise(cut)]
            if max(sizes) <= self._most:
                yield global_order(sizes)
        yield self._assigned(range(size - 1, -1, -1), self._needed_s, self._forward_mirrored, self._mirrored)
        if self.encoders.has_backward:
            yield self._assigned(range(size), self._ready_s, self.encoders.backward, self.rooms)

    def _moves(self, found: _Found) -> Iterator[Pipelines]:
        """A microbatch from a critical pipeline, of forward or of backward, to another one; alone, or for one of about
        its number in return."""
        singles = found.singles
        critical = [max(range(len(singles)), key=lambda j: key(singles[j])) for key in (_lead, _late)]
        for source in dict.fromkeys(critical):
            own = found.pipelines[source]
            for moved, (sink, other) in product(own, enumerate(found.pipelines)):
                if sink == source:
                    continue
                for returned in (None, *(one for one in other if abs(one - moved) <= len(singles))):
                    if returned is not None or (len(own) > 1 and len(other) < self._most):
                        yield _exchanged(found.pipelines, (source, moved), (sink, returned))

    def judge(self, pipelines: Pipelines) -> _Found:
        """What the step takes with these microbatches in each encoder pipeline."""
        singles = tuple(self._single(pipeline, own) for pipeline, own in enumerate(pipelines))
        encoders, end_s = self.encoders, self.backbone.end_s
        over_s = sum(max(0.0, late - end_s) for single in singles for late in single.late_s)
        before_s = encoders.num_places * sum(single.lead_s for single in singles)
        late_s = map(max, zip(*(single.late_s for single in singles)))
        finished_s = max(
            map(sum, zip(map(max, late_s, self._done_s), encoders.finish_s or (0.0,) * encoders.num_places))
        )
        step_s = encoders.gather_s + max(single.lead_s for single in singles) + finished_s
        return _Found(pipelines, singles, step_s, before_s + over_s)

    def _single(self, pipeline: int, microbatches: tuple[int, ...]) -> _Single:
        key = pipeline, microbatches
        if key not in self._singles:
            places = self.places(pipeline)[::-1]
            self._num_placed += len(microbatches) * len(places)
            free = {rank: -np.inf for _, rank in places}
            for microbatch in reversed(microbatches):
                at_s = self._needed_s[microbatch]
                for stay in self._flow(places, self._forward_mirrored, at_s, free, self._mirrored):
                    free[stay.rank] = stay.end_s
            lead_s = max(0.0, *free.values())
            ends = {stay.place: stay.end_s for stay, _, _ in self.runs(pipeline, microbatches, lead_s)}
            self._singles[key] = _Single(lead_s, tuple(ends[place] for place, _ in self.places(pipeline)))
        return self._singles[key]

    def runs(self, pipeline: int, microbatches: tuple[int, ...], lead_s: float) -> Iterator[_Run]:
        """All passes as early as can be: forward passes from the lead on, then backward passes."""
        places, encoders = self.places(pipeline), self.encoders
        free = {rank: -lead_s for _, rank in places}
        for microbatch in microbatches:
            for stay in self._flow(places, encoders.forward, -lead_s, free, self.rooms):
                free[stay.rank] = stay.end_s
                yield _Run(stay, Kind.F, microbatch)
        for microbatch in microbatches if encoders.has_backward else ():
            for stay in self._flow(places[::-1], encoders.backward, self._ready_s[microbatch], free, self.rooms):
                free[stay.rank] = stay.end_s
                yield _Run(stay, Kind.B, microbatch)

    def _flow(
        self,
        places: Sequence[tuple[int, int]],
        passes: Passes,
        at_s: float,
        free: Mapping[int, float],
        rooms: Sequence[BubbleRoom],
    ) -> list[_Stay]:
        """One microbatch through (place, rank)s; free: when each rank's pass before has ended."""
        found = []
        for place, rank in places:
            if any(slices.num for slices in passes[place]):
                begin_s = max(at_s, free[rank])
                end_s = rooms[rank].end(begin_s, passes[place])
                found.append(_Stay(rank, place, begin_s, end_s))
                at_s = end_s + self.encoders.send_s
        return found

    def _assigned(self, order: range, due_s: Sequence[float], passes: Passes, rooms: Sequence[BubbleRoom]) -> Pipelines:
        """Each microbatch in turn to the pipeline that is through with it first, of those that may take it."""
        free = dict.fromkeys(range(self.backbone.num_ranks), -np.inf)
        taken: list[list[int]] = [[] for _ in range(self.num_pipelines)]
        places = [self.places(pipeline)[::-1] for pipeline in range(self.num_pipelines)]
        for left, microbatch in zip(range(len(order), 0, -1), order):
            empty = [pipeline for pipeline, own in enumerate(taken) if not own]
            may = empty if len(empty) == left else [j for j, own in enumerate(taken) if len(own) < self._most]
            flows = {j: self._flow(places[j], passes, due_s[microbatch], free, rooms) for j in may}
            first = min(may, key=lambda j: (flows[j][-1].end_s, j * order.step))
            free.update((stay.rank, stay.end_s) for stay in flows[first])
            taken[first].append(microbatch)
        return tuple(tuple(sorted(own)) for own in taken)


def _lead(single: _Single) -> float:
    return single.lead_s


def _late(single: _Single) -> float:
    return max(single.late_s)


def _exchanged(pipelines: Pipelines, given: tuple[int, int], returned: tuple[int, int | None]) -> Pipelines:
    (source, moved), (sink, back) = given, returned
    found = [set(own) for own in pipelines]
    found[source].remove(moved)
    found[sink].add(moved)
    if back is not None:
        found[sink].remove(back)
        found[source].add(back)
    return tuple(tuple(sorted(own)) for own in found)


def _placement(search: _Search, found: _Found, first_stage: int) -> PlacedFills:
    """The slices one by one, and what they run before."""
    backbone, encoders = search.backbone, search.encoders
    placed: list[tuple[int, float, Fill]] = []
    outside_s = 0.0
    runs = (search.runs(j, own, found.singles[j].lead_s) for j, own in enumerate(found.pipelines))
    for (rank, place, begin_s, _), kind, microbatch in chain(*runs):
        row, at_s = backbone.rows[rank], begin_s
        passes = (encoders.forward if kind is Kind.F else encoders.backward)[place]
        for number, (slice_s, num) in enumerate(passes):
            stage = (
                first_stage + number * backbone.num_ranks + rank % search.num_pipelines * encoders.num_places + place
            )
            for part in range(num):
                at_s = search.rooms[rank].end(at_s, [Slices(slice_s, 1)])
                start_s = at_s - slice_s
                outside_s += max(0.0, min(at_s, 0.0) - start_s) + max(0.0, at_s - max(start_s, backbone.end_s))
                after = bisect_left(row.starts_s, start_s + _SAME * slice_s)
                before = row.names[after] if after < len(row.names) else ""
                name = f"{stage}{kind}{microbatch}" + (f".{part}" if num > 1 else "")
                placed.append((rank, start_s, Fill(rank, name, before)))
    fills = tuple(one for _, _, one in sorted(placed, key=lambda entry: entry[:2]))
    all_s = backbone.num_microbatches * encoders.microbatch_s
    return PlacedFills(found.step_s, 1 - outside_s / all_s if all_s else 1.0, found.pipelines, fills)
