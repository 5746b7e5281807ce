"""Why the fastest Plan beats a rival, what it pays for that, and what its devices cost: in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from motet.core.plan import Plan
from motet.core.words import counted_words, size_words
from motet.planner.comparison import MIN_DIFFERENCE, Comparison
from motet.planner.search_result import SimulatedCandidate
from motet.schedule.plan_units import backbone_unit, units_in_bubbles
from motet.simulate.bubbles import share_between_passes
from motet.simulate.predict.prediction import Prediction

_MAX_REASONS = 3


def against(best: SimulatedCandidate, comparison: Comparison) -> Iterator[str]:
    """How much faster the best is than a rival, why, and what it pays: bubbles, added operations, ranks, share of the
    peak, memory."""
    rival, gain = comparison.rival, comparison.gain
    name = f"{rival.candidate.strategy} ({rival.candidate.what})"
    if gain <= -MIN_DIFFERENCE:
        yield f"{name} is slower in the batch that plans are ranked by, and {-gain:.1%} faster{_range(comparison, 1)}."
        return
    if gain < MIN_DIFFERENCE:
        yield f"{name} is as fast, but for {gain:z.1%}{_range(comparison, 1)}."
        return
    figures = list(_figures(best.prediction, rival.prediction))
    reasons = [figure.words for figure in figures if figure.advantage > MIN_DIFFERENCE and figure.can_win]
    prices = [figure.words for figure in figures if figure.advantage < -MIN_DIFFERENCE and figure.can_pay]
    why = f": {'; '.join(reasons[:_MAX_REASONS])}" if reasons else ""
    yield f"It is {gain:.0%} faster than {name}{_range(comparison, 0)}{why}."
    if prices:
        yield f"What it pays for that: {'; '.join(prices[:_MAX_REASONS])}."


class _Figure(NamedTuple):
    """A figure of the best Plan beside that of a rival.

    advantage: by how much the best has the better one; below 0, the worse. words: both figures.
    can_win, can_pay: whether it is a reason for a shorter step, and a price of one.
    """

    advantage: float
    words: str
    can_win: bool = True
    can_pay: bool = True


def _figures(own: Prediction, other: Prediction) -> Iterator[_Figure]:
    idle, other_idle = (each.bubble_share for each in (own, other))
    yield _Figure(other_idle - idle, f"{idle:.0%} of it are bubbles, of the other's step {other_idle:.0%}")
    added, other_added = (each.hardware_flops / each.model_flops - 1 for each in (own, other))
    words = f"recomputation and padding add {added:.0%} to the operations, there {other_added:.0%}"
    yield _Figure(other_added - added, words)
    words = f"it uses {counted_words(own.num_ranks, 'rank')}, that {other.num_ranks:,}"
    yield _Figure(own.num_ranks / other.num_ranks - 1, words, can_pay=False)
    busy, other_busy = (
        each.hardware_flops / each.peak_flops / (each.step_s * (1 - each.bubble_share)) for each in (own, other)
    )
    yield _Figure(
        busy - other_busy, f"while they compute, ranks reach {busy:.0%} of their peak, there {other_busy:.0%}"
    )
    held, other_held = (float(each.peak_bytes.max()) for each in (own, other))
    words = f"the fullest rank holds {size_words(held)}, there {size_words(other_held)}"
    yield _Figure((other_held - held) / own.capacity_bytes, words, can_win=False)


def _range(comparison: Comparison, digits: int) -> str:
    """The batches that a gain is the median of, and the least and most of them as gains; "" for one."""
    gains = comparison.gains if comparison.gain > -MIN_DIFFERENCE else -comparison.gains
    if len(gains) == 1:
        return ""
    return f", the median of {len(gains)} batches with {gains.min():z.{digits}%} to {gains.max():z.{digits}%}"


def in_bubbles(plan: Plan, prediction: Prediction) -> Iterator[str]:
    """How much of the encoders' computation is in bubbles, where a Plan has encoders that may be."""
    inside = [name for unit in units_in_bubbles(plan) for name in unit.modules]
    if not inside:
        return
    share = share_between_passes(prediction.timeline, inside, backbone_unit(plan).modules)
    yield (
        f"{share:.0%} of the computation of {' and '.join(inside)} is in bubbles: between the first and the last pass "
        "of the backbone on the same rank. The rest is before and after."
    )


def device_hours(best: SimulatedCandidate) -> str:
    """What a billion tokens take of all devices that are hired, those that stay idle included."""
    prediction, plan = best.prediction, best.candidate.plan
    num_hired, name = plan.cluster.num_ranks, plan.cluster.device.name
    hours = best.step_s / prediction.num_tokens * 1e9 / 3600
    idle = num_hired - prediction.num_ranks
    kept = f", of which {idle:,} {'is' if idle == 1 else 'are'} idle" if idle else ""
    hired = f"{num_hired:,} {'is' if num_hired == 1 else 'are'} hired"
    of_all = f"{_digits(num_hired * hours)} hours of one {name}, as {hired}{kept}"
    return f"A billion tokens take {_digits(hours)} hours: {of_all}."


def _digits(number: float) -> str:
    """Four digits, or as many as stand before the point."""
    return f"{number:,.0f}" if number >= 1e4 else f"{number:,.4g}"
