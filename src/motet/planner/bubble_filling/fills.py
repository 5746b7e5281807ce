"""Where the work of encoders goes in the bubbles of a backbone's pipeline (Optimus sections 4.2 to 4.4, Algorithm 2).

Decided from the backbone's own Timeline, which is not simulated again. A slice of a pass goes into a bubble that holds
all of it, so nothing of the backbone is delayed.

- Coarse: forward passes before a rank's first pass of the backbone, backward passes after its last.
- Fine: in all bubbles.

`fill_times.py` says what a step takes; `fill_search.py` which microbatches each encoder pipeline takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, zip_longest
from typing import NamedTuple

import numpy as np

from motet.core.errors import ArgumentError
from motet.core.plan import Fill
from motet.core.words import counted_words
from motet.planner.bubble_filling.backbone_bubbles import BackbonePipeline, RankPasses, Slices
from motet.planner.bubble_filling.encoder_passes import Encoders
from motet.planner.bubble_filling.fill_search import fastest_step
from motet.planner.bubble_filling.fill_times import FilledStep, FillTimer, Pipelines
from motet.schedule.program import Kind
from motet.schedule.text import parse_action

_ROUNDING = 1e-9
"""A slice that starts later than an action of the backbone by this share of a slice, or less, runs before it."""


@dataclass(frozen=True)
class PlacedFills:
    """A step with encoders in bubbles.

    step_s:    seconds of the step.
    hidden:    share of the encoders' computation that runs within the backbone's own step, in its bubbles: Eff_coarse
               or Eff_fine of section 5.3.2. The rest runs before that step or after it.
    pipelines: per encoder pipeline, the microbatches that it encodes.
    fills:     where each slice runs, for `Plan.fills`.
    """

    step_s: float
    hidden: float
    pipelines: Pipelines
    fills: tuple[Fill, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Filling:
    """Placements of encoders in the bubbles of a backbone, each computed when it is first read.

    first_stage: the number of the encoders' first stage.
    pipelines:   which microbatches each encoder pipeline takes; () is to be searched for.
    """

    backbone: BackbonePipeline
    encoders: Encoders
    first_stage: int
    pipelines: Pipelines = ()

    @cached_property
    def coarse(self) -> PlacedFills:
        """Passes before and after the backbone's work only."""
        return _placed_fills(*self._coarse, self.first_stage)

    @cached_property
    def fine(self) -> PlacedFills:
        """Passes in all bubbles; never slower than coarse."""
        return _placed_fills(*self._fine, self.first_stage)

    def sliced(self, encoders: Encoders) -> Filling:
        """The same encoders with other slices, and each microbatch in the pipeline where fine placement has it."""
        return Filling(self.backbone, encoders, self.first_stage, self._fine[1].pipelines)

    @property
    def fine_s(self) -> float:
        """The step of `fine`, without listing its slices."""
        return self._fine[1].step_s

    @cached_property
    def _coarse(self) -> tuple[FillTimer, FilledStep]:
        timer = FillTimer(self.backbone, self.encoders, fine=False)
        return timer, timer.step(self.pipelines) if self.pipelines else fastest_step(timer)

    @cached_property
    def _fine(self) -> tuple[FillTimer, FilledStep]:
        timer = FillTimer(self.backbone, self.encoders, fine=True)
        if self.pipelines:
            return timer, timer.step(self.pipelines)
        return timer, fastest_step(timer, [self._coarse[1].pipelines])


def fill(backbone: BackbonePipeline, encoders: Encoders, first_stage: int) -> Filling:
    """Encoders in the bubbles of a backbone.

    first_stage: the number of the encoders' first stage, after those of the backbone.
    Raises ArgumentError for a PP that does not divide the backbone's ranks, for fewer microbatches than pipelines, and
    for backward passes where the backbone has none. Deterministic; each assignment of microbatches that is tried costs
    O(microbatches * ranks * log bubbles) at most.
    """
    num_pipelines, remainder = divmod(backbone.num_ranks, max(encoders.pp, 1))
    if remainder or len(encoders.backward) != encoders.pp:
        raise ArgumentError(
            f"encoders have passes on {encoders.pp} pp ranks forward and {len(encoders.backward)} backward; both must "
            f"be the same number, and divide the {counted_words(backbone.num_ranks, 'rank')} of the backbone."
        )
    most = num_pipelines * (encoders.max_microbatches or backbone.num_microbatches)
    if not num_pipelines <= backbone.num_microbatches <= most:
        raise ArgumentError(
            f"{counted_words(num_pipelines, 'encoder pipeline')} cannot share "
            f"{counted_words(backbone.num_microbatches, 'microbatch', 'microbatches')}, each taking from 1 to "
            f"{encoders.max_microbatches or 'all'}."
        )
    if encoders.has_backward and not np.isfinite(backbone.ready_s).all():
        raise ArgumentError("encoders have backward passes, and the backbone has none that give them gradients.")
    return Filling(backbone, encoders, first_stage)


