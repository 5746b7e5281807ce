"""An analysis as one self-contained page. plotly's script is in the page; it loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from motet.analyze.analysis import SEQUENCE, Analysis
from motet.analyze.loads import MODE_NAMES, MODES, PREDICTED, Mode
from motet.analyze.report import LOAD_COLUMNS, QUANTILES, STEP_COLUMNS, load_note, load_rows, step_note, step_rows
from motet.core.errors import UserError
from motet.core.words import counted_words, time_unit

_NUM_BINS = 60
_TEXT_COLUMNS = ("of", "phase", "balanced", "unit")
_HEIGHT = 340
_COLOURS = {SEQUENCE: "#5c6670", "backbone": "#5c6670", "text": "#2c9a67", "image": "#1f6fd0", "audio": "#d9822b"}
_OTHER_COLOURS = ("#8e44ad", "#16a085", "#c0392b", "#7f8c2a", "#b5651d")
_MODE_COLOURS: dict[Mode, str] = {
    "off": "#98a1ac",
    "backbone": "#d9822b",
    "joint": "#2c9a67",
    "per_phase": "#1f6fd0",
}
_STYLE = """
body { margin: 0 auto; max-width: 1120px; padding: 32px 20px 64px; background: #fff; color: #1c1e21;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p, li { color: #6a7078; max-width: 80ch; margin: 4px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 12px 0; }
th, td { text-align: right; padding: 5px 18px 5px 0; border-bottom: 1px solid #dfe3e8; }
th { color: #6a7078; font-weight: 500; }
th.word, td.word { text-align: left; }
"""


def write_analysis_html(analysis: Analysis, path: str | Path) -> None:
    """Write the page. Raises UserError if it cannot be written."""
    figures = [
        ("Lengths", "Each modality on its own scale, logarithmic.", _length_table(analysis), _length_figure(analysis)),
        (
            "Share of each example's sequence",
            "How sequences are made up. Where shares are spread out, ranks that are balanced in one phase are not in "
            "another (OrchMLLM, Figure 3).",
            _share_table(analysis),
            _share_figure(analysis),
        ),
        (
            "Load of the busiest rank",
            load_note(analysis),
            _table(LOAD_COLUMNS, load_rows(analysis)),
            _load_figure(analysis),
        ),
        ("Predicted step", step_note(analysis), _table(STEP_COLUMNS, step_rows(analysis)), _step_figure(analysis)),
        (
            "One batch, rank by rank",
            "The batch whose unbalanced backbone is the median one. Dashed: the lower bound of any placement.",
            "",
            _batch_figure(analysis),
        ),
    ]
    parts = [
        f"<h1>{html.escape(analysis.source)}</h1>",
        f"<p>{counted_words(analysis.num_examples, 'example')}. {html.escape(analysis.left_out)}</p>",
    ]
    for number, (title, note, table, figure) in enumerate(figures):
        plot = figure.to_html(full_html=False, include_plotlyjs=number == 0, config={"displayModeBar": False})
        parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>{plot}{table}")
    parts.append("<h2>Assumptions</h2><ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in analysis.assumptions))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(Path(analysis.source).name)}: heterogeneity</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</ul></body></html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the page cannot be written to {path} ({error.strerror}); name a file in a folder that exists"
        ) from None


def _length_figure(analysis: Analysis) -> go.Figure:
    kinds = analysis.lengths
    figure = make_subplots(
        cols=2, rows=-(-len(kinds) // 2), subplot_titles=[f"{kind.name}, {kind.unit}" for kind in kinds]
    )
    for number, kind in enumerate(kinds):
        edges = np.geomspace(max(int(kind.values.min()), 1), int(kind.values.max()) + 1, _NUM_BINS + 1)
        counts, _ = np.histogram(kind.values, edges)
        # Binned here, so that the page has a few dozen numbers for a dataset of any size.
        centres, widths = np.sqrt(edges[1:] * edges[:-1]), np.diff(edges)
        bars = go.Bar(
            x=centres.tolist(),
            y=counts.tolist(),
            width=widths.tolist(),
            marker_color=_colour(kind.name, number),
            name=kind.name,
        )
        row, column = number // 2 + 1, number % 2 + 1
        figure.add_trace(bars, row=row, col=column)
        figure.update_xaxes(type="log", row=row, col=column)
    return _laid_out(figure, 130 + 220 * -(-len(kinds) // 2), legend=False)


def _share_figure(analysis: Analysis) -> go.Figure:
    edges = np.linspace(0, 1, 26)
    figure = make_subplots(cols=len(analysis.shares), rows=1, subplot_titles=list(analysis.shares), shared_yaxes=True)
    for number, (name, shares) in enumerate(analysis.shares.items(), start=1):
        counts, _ = np.histogram(shares, edges)
        percent = 100 * counts / max(len(shares), 1)
        bars = go.Bar(
            x=((edges[1:] + edges[:-1]) / 2).tolist(), y=percent.tolist(), marker_color=_colour(name, number), name=name
        )
        figure.add_trace(bars, row=1, col=number)
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure.update_yaxes(title_text="% of examples", col=1)
    figure.update_layout(bargap=0.05)
    return _laid_out(figure, _HEIGHT, legend=False)


def _load_figure(analysis: Analysis) -> go.Figure:
    figure = go.Figure()
    for mode in MODES:
        ratios = [loads.max_over_mean(mode) for loads in analysis.loads.values()]
        above = [float(np.quantile(ratio, 0.95) - ratio.mean()) for ratio in ratios]
        figure.add_trace(
            go.Bar(
                x=list(analysis.loads),
                y=[float(ratio.mean()) for ratio in ratios],
                error_y={"array": above, "arrayminus": [0.0] * len(above), "symmetric": False, "thickness": 1},
                name=MODE_NAMES[mode],
                marker_color=_MODE_COLOURS[mode],
            )
        )
    figure.add_hline(y=1, line_dash="dash", line_width=1)
    figure.update_yaxes(title_text="max/mean; whisker: 95 % of batches", rangemode="tozero")
    return _laid_out(figure, _HEIGHT)


def _step_figure(analysis: Analysis) -> go.Figure:
    rows = step_rows(analysis)
    steps = analysis.steps
    scale, unit = time_unit(max(float(steps.seconds[method].mean()) for method in PREDICTED))
    exchange, total = (
        [scale * float(seconds[method].mean()) for method in PREDICTED] for seconds in (steps.exchange_s, steps.seconds)
    )
    compute = [whole - exchanging for whole, exchanging in zip(total, exchange)]
    figure = go.Figure()
    for name, values, colour in (("computing", compute, "#1f6fd0"), ("exchanging", exchange, "#d9822b")):
        figure.add_trace(go.Bar(y=[row[0] for row in rows], x=values, name=name, marker_color=colour, orientation="h"))
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_xaxes(title_text=f"{unit}, mean over batches")
    figure.update_yaxes(autorange="reversed")
    return _laid_out(figure, 260)


def _batch_figure(analysis: Analysis) -> go.Figure:
    backbone = next(iter(analysis.loads.values()))
    unbalanced = backbone.max_over_mean("off")
    median_batch = int(np.flatnonzero(backbone.bounds > 0)[np.argsort(unbalanced)[len(unbalanced) // 2]])
    titles = [f"{phase}, {loads.unit}" for phase, loads in analysis.loads.items()]
    figure = make_subplots(cols=len(analysis.loads), rows=1, subplot_titles=titles)
    ranks = [str(rank) for rank in range(analysis.num_ranks)]
    for number, loads in enumerate(analysis.loads.values(), start=1):
        for mode in ("off", "joint", "per_phase"):
            bars = go.Bar(
                x=ranks,
                y=loads.loads[mode][median_batch].tolist(),
                name=MODE_NAMES[mode],
                marker_color=_MODE_COLOURS[mode],
                showlegend=number == 1,
            )
            figure.add_trace(bars, row=1, col=number)
        figure.add_hline(y=int(loads.bounds[median_batch]), line_dash="dash", line_width=1, row=1, col=number)
    figure.update_xaxes(title_text="rank", type="category")
    figure.update_yaxes(title_text="load", col=1)
    return _laid_out(figure, _HEIGHT)


def _laid_out(figure: go.Figure, height: int, *, legend: bool = True) -> go.Figure:
    figure.update_layout(
        template="simple_white",
        height=height,
        showlegend=legend,
        margin={"l": 60, "r": 20, "t": 70 if legend else 40, "b": 50},
        legend={"orientation": "h", "y": 1.32, "yanchor": "top"},
        font={"size": 12},
    )
    return figure


def _length_table(analysis: Analysis) -> str:
    rows = [
        [kind.name, kind.unit, f"{len(kind.values):,}", f"{kind.mean:,.0f}"]
        + [f"{kind.quantile(share):,.0f}" for share in QUANTILES.values()]
        for kind in analysis.lengths
    ]
    return _table(["of", "unit", "number", "mean", *QUANTILES], rows)


def _share_table(analysis: Analysis) -> str:
    rows = [
        [name, f"{(shares > 0).mean():.1%}", f"{shares.mean():.1%}", f"{shares.std():.1%}"]
        for name, shares in analysis.shares.items()
    ]
    return _table(["of", "examples with it", "mean share", "standard deviation"], rows)


def _table(names: Sequence[str], rows: list[list[str]]) -> str:
    def row(kind: str, cells: Sequence[str]) -> str:
        classes = (' class="word"' if name in _TEXT_COLUMNS else "" for name in names)
        return "".join(f"<{kind}{css}>{html.escape(cell)}</{kind}>" for css, cell in zip(classes, cells, strict=True))

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return f"<table><tr>{row('th', names)}</tr>{body}</table>"


def _colour(name: str, number: int) -> str:
    """The colour of a modality, or of an encoder of any name. number: of the figure."""
    return _COLOURS.get(name, _OTHER_COLOURS[number % len(_OTHER_COLOURS)])
