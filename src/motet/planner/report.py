"""The result of a search on the terminal: the ranking, what was ruled out and why, and the winner in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from motet.core.plan import Plan, Unit
from motet.core.words import counted_words, shown_seconds, size_words
from motet.planner.candidate import RuledOut
from motet.planner.comparison import compare
from motet.planner.job import Job
from motet.planner.pins import pins_in_words
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.planner.why_it_wins import against, device_hours, in_bubbles
from motet.schedule.plan_units import rank_of_stage, recomputed_in
from motet.simulate.predict.beyond_profile import extrapolated
from motet.simulate.show.plan_words import plan_in_words

_MAX_REASONS = 3
_MAX_FACTS = 3
COLUMNS = ("strategy and degrees", "step", "tokens/s", "MFU", "memory", "bubbles", "ranks")
"""The columns of the ranking; memory is that of the fullest rank."""
_BINDING = {
    "work": "devices that all compute all the time",
    "item": "the longest examples",
    "memory": "memory",
    "bubbles": "pipelines that fill and empty",
    "communication": "messages",
}
"""What binds the bound of a step, in words."""


def print_result(result: SearchResult, console: Console | None = None, words: Sequence[str] | None = None) -> None:
    """Print to the console, by default to stdout. Raises UserError, which names the nearest miss, if nothing fits.

    words: `winner_in_words` of the result, where they are known.
    """
    console = console or Console()
    if result.results:
        _print_ranking(result, console)
        for sentence in remarks(result):
            console.print(sentence, style="dim", highlight=False, markup=False)
        console.print()
    if result.ruled_out:
        console.print(_ruled_out(result.ruled_out))
        console.print()
    best = result.best
    console.print(f"{best.candidate.strategy}, {best.candidate.what}", style="bold", highlight=False, markup=False)
    for sentence in winner_in_words(result) if words is None else words:
        console.print(sentence, highlight=False, markup=False)


def winner_in_words(result: SearchResult) -> list[str]:
    """Sentences: which ranks run what, what is recomputed and balanced, why the Plan won and what it pays for that, and
    what its devices cost, and what would change it."""
    best = result.best
    plan = best.candidate.plan
    sentences = [*plan_in_words(plan), *recomputed_in_words(plan), *in_bubbles(plan, best.prediction)]
    sentences += best.candidate.facts[:_MAX_FACTS]
    for comparison in compare(result):
        sentences += against(best, comparison)
    sentences += bound_in_words(result)
    return [*sentences, device_hours(best), *result.what_if]


def bound_in_words(result: SearchResult) -> Iterator[str]:
    """How far the predicted step can be from the best of the whole space, by a lower bound, and what binds it."""
    bound_s, term = result.bound
    if 0 < bound_s < math.inf:
        gap = max(result.best.prediction.step_s / bound_s - 1, 0.0)
        yield (
            f"No plan takes less than {shown_seconds(bound_s)}, by a lower bound ({_BINDING[term]}): this one is at "
            f"most {gap:.0%} above the best possible."
        )


def recomputed_in_words(plan: Plan) -> Iterator[str]:
    """Recomputed layers by pipeline rank, as in OmniBal's Table 9; `plan_in_words` names those of a single stage."""
    if not any(recomputed_in(plan).values()):
        yield "Nothing is recomputed."
    for unit in plan.units:
        if unit.pp > 1 and any(any(stage.values()) for stage in unit.recompute):
            layers, recomputed = (_by_pipeline_rank(plan, unit, stages) for stages in (unit.stages, unit.recompute))
            yield f"{unit.name}: of {layers} layers by pipeline rank, {recomputed} are recomputed."


def _by_pipeline_rank(plan: Plan, unit: Unit, stages: Sequence[Mapping[str, int]]) -> list[int]:
    total = [0] * unit.pp
    for stage, counts in enumerate(stages):
        total[rank_of_stage(plan, unit, stage)] += sum(counts.values())
    return total


