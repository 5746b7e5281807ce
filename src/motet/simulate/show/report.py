"""A Prediction as tables on the terminal: the plan in words, speed, memory, and bubbles by kind (Optimus Table 1)."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from motet.core.plan import Plan
from motet.core.words import counted_words, shown_seconds, size_words
from motet.simulate.bubbles import BUBBLE_KINDS
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.plan_words import plan_in_words

BUBBLE_NAMES = dict(
    zip(
        BUBBLE_KINDS,
        (
            "TP (inside passes)",
            "exchange between modules",
            "DP all-gather",
            "DP reduce-scatter",
            "norm of the gradient",
            "waiting for a slower rank",
            "PP warm-up",
            "PP cool-down",
            "PP other",
        ),
    )
)


def print_prediction(plan: Plan, prediction: Prediction, console: Console | None = None) -> None:
    """Print a Prediction as tables, to stdout unless a console is given."""
    console = console or Console()
    for sentence in plan_in_words(plan):
        console.print(sentence, highlight=False, markup=False)
    for table in (_speed(prediction), _memory(prediction), _bubbles(prediction)):
        console.print()
        console.print(table)
    if lacking := out_of_memory(plan, prediction):
        console.print()
        console.print(lacking, style="bold red", highlight=False, markup=False)


def out_of_memory(plan: Plan, prediction: Prediction) -> str:
    """A sentence about the ranks that need more memory than they have; "" if all have enough."""
    lacking = int((prediction.peak_bytes > prediction.capacity_bytes).sum())
    if not lacking:
        return ""
    worst = int(prediction.peak_bytes.argmax())
    rank = int(prediction.ranks[worst])
    holders = [repr(unit.name) for unit in plan.units if 0 <= rank - unit.first_rank < unit.num_ranks]
    largest = max(prediction.memory_bytes, key=lambda part: int(prediction.memory_bytes[part][worst]))
    return (
        f"Out of memory on {lacking:,} of {counted_words(prediction.num_ranks, 'rank')}: rank {rank}, of "
        f"unit{'s' if len(holders) > 1 else ''} {', '.join(holders)}, needs "
        f"{size_words(prediction.peak_bytes[worst])}, most of it {largest}; the {plan.cluster.device.name} has "
        f"{size_words(prediction.capacity_bytes)}."
    )


def _speed(prediction: Prediction) -> Table:
    table = _table("Predicted step", "", "all ranks", "a rank")
    num_ranks = prediction.num_ranks
    table.add_row("step", shown_seconds(prediction.step_s), "")
    for name, each_s in (("examples/s", prediction.examples_per_s), ("tokens/s", prediction.tokens_per_s)):
        table.add_row(name, _rate(each_s), _rate(each_s / num_ranks))
    table.add_row("MFU", f"{prediction.mfu:.1%}", "")
    table.add_row("HFU, with recomputation and padding", f"{prediction.hfu:.1%}", "")
    return table


def _memory(prediction: Prediction) -> Table:
    """Parts of memory: the mean over ranks, and the rank that needs most."""
    peak_bytes = prediction.peak_bytes
    worst = int(peak_bytes.argmax())
    scale, unit = (1, "GB") if peak_bytes[worst] >= 1e9 else (1000, "MB")
    table = _table(f"Memory of a rank, {unit}", "", "mean", f"rank {prediction.ranks[worst]}, the most")
    for part, size_bytes in (*prediction.memory_bytes.items(), ("all", peak_bytes)):
        if part == "all":
            table.add_section()
        table.add_row(part, _gbytes(scale * size_bytes.mean()), _gbytes(scale * size_bytes[worst]))
    shares = (f"{size / prediction.capacity_bytes:.0%}" for size in (peak_bytes.mean(), peak_bytes[worst]))
    table.add_row(f"of {_gbytes(prediction.capacity_bytes)} GB", *shares)
    return table


def _bubbles(prediction: Prediction) -> Table:
    """Bubbles by kind as in Optimus Table 1, mean over ranks, without kinds that do not occur."""
    found = prediction.bubbles
    table = _table("Bubbles", "", "of the step", "time")
    for kind, seconds in found.mean_s.items():
        if seconds > 0:
            table.add_row(BUBBLE_NAMES[kind], f"{found.share[kind]:.1%}", shown_seconds(seconds))
    table.add_section()
    table.add_row("all", f"{found.total_share:.1%}", shown_seconds(found.total_share * found.step_s))
    return table


def _rate(each_s: float) -> str:
    return f"{each_s:,.4g}" if each_s < 1000 else f"{each_s:,.0f}"


def _gbytes(size_bytes: float) -> str:
    return f"{float(size_bytes) / 1e9:,.1f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", header_style="dim")
    return table
