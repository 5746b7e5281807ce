"""The result of a search on the terminal: the ranking, what was ruled out and why, and the winner in words."""

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
from motet.planner.comparison import MIN_DIFFERENCE, Comparison, compare
from motet.planner.job import Job
from motet.planner.pins import pins_in_words
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.simulate.show.drawing import shown_seconds
from motet.simulate.show.plan_words import plan_in_words

_MAX_REASONS = 3
_MAX_FACTS = 3
COLUMNS = ("strategy and degrees", "step", "tokens/s", "MFU", "GB a rank", "bubbles", "GPUs")
"""The columns of the ranking."""


def print_result(result: SearchResult, console: Console | None = None) -> None:
    """Print to the console, by default to stdout. Raises UserError, which names the nearest miss, if nothing fits."""
    console = console or Console()
    if result.results:
        _print_ranking(result, console)
        for sentence in (*_not_simulated(result), *_lengths(result.job)):
            console.print(sentence, style="dim", highlight=False, markup=False)
        console.print()
    if result.ruled_out:
        console.print(_ruled_out(result.ruled_out))
        console.print()
    best = result.best
    console.print(f"{best.candidate.strategy}, {best.candidate.what}", style="bold", highlight=False, markup=False)
    for sentence in winner_in_words(result):
        console.print(sentence, highlight=False, markup=False)


def winner_in_words(result: SearchResult) -> list[str]:
    """Sentences: which ranks run what, what is recomputed and balanced, why the Plan won, and what it costs."""
    best = result.best
    prediction = best.prediction
    hours = prediction.num_ranks * best.step_s / prediction.num_tokens * 1e9 / 3600
    plan = best.candidate.plan
    sentences = [*plan_in_words(plan), *recomputed_in_words(plan), *best.candidate.facts[:_MAX_FACTS]]
    for comparison in compare(result):
        sentences += _against(best, comparison)
    return [*sentences, f"A billion tokens take {hours:,.4g} hours of one {plan.cluster.device.name}."]


def recomputed_in_words(plan: Plan) -> Iterator[str]:
    """Recomputed layers by pipeline rank, as in OmniBal's Table 9; `plan_in_words` names those of a single stage."""
    if not any(any(stage.values()) for unit in plan.units for stage in unit.recompute):
        yield "Nothing is recomputed."
    for unit in plan.units:
        if unit.pp > 1 and any(any(stage.values()) for stage in unit.recompute):
            layers, recomputed = (_by_pipeline_rank(plan, unit, stages) for stages in (unit.stages, unit.recompute))
            yield f"{unit.name}: of {layers} layers by pipeline rank, {recomputed} are recomputed."


def _by_pipeline_rank(plan: Plan, unit: Unit, stages: Sequence[Mapping[str, int]]) -> list[int]:
    total = [0] * unit.pp
    for stage, counts in enumerate(stages):
        returns = plan.schedule == "zb_v" and stage >= unit.pp
        total[2 * unit.pp - 1 - stage if returns else stage % unit.pp] += sum(counts.values())
    return total


def _against(best: SimulatedCandidate, comparison: Comparison) -> Iterator[str]:
    """How much faster the best is than a rival, and why: bubbles, added operations, ranks, share of the peak."""
    rival, gain = comparison.rival, comparison.gain
    name = f"{rival.candidate.strategy} ({rival.candidate.what})"
    if gain <= -MIN_DIFFERENCE:
        yield f"{name} is slower in the batch that plans are ranked by, and {-gain:.1%} faster{_range(comparison, 1)}."
        return
    if gain < MIN_DIFFERENCE:
        yield f"{name} is as fast, but for {gain:.1%}{_range(comparison, 1)}."
        return
    own, other = best.prediction, rival.prediction
    reasons = []
    idle, other_idle = (each.bubbles.total_share for each in (own, other))
    if other_idle - idle > MIN_DIFFERENCE:
        reasons.append(f"{idle:.0%} of it are bubbles, of the other's step {other_idle:.0%}")
    added, other_added = (each.hardware_flops / each.model_flops - 1 for each in (own, other))
    if other_added - added > MIN_DIFFERENCE:
        reasons.append(f"recomputation and padding add {added:.0%} to the operations, there {other_added:.0%}")
    if own.num_ranks > other.num_ranks:
        reasons.append(f"it uses {own.num_ranks:,} ranks, that {other.num_ranks:,}")
    busy, other_busy = (
        each.hardware_flops / each.peak_flops / (each.step_s * (1 - each.bubbles.total_share)) for each in (own, other)
    )
    if busy - other_busy > MIN_DIFFERENCE:
        reasons.append(f"while they compute, ranks reach {busy:.0%} of their peak, there {other_busy:.0%}")
    why = f": {'; '.join(reasons[:_MAX_FACTS])}" if reasons else ""
    yield f"It is {gain:.0%} faster than {name}{_range(comparison, 0)}{why}."


def _range(comparison: Comparison, digits: int) -> str:
    """The batches that a gain is the median of, and the least and most of them as gains; "" for one."""
    gains = comparison.gains if comparison.gain > -MIN_DIFFERENCE else -comparison.gains
    if len(gains) == 1:
        return ""
    return f", the median of {len(gains)} batches with {gains.min():.{digits}%} to {gains.max():.{digits}%}"


