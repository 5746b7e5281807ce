"""What a search has found, on the terminal: the ranking, what was ruled out and why, and the winner in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.padding import Padding
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from motet.core.plan import Plan, Unit
from motet.planner.candidate import RuledOut
from motet.planner.job import Job
from motet.planner.search import Found, Result, pins_in_words
from motet.simulate.show.drawing import shown_seconds
from motet.simulate.show.plan_words import plan_in_words

_MAX_REASONS = 3
_MAX_FACTS = 3
_CLEARLY = 0.02
"""Of a step: what differs by less is not told as a reason."""
COLUMNS = ("strategy and degrees", "step", "tokens/s", "MFU", "GB a rank", "bubbles", "GPUs")
"""Of the ranking."""


def print_found(found: Found, console: Console | None = None) -> None:
    """Written to stdout unless a console is given. Raises UserError, which names the nearest miss, if nothing fits."""
    console = console or Console()
    if found.results:
        _print_ranking(found, console)
        for sentence in (*_left(found), *_lengths(found.job)):
            console.print(sentence, style="dim", highlight=False, markup=False)
        console.print()
    if found.ruled_out:
        console.print(_ruled_out(found.ruled_out))
        console.print()
    best = found.best
    console.print(f"{best.candidate.strategy}, {best.candidate.what}", style="bold", highlight=False, markup=False)
    for sentence in winner_in_words(found):
        console.print(sentence, highlight=False, markup=False)


def winner_in_words(found: Found) -> list[str]:
    """Which ranks run what, what is recomputed and balanced; why it won; what it costs. Sentences."""
    best = found.best
    prediction = best.prediction
    hours = prediction.num_ranks * best.step_s / prediction.num_tokens * 1e9 / 3600
    plan = best.candidate.plan
    sentences = [*plan_in_words(plan), *recomputed_in_words(plan), *best.candidate.facts[:_MAX_FACTS]]
    for rival in _rivals(found):
        sentences += _against(best, rival)
    return [*sentences, f"A billion tokens take {hours:,.4g} hours of one {plan.cluster.device.name}."]


def recomputed_in_words(plan: Plan) -> Iterator[str]:
    """By pipeline rank, as OmniBal's Table 9 has it; what has one stage is told in its own sentence."""
    if not any(any(stage.values()) for unit in plan.units for stage in unit.recompute):
        yield "Nothing is recomputed."
    for unit in plan.units:
        if unit.pp > 1 and any(any(stage.values()) for stage in unit.recompute):
            held, again = (_by_pipeline_rank(plan, unit, stages) for stages in (unit.stages, unit.recompute))
            yield f"{unit.name}: of {held} layers by pipeline rank, {again} are recomputed."


def _by_pipeline_rank(plan: Plan, unit: Unit, stages: Sequence[Mapping[str, int]]) -> list[int]:
    total = [0] * unit.pp
    for number, counts in enumerate(stages):
        back = plan.schedule == "zb_v" and number >= unit.pp
        total[2 * unit.pp - 1 - number if back else number % unit.pp] += sum(counts.values())
    return total


def _rivals(found: Found) -> Iterator[Result]:
    """The fastest of another strategy and, if it is about as fast, the first that is not; without any, the second.
    Measured, if the best is.
    """
    best = found.best
    alike = [result for result in found.results[1:] if (result.measured_s is None) == (best.measured_s is None)]
    others = [result for result in alike if result.candidate.strategy != best.candidate.strategy] or alike[:1]
    slower = [result for result in others if result.step_s >= best.step_s * (1 + _CLEARLY)]
    yield from dict.fromkeys([*others[:1], *slower[:1]])


def _against(best: Result, rival: Result) -> Iterator[str]:
    """What its step gains on another's: bubbles, and time that a rank computes for, by recomputation and ranks."""
    one, other = best.prediction, rival.prediction
    gain = rival.step_s / best.step_s - 1
    if gain < _CLEARLY:
        yield f"{rival.candidate.strategy} ({rival.candidate.what}) is as fast, but for {gain:.1%}."
        return
    reasons = []
    idle, other_idle = (each.bubbles.total_share for each in (one, other))
    if other_idle - idle > _CLEARLY:
        reasons.append(f"{idle:.0%} of it are bubbles, of the other's step {other_idle:.0%}")
    again, other_again = (each.hardware_flops / each.model_flops - 1 for each in (one, other))
    if other_again - again > _CLEARLY:
        reasons.append(f"recomputation and padding add {again:.0%} to the operations, there {other_again:.0%}")
    if one.num_ranks > other.num_ranks:
        reasons.append(f"it uses {one.num_ranks:,} ranks, that {other.num_ranks:,}")
    busy, other_busy = (
        each.hardware_flops / each.peak_flops / (each.step_s * (1 - each.bubbles.total_share)) for each in (one, other)
    )
    if busy - other_busy > _CLEARLY:
        reasons.append(f"while they compute, ranks reach {busy:.0%} of their peak, there {other_busy:.0%}")
    why = f": {'; '.join(reasons[:_MAX_FACTS])}" if reasons else ""
    yield f"It is {gain:.0%} faster than {rival.candidate.strategy} ({rival.candidate.what}){why}."