def with_sums_apart(fills: Sequence[Fill], num_halves: Mapping[int, int], *, in_turns: bool) -> tuple[Fill, ...]:
    """The same fills of halves with the sum of each half apart, which begins where that ends (`parts_with_sums`).

    num_halves: of a pass, for the stages whose sums can be apart; passes in another number of parts stay.
    in_turns:   whether of neighbours, two forward passes or two backward ones, each runs a half while the other's sum
                is on its way. Where encoders have several stages, both could wait for what only comes behind one.

    Example:
        >>> halves = [Fill(0, f"9F{number}.{half}", "0F0.1") for number in (3, 4) for half in (0, 1)]
        >>> " ".join(fill.action for fill in with_sums_apart(halves[:2], {9: 2}, in_turns=True))
        '9F3.0 9F3.1 9F3.2 9F3.3 9F3.4'
        >>> " ".join(fill.action for fill in with_sums_apart(halves, {9: 2}, in_turns=True))
        '9F3.0 9F3.1 9F4.0 9F4.1 9F3.2 9F3.3 9F3.4 9F4.2 9F4.3 9F4.4'
    """
    actions = {fill: parse_action(fill.action) for fill in fills}
    counts = Counter(action[:3] for action in actions.values())

    def apart(fill: Fill) -> list[Fill]:
        """A half and its sum; behind the last sum comes what stands behind the blocks."""
        action = actions[fill]
        num = num_halves.get(action.stage, 0)
        if counts[action[:3]] != num:
            return [fill]
        parts = range(2 * action.part, 2 * action.part + (3 if action.part == num - 1 else 2))
        return [replace(fill, action=str(action._replace(part=part))) for part in parts]

    found: list[Fill] = []
    num_in_turns = 2 if in_turns else 1
    for _, beside in groupby(fills, key=lambda fill: (fill.rank, fill.before, actions[fill].kind)):
        passes = [list(map(apart, one)) for _, one in groupby(beside, key=lambda fill: actions[fill][:3])]
        for first in range(0, len(passes), num_in_turns):
            turns = zip_longest(*passes[first : first + num_in_turns], fillvalue=[])
            found += [fill for halves in turns for half in halves for fill in half]
    return tuple(found)


def before_whole_passes(fills: tuple[Fill, ...]) -> tuple[Fill, ...]:
    """The same fills before whole passes, if none of them runs inside one."""
    if any(map(is_inside_pass, fills)):
        return fills
    return tuple(replace(fill, before=fill.before.partition(".")[0]) for fill in fills)


def is_inside_pass(fill: Fill) -> bool:
    """Whether something of a pass of the backbone runs before the fill, and something behind it."""
    return "." in fill.before and parse_action(fill.before).part > 0


class _PlacedSlice(NamedTuple):
    rank: int
    end_s: float
    slice_s: float
    action: str

    @property
    def start_s(self) -> float:
        return self.end_s - self.slice_s


def _placed_fills(timer: FillTimer, step: FilledStep, first_stage: int) -> PlacedFills:
    backbone = timer.backbone
    slices = list(_slices(timer, step, first_stage))
    in_order = sorted(slices, key=lambda each: (each.rank, each.start_s))
    fills = tuple(Fill(each.rank, each.action, _next_action(backbone.rows[each.rank], each)) for each in in_order)
    all_s = backbone.num_microbatches * timer.encoders.microbatch_s
    hidden = 1 - _outside_s(slices, backbone.end_s) / all_s if all_s else 1.0
    return PlacedFills(step.step_s, hidden, step.pipelines, fills)


def _slices(timer: FillTimer, step: FilledStep, first_stage: int) -> Iterator[_PlacedSlice]:
    """All slices of all passes, one by one."""
    encoders, num_ranks = timer.encoders, timer.backbone.num_ranks
    for pipeline, (microbatches, times) in enumerate(zip(step.pipelines, step.times)):
        for (rank, pp_rank, end_s, _), kind, microbatch in timer.passes(pipeline, microbatches, times.lead_s):
            passes = (encoders.forward if kind is Kind.F else encoders.backward)[pp_rank]
            for encoder, (slice_s, num) in enumerate(passes):
                stage = first_stage + encoder * num_ranks + pipeline * encoders.pp + pp_rank
                for part in range(num):
                    end_s = timer.bubbles[rank].end(end_s, [Slices(slice_s, 1)])
                    action = f"{stage}{kind}{microbatch}" + (f".{part}" if num > 1 else "")
                    yield _PlacedSlice(rank, end_s, slice_s, action)


def _outside_s(slices: Sequence[_PlacedSlice], backbone_s: float) -> float:
    """Seconds of slices before the backbone's step and after it."""
    outside_s = 0.0
    for each in slices:
        before_s = max(0.0, min(each.end_s, 0.0) - each.start_s)
        after_s = max(0.0, each.end_s - max(each.start_s, backbone_s))
        outside_s += before_s + after_s
    return outside_s


def _next_action(row: RankPasses, placed: _PlacedSlice) -> str:
    """The backbone's action that a slice runs before; "" after all of them."""
    index = bisect_left(row.starts_s, placed.start_s + _ROUNDING * placed.slice_s)
    return row.names[index] if index < len(row.names) else ""