def _print_ranking(result: SearchResult, console: Console) -> None:
    """A line a candidate; where a line is too long, the figures and below them the degrees."""
    console.print(title_of(result), style="bold", highlight=False, markup=False)
    ranking = _ranking(result)
    if console.measure(ranking, options=console.options.update(width=1 << 12)).maximum <= console.width:
        console.print(ranking)
        return
    header, *rows = console.render_lines(_ranking(result, with_degrees=False), pad=False)
    console.print(SegmentLines([header], new_lines=True), end="")
    for simulated, row in zip(result.results, rows):
        console.print(SegmentLines([row], new_lines=True), end="")
        console.print(Padding(Text(simulated.candidate.what, "dim"), (0, 0, 0, 2), expand=False))


def title_of(result: SearchResult) -> str:
    """One line: the model, the ranks, the examples of a step, and the pins."""
    job = result.job
    ranks = f"{job.cluster.num_ranks:,} {job.cluster.device.name}"
    pinned = f", with {words}" if (words := pins_in_words(result.pins)) else ""
    return f"{job.model.name} on {ranks}, steps of {job.batch_size:,} examples{pinned}"


def figures(simulated: SimulatedCandidate) -> tuple[str, ...]:
    """A text for each of COLUMNS."""
    prediction = simulated.prediction
    return (
        f"{simulated.candidate.strategy}, {simulated.candidate.what}",
        shown_seconds(prediction.step_s),
        f"{prediction.tokens_per_s:,.0f}",
        f"{prediction.mfu:.1%}",
        f"{prediction.peak_bytes.max() / 1e9:,.1f}",
        f"{prediction.bubbles.total_share:.1%}",
        f"{prediction.num_ranks:,}",
    )


def _ranking(result: SearchResult, with_degrees: bool = True) -> Table:
    table = _table()
    first, step, *others = COLUMNS
    is_measured = any(simulated.measured_s is not None for simulated in result.results)
    table.add_column(first if with_degrees else "strategy", header_style="dim", no_wrap=True)
    for name in (*(("predicted", "measured") if is_measured else (step,)), *others):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    with ThreadPoolExecutor() as pool:  # Array arithmetic of several threads runs side by side.
        list(pool.map(lambda simulated: simulated.prediction.bubbles, result.results))
    for index, simulated in enumerate(result.results):
        title, predicted, *rest = figures(simulated)
        steps = (predicted, _measured(simulated)) if is_measured else (predicted,)
        table.add_row(
            title if with_degrees else simulated.candidate.strategy,
            *steps,
            *rest,
            style="bold" if index == 0 else None,
        )
    return table


def _measured(simulated: SimulatedCandidate) -> str:
    return "" if simulated.measured_s is None else shown_seconds(simulated.measured_s)


def _not_simulated(result: SearchResult) -> Iterator[str]:
    """How many candidates were not simulated, and how many training cannot run."""
    counts = Counter(passed.why for passed in result.passed_over)
    if counts["bound"]:
        yield f"{_plans(counts['bound'])} cannot be faster than the first, by lower bounds: not simulated."
    if counts["estimate"]:
        yield f"{_plans(counts['estimate'])} not simulated, being slower by estimate."
    obstacles = Counter(simulated.obstacle for simulated in result.results if simulated.obstacle)
    if obstacles:
        having = ", ".join(f"{count:,} with {what}" for what, count in obstacles.most_common())
        yield f"Training cannot run all plans yet, so these are only predicted: {having}."


def _lengths(job: Job) -> Iterator[str]:
    """What the workload assumes about lengths, and which items no module of the model encodes."""
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
    """By strategy: candidates that lack memory, with the nearest to fit; then other reasons, most frequent first."""
    table = _table("Ruled out")
    table.add_column("strategy", header_style="dim")
    table.add_column("plans", justify="right", header_style="dim")
    table.add_column("why", header_style="dim")
    for strategy in dict.fromkeys(ruled.strategy for ruled in ruled_out):
        of_strategy = [ruled for ruled in ruled_out if ruled.strategy == strategy]
        reasons = [*_lack_of_memory(of_strategy), *_other_reasons(of_strategy)]
        for index, (count, why) in enumerate(reasons):
            table.add_row(strategy if index == 0 else "", f"{count:,}", why)
    return table


def _lack_of_memory(ruled_out: list[RuledOut]) -> Iterator[tuple[int, str]]:
    """(how many candidates lack memory, the nearest to fit), if there is one."""
    lacking = sorted(
        (ruled for ruled in ruled_out if ruled.shortfall_bytes > 0), key=lambda ruled: ruled.shortfall_bytes
    )
    if lacking:
        nearest = lacking[0]
        remedies = f"; fits with {' or '.join(nearest.remedies)}" if nearest.remedies else ""
        intro = "" if len(lacking) == 1 else "memory; nearest: "
        yield len(lacking), f"{intro}{_reason(nearest)}{remedies}"


def _other_reasons(ruled_out: list[RuledOut]) -> Iterator[tuple[int, str]]:
    """(how many candidates, why), for the most frequent reasons; the rest in one row."""
    others = [ruled for ruled in ruled_out if not ruled.shortfall_bytes > 0]
    counts = Counter(ruled.why for ruled in others)
    for why, count in counts.most_common(_MAX_REASONS):
        yield count, _reason(next(ruled for ruled in others if ruled.why == why)) if count == 1 else why.rstrip(".")
    if left := sum(counts.values()) - sum(count for _, count in counts.most_common(_MAX_REASONS)):
        yield left, "for other reasons"


def _reason(ruled: RuledOut) -> str:
    return f"{ruled.what}: {ruled.why.rstrip('.')}" if ruled.what else ruled.why.rstrip(".")


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
