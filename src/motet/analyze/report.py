"""Prints an analysis as tables on the terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from motet.analyze.analysis import Analysis
from motet.analyze.loads import MODE_NAMES, MODES, PREDICTED
from motet.core.words import counted_words, shown_seconds
from motet.core.workload import BACKBONE

QUANTILES = {"median": 0.5, "95 %": 0.95, "99 %": 0.99, "max": 1.0}
LOAD_COLUMNS = ("phase", "balanced", "max/mean", "95 %", "max/bound", "crossing")
STEP_COLUMNS = ("balanced", "step", "of it exchange", "of unbalanced")


def print_analysis(analysis: Analysis, console: Console | None = None) -> None:
    """Print lengths, shares, loads and predicted steps, with the assumptions. The default console is stdout."""
    console = console or Console()
    # Names of files may have what rich would take for a style, as in "photo [final].jpg".
    console.print(
        Text.assemble("\n", (analysis.source, "bold"), f": {counted_words(analysis.num_examples, 'example')}")
    )
    if analysis.left_out:
        console.print(analysis.left_out, markup=False)
    console.print(_lengths(analysis))
    console.print(_shares(analysis))
    console.print(_loads(analysis))
    console.print(load_note(analysis), style="dim", highlight=False)
    console.print(_steps(analysis))
    console.print(step_note(analysis), style="dim", highlight=False)
    for assumption in analysis.assumptions:
        console.print(assumption, style="dim", highlight=False, markup=False)


def load_note(analysis: Analysis) -> str:
    """How the loads were computed, and how to read them."""
    alike = "each manifest by its weight in data.mixture" if analysis.is_weighted else "every example alike"
    drawn = alike if analysis.mix == "rows" else "every combination of modalities equally often"
    return (
        f"{counted_words(analysis.num_batches, 'batch', 'batches')} of {counted_words(analysis.batch_size, 'example')} "
        f"on {counted_words(analysis.num_ranks, 'rank')}, drawn with seed {analysis.seed}, {drawn}. {analysis.weighed} "
        f"{_load_words(analysis)} Means over batches with items of the phase. Max/mean: the load of the busiest rank, "
        "for which all others wait, over the mean. Max/bound: the same over what no placement of whole items undercuts."
        " Crossing: the share of an encoder's outputs that must go to another rank, and their gradients back."
    )


def _load_words(analysis: Analysis) -> str:
    """How items make up the load of a rank, and the unit of loads."""
    padded = [phase for phase, loads in analysis.loads.items() if loads.padded]
    definition = "A load is the sum of its items"
    if padded:
        definition += f"; of {' and '.join(padded)}, which pads, it is their number times the largest"
    units = {phase: loads.unit for phase, loads in analysis.loads.items()}
    if len(set(units.values())) == 1:
        return f"{definition}. It is in {units[BACKBONE]}."
    return f"{definition}. It is in {', '.join(f'{unit} ({phase})' for phase, unit in units.items())}."


def step_note(analysis: Analysis) -> str:
    """The chosen methods, and an example of a reason."""
    steps = analysis.steps
    counts = ", ".join(
        f"{method} in {count:,}" for method, count in sorted(steps.methods.items(), key=lambda entry: -entry[1])
    )
    return (
        "The busiest rank's time, phase by phase, and the exchange of encoder outputs. Chosen for each batch, in the "
        f"words of balance.method: {counts} of {analysis.num_batches:,}. For instance {steps.why}"
    )


def _lengths(analysis: Analysis) -> Table:
    table = _table("Lengths", "of", "unit", "number", "mean", *QUANTILES)
    for lengths in analysis.lengths:
        figures = [lengths.mean, *(lengths.quantile(share) for share in QUANTILES.values())]
        table.add_row(lengths.name, lengths.unit, f"{len(lengths.values):,}", *(f"{value:,.0f}" for value in figures))
    return table


def _shares(analysis: Analysis) -> Table:
    table = _table("Share of each example's sequence", "of", "examples with it", "mean", "std")
    for name, shares in analysis.shares.items():
        present = (shares > 0).mean()
        table.add_row(name, f"{present:.1%}", f"{shares.mean():.1%}", f"{shares.std():.1%}")
    return table


def _loads(analysis: Analysis) -> Table:
    # Narrow, since a pipe has 80 columns.
    table = _table("Load of the busiest rank", *LOAD_COLUMNS)
    for row in load_rows(analysis):
        table.add_row(*row, end_section=row[1] == MODE_NAMES[MODES[-1]])
    return table


def load_rows(analysis: Analysis) -> list[list[str]]:
    """A row for each phase and mode, with the columns `LOAD_COLUMNS`. Only the first row of a phase names it."""
    rows = []
    for phase, loads in analysis.loads.items():
        for mode in MODES:
            ratios = loads.max_over_mean(mode)
            figures = (ratios.mean(), np.quantile(ratios, 0.95), loads.max_over_bound(mode).mean())
            crossing = "" if phase == BACKBONE else f"{loads.crossing(mode).mean():.0%}"
            name = phase if mode == MODES[0] else ""
            rows.append([name, MODE_NAMES[mode], *(f"{value:.3f}" for value in figures), crossing])
    return rows


def _steps(analysis: Analysis) -> Table:
    table = _table("Predicted step", *STEP_COLUMNS)
    for row in step_rows(analysis):
        table.add_row(*row)
    return table


def step_rows(analysis: Analysis) -> list[list[str]]:
    """A row for each key of `PREDICTED`, with the columns `STEP_COLUMNS`: means over batches."""
    steps = analysis.steps
    unbalanced_s = max(steps.seconds["unbalanced"].mean(), 1e-12)
    return [
        [
            name,
            shown_seconds(steps.seconds[method].mean()),
            shown_seconds(steps.exchange_s[method].mean()),
            f"{steps.seconds[method].mean() / unbalanced_s:.1%}",
        ]
        for method, name in PREDICTED.items()
    ]


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