def _print_ranking(result: SearchResult, console: Console) -> None:
    """A line a candidate; where a line is too long, the figures and below them the degrees."""
    console.print(title_of(result), style="bold", highlight=False, markup=False)
    ranking = _ranking(result)
    if console.measure(ranking, options=console.options.update(width=1 << 12)).maximum <= console.width:
        console.print(ranking)
        return
    header, *rows = console.render_lines(_ranking(result, with_degrees=False), pad=False)
    console.print(SegmentLines([header], new_lines=True), end="")
    for simulated, row in zip(distinct(result), rows):
        console.print(SegmentLines([row], new_lines=True), end="")
        console.print(Padding(Text(simulated.candidate.what, "dim"), (0, 0, 0, 2), expand=False))


def title_of(result: SearchResult) -> str:
    """One line: the model, the ranks, the examples of a step, and the pins."""
    job = result.job
    ranks = f"{job.cluster.num_ranks:,} {job.cluster.device.name}"
    pinned = f", with {words}" if (words := pins_in_words(result.pins)) else ""
    return f"{job.model.name} on {ranks}, steps of {counted_words(job.batch_size, 'example')}{pinned}"


def figures(simulated: SimulatedCandidate) -> tuple[str, ...]:
    """A text for each of COLUMNS."""
    prediction = simulated.prediction
    return (
        f"{simulated.candidate.strategy}, {simulated.candidate.what}",
        shown_seconds(prediction.step_s),
        f"{prediction.tokens_per_s:,.0f}",
        f"{prediction.mfu:.1%}",
        size_words(prediction.peak_bytes.max()),
        f"{prediction.bubble_share:.1%}",
        f"{prediction.num_ranks:,}",
    )


def distinct(result: SearchResult) -> list[SimulatedCandidate]:
    """The Plans that were simulated, but those that read as one before them; what was measured, in any case."""
    found, read = list[SimulatedCandidate](), set[tuple[str, ...]]()
    for simulated in result.results:
        words = figures(simulated)
        if simulated.measured_s is not None or words not in read:
            found.append(simulated)
            read.add(words)
    return found


def _ranking(result: SearchResult, with_degrees: bool = True) -> Table:
    table = _table()
    first, step, *others = COLUMNS
    is_measured = any(simulated.measured_s is not None for simulated in result.results)
    table.add_column(first if with_degrees else "strategy", header_style="dim", no_wrap=True)
    for name in (*(("predicted", "measured") if is_measured else (step,)), *others):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    for index, simulated in enumerate(distinct(result)):
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


def remarks(result: SearchResult) -> Iterator[str]:
    """Sentences below the ranking: what was not simulated, what training cannot run, what is assumed of lengths."""
    yield from _not_simulated(result)
    yield from _lengths(result.job)
    yield from extrapolated(result.best.prediction.beyond)


def _not_simulated(result: SearchResult) -> Iterator[str]:
    """How many candidates were not simulated, and how many training cannot run."""
    if alike := len(result.results) - len(distinct(result)):
        yield f"{_plans(alike)} with the degrees and the figures of one above."
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


def _ruled_out(ruled_out: Sequence[RuledOut]) -> Table:
    table = _table("Ruled out")
    table.add_column("strategy", header_style="dim")
    table.add_column("plans", justify="right", header_style="dim")
    table.add_column("why", header_style="dim")
    before = ""
    for strategy, count, why in ruled_out_rows(ruled_out):
        table.add_row("" if strategy == before else strategy, count, Text(why))
        before = strategy
    return table


def ruled_out_rows(ruled_out: Sequence[RuledOut]) -> Iterator[tuple[str, str, str]]:
    """(strategy, how many plans, why): those that lack memory, with the nearest to fit; then other reasons, most
    frequent first."""
    for strategy in dict.fromkeys(ruled.strategy for ruled in ruled_out):
        of_strategy = [ruled for ruled in ruled_out if ruled.strategy == strategy]
        for count, why in (*_lack_of_memory(of_strategy), *_other_reasons(of_strategy)):
            yield strategy, f"{count:,}", why


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
