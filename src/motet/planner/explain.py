"""The candidates that a search has simulated as one page: their figures, and their Timelines side by side."""

from __future__ import annotations

import html
from pathlib import Path

from motet.core.errors import UserError
from motet.planner.search import Found, Result
from motet.simulate.drawing import INK, SOFT, shown_seconds
from motet.simulate.page import page_of

_MAX_SPANS = 20_000
"""Of a Timeline: there are a dozen on the page."""
_STYLE = f"""
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 20px 40px; background: #ffffff; color: {INK};
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }}
h2 {{ font-size: 16px; margin: 0; }}
p, li {{ margin: 2px 0; color: {SOFT}; font-size: 14px; }}
ul {{ margin: 0; padding-left: 18px; }}
.plans {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); gap: 28px 24px;
  margin-top: 20px; align-items: start; }}
.step {{ height: 8px; background: {SOFT}; border-radius: 2px; margin: 6px 0; }}
iframe {{ width: 100%; border: 1px solid #c9ced5; border-radius: 6px; }}
"""


def write_explanation(found: Found, path: str | Path) -> None:
    """Write the page, fastest first. Raises UserError if it cannot be written, or if nothing fits."""
    slowest_s = max(result.prediction.step_s for result in (found.best, *found.results))
    job = found.job
    title = f"{job.model.name} on {job.cluster.num_ranks:,} {job.cluster.device.name}"
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{len(found.results)} plans were simulated on one batch of "
        f"{job.batch_size:,} examples, fastest first. Bars compare their steps; each Timeline has a scale of its own."
        f'</p><div class="plans">{"".join(_plan(result, slowest_s) for result in found.results)}</div></body></html>\n'
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the page cannot be written to {path}: {error.strerror}.") from error


def _plan(result: Result, slowest_s: float) -> str:
    candidate, prediction = result.candidate, result.prediction
    title = f"{candidate.strategy}, {candidate.what}"
    measured = "" if result.measured_s is None else f", measured {shown_seconds(result.measured_s)}"
    figures = (
        f"{shown_seconds(prediction.step_s)} a step{measured}, estimated {shown_seconds(candidate.estimate_s)}; MFU "
        f"{prediction.mfu:.1%}, bubbles {prediction.bubbles.total_share:.1%}, {prediction.peak_bytes.max() / 1e9:.1f} "
        f"GB, {prediction.num_ranks:,} GPUs"
    )
    facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in candidate.facts)
    timeline = page_of(prediction.timeline, title="", max_spans=_MAX_SPANS)
    num_rows = max(prediction.timeline.num_ranks, 1)
    height = min(num_rows * max(14, min(44, 480 // num_rows)), 520) + 190
    # A frame each: the pages are independent of each other, and draw when they come into view.
    return (
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(figures)}</p><ul>{facts}</ul>"
        f'<div class="step" style="width:{100 * prediction.step_s / slowest_s:.1f}%"></div>'
        f'<iframe loading="lazy" height="{height}" title="{html.escape(title)}" srcdoc="{html.escape(timeline)}">'
        "</iframe></section>"
    )
