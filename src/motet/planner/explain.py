"""The simulated candidates of a search as one page: their figures, and their Timelines on one scale of time."""

from __future__ import annotations

import html
from pathlib import Path

from motet.planner.report import COLUMNS, figures, title_of
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.simulate.show.drawing import INK, SOFT, shown_seconds
from motet.simulate.show.page import HINT, page_of, save_page
from motet.simulate.show.plan_words import plan_in_words, rows_in_words

_MAX_SPANS = 300_000
"""The most spans of all Timelines together: some ten megabytes."""
_STYLE = f"""
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 20px 40px; background: #ffffff; color: {INK};
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }}
h2 {{ font-size: 16px; margin: 0; }}
p, li {{ margin: 2px 0; color: {SOFT}; font-size: 14px; }}
ul {{ margin: 0; padding-left: 18px; }}
a {{ color: inherit; }}
.ranking {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 14px 0 0; font-size: 14px; font-variant-numeric: tabular-nums; }}
th {{ color: {SOFT}; font-weight: normal; }}
th, td {{ padding: 2px 14px 2px 0; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; }}
.plans {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(620px, 100%), 1fr)); gap: 28px 24px;
  margin-top: 26px; align-items: start; }}
iframe {{ width: 100%; border: 1px solid #c9ced5; border-radius: 6px; margin-top: 6px; }}
"""


def write_explanation(result: SearchResult, path: str | Path) -> None:
    """Write the page, fastest first. Raises UserError if it cannot be written, or if nothing fits."""
    slowest_s = max(simulated.prediction.step_s for simulated in (result.best, *result.results))
    title = html.escape(title_of(result))
    max_spans = _MAX_SPANS // len(result.results)
    plans = "".join(_plan(number, simulated, slowest_s, max_spans) for number, simulated in enumerate(result.results))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>Simulated on one batch, fastest first. All Timelines have one scale; a row is a rank, or ranks that share "
        f"their work. The wheel with Ctrl {HINT}</p>"
        f'{_ranking(result)}<div class="plans">{plans}</div></body></html>\n'
    )
    save_page(page, path)


def _ranking(result: SearchResult) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    rows = "".join(
        f'<tr><td><a href="#plan-{number}">{html.escape(name)}</a></td>'
        f"{''.join(f'<td>{html.escape(figure)}</td>' for figure in others)}</tr>"
        for number, (name, *others) in enumerate(map(figures, result.results))
    )
    return f'<div class="ranking"><table><tr>{head}</tr>{rows}</table></div>'


def _plan(number: int, simulated: SimulatedCandidate, slowest_s: float, max_spans: int) -> str:
    candidate, prediction = simulated.candidate, simulated.prediction
    title = html.escape(f"{candidate.strategy}, {candidate.what}")
    _, *words = plan_in_words(candidate.plan)
    sentences = [*words, *candidate.facts]
    sentences.append(f"Estimated to take {shown_seconds(candidate.estimate_s)} before it was simulated.")
    if simulated.measured_s is not None:
        sentences.append(f"Measured: {shown_seconds(simulated.measured_s)} a step.")
    facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in sentences)
    note = rows_in_words(candidate.plan)
    timeline = page_of(prediction.timeline, title="", max_spans=max_spans, framed_s=slowest_s, note=note)
    # A frame for each Timeline: its page draws itself when it comes into view, and then reports its height.
    return (
        f'<section id="plan-{number}"><h2>{title}</h2><ul>{facts}</ul>'
        f'<iframe loading="lazy" height="320" title="{title}" srcdoc="{html.escape(timeline)}"></iframe></section>'
    )