def _print_ranking(found: Found, console: Console) -> None:
    """A line a result, or, where that is too long, its figures and below them its plan."""
    console.print(title_of(found), style="bold", highlight=False, markup=False)
    ranking = _ranking(found)
    if console.measure(ranking, options=console.options.update(width=1 << 12)).maximum <= console.width:
        console.print(ranking)
        return
    header, *rows = console.render_lines(_ranking(found, with_plan=False), pad=False)
    console.print(SegmentLines([header], new_lines=True), end="")
    for result, row in zip(found.results, rows):
        console.print(SegmentLines([row], new_lines=True), end="")
        console.print(Padding(Text(result.candidate.what, "dim"), (0, 0, 0, 2), expand=False))


def title_of(found: Found) -> str:
    """What was planned for: model, ranks, batch, pins."""
    job = found.job
    ranks = f"{job.cluster.num_ranks:,} {job.cluster.device.name}"
    pinned = f", with {told}" if (told := pins_in_words(found.pins)) else ""
    return f"{job.model.name} on {ranks}, steps of {job.batch_size:,} examples{pinned}"


def figures(result: Result) -> tuple[str, ...]:
    """A text for each of COLUMNS."""
    prediction = result.prediction
    return (
        f"{result.candidate.strategy}, {result.candidate.what}",
        shown_seconds(prediction.step_s),
        f"{prediction.tokens_per_s:,.0f}",
        f"{prediction.mfu:.1%}",
        f"{prediction.peak_bytes.max() / 1e9:,.1f}",
        f"{prediction.bubbles.total_share:.1%}",
        f"{prediction.num_ranks:,}",
    )


def _ranking(found: Found, with_plan: bool = True) -> Table:
    table = _table()
    first, step, *others = COLUMNS
    measured = any(result.measured_s is not None for result in found.results)
    table.add_column(first if with_plan else "strategy", header_style="dim", no_wrap=True)
    for name in (*(("predicted", "measured") if measured else (step,)), *others):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    with ThreadPoolExecutor() as pool:  # Array arithmetic of several threads runs side by side.
        list(pool.map(lambda result: result.prediction.bubbles, found.results))
    for place, result in enumerate(found.results):
        what, predicted, *rest = figures(result)
        steps = (predicted, _measured(result)) if measured else (predicted,)
        table.add_row(
            what if with_plan else result.candidate.strategy, *steps, *rest, style="bold" if place == 0 else None
        )
    return table


def _measured(result: Result) -> str:
    return "" if result.measured_s is None else shown_seconds(result.measured_s)


def _left(found: Found) -> Iterator[str]:
    of = Counter(passed.why for passed in found.passed_over)
    if of["bound"]:
        yield f"{_plans(of['bound'])} cannot be faster than the first, by lower bounds: not simulated."
    if of["estimate"]:
        yield f"{_plans(of['estimate'])} not simulated, being slower by estimate."
    obstacles = Counter(result.obstacle for result in found.results if result.obstacle)
    if obstacles:
        having = ", ".join(f"{count:,} with {what}" for what, count in obstacles.most_common())
        yield f"Training cannot run all plans yet, so these are only predicted: {having}."


def _lengths(job: Job) -> Iterator[str]:
    """What was assumed of them, and which of them the model has no use for."""
    yield from job.workload.assumptions
    known = {module.name for module in job.model.modules}
    unused = [name for name, items in job.workload.examples.items.items() if items.num_items and name not in known]
    if unused:
        yield (
            f"Examples have items of {' and '.join(unused)}, for which the model has no module: they are counted as "
            "tokens of the backbone, and nothing encodes them."
        )


def _plans(count: int) -> str:
    return f"{count:,} more {'plan' if count == 1 else 'plans'}"


def _ruled_out(ruled_out: tuple[RuledOut, ...]) -> Table:
    """By strategy: what lacks memory, with the nearest to fit, then other reasons, the most frequent first."""
    table = _table("Ruled out")
    table.add_column("strategy", header_style="dim")
    table.add_column("plans", justify="right", header_style="dim")
    table.add_column("why", header_style="dim")
    for strategy in dict.fromkeys(ruled.strategy for ruled in ruled_out):
        of_strategy = [ruled for ruled in ruled_out if ruled.strategy == strategy]
        reasons = [*_memory(of_strategy), *_others(of_strategy)]
        for place, (count, why) in enumerate(reasons):
            table.add_row(strategy if place == 0 else "", f"{count:,}", why)
    return table


def _memory(ruled_out: list[RuledOut]) -> Iterator[tuple[int, str]]:
    lacking = sorted(
        (ruled for ruled in ruled_out if ruled.shortfall_bytes > 0), key=lambda ruled: ruled.shortfall_bytes
    )
    if lacking:
        nearest = lacking[0]
        mends = f"; fits with {' or '.join(nearest.mends)}" if nearest.mends else ""
        one = "" if len(lacking) == 1 else "memory; nearest: "
        yield len(lacking), f"{one}{_told(nearest)}{mends}"


def _others(ruled_out: list[RuledOut]) -> Iterator[tuple[int, str]]:
    others = [ruled for ruled in ruled_out if not ruled.shortfall_bytes > 0]
    counts = Counter(ruled.why for ruled in others)
    for why, count in counts.most_common(_MAX_REASONS):
        yield count, _told(next(ruled for ruled in others if ruled.why == why)) if count == 1 else why.rstrip(".")
    if left := sum(counts.values()) - sum(count for _, count in counts.most_common(_MAX_REASONS)):
        yield left, "for other reasons"


def _told(ruled: RuledOut) -> str:
    return f"{ruled.what}: {ruled.why.rstrip('.')}" if ruled.what else ruled.why.rstrip(".")


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
