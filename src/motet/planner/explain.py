"""A search as one page: its figures and words, what was ruled out, and of each Plan that was simulated the memory of
its ranks and its Timeline, all on one scale of time."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from motet.core.timeline import Timeline
from motet.core.words import shown_seconds
from motet.planner.report import COLUMNS, distinct, figures, remarks, ruled_out_rows, title_of
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.drawing import INK, SOFT
from motet.simulate.show.memory_table import memory_table
from motet.simulate.show.page import HINT, data_text, drawing_of, head_of, page_of, save_page
from motet.simulate.show.plan_words import plan_in_words, rows_in_words

_MAX_BYTES = 1_700_000
"""The most bytes of all Timelines together: the page stays below 2 MB."""
_SPAN_BYTES = 25
_STYLE = f"""
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 20px 40px; background: #ffffff; color: {INK};
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }}
h2 {{ font-size: 16px; margin: 22px 0 2px; }}
p, li {{ margin: 2px 0; color: {SOFT}; font-size: 14px; }}
.winner li {{ color: {INK}; }}
ul {{ margin: 0; padding-left: 18px; max-width: 1100px; }}
a {{ color: inherit; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 8px 0 0; font-size: 14px; font-variant-numeric: tabular-nums; }}
th {{ color: {SOFT}; font-weight: normal; }}
th, td {{ padding: 2px 14px 2px 0; text-align: right; white-space: nowrap; vertical-align: top; }}
th:first-child, td:first-child, .why td:last-child, .why th:last-child {{ text-align: left; white-space: normal; }}
.plans {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(620px, 100%), 1fr)); gap: 12px 24px;
  align-items: start; }}
.plans h2 {{ margin-top: 14px; }}
.plans table {{ font-size: 13px; }}
iframe {{ width: 100%; border: 1px solid #c9ced5; border-radius: 6px; margin-top: 6px; }}
"""
_SCRIPT = """
const observer = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  if (!isIntersecting) return;
  observer.unobserve(target);
  const { head, data } = FRAMES[Number(target.dataset.frame)];
  target.srcdoc = FRAME.replace("@HEAD@", () => head).replace("@DATA@", () => data);
}), { rootMargin: "600px" });
document.querySelectorAll("iframe").forEach((frame) => observer.observe(frame));
"""
"""A frame draws itself when it comes near the view, and then reports its height."""


class _Frame(NamedTuple):
    """A Timeline for a frame. head: as HTML. data: as JSON."""

    head: str
    data: str


def write_explanation(result: SearchResult, path: str | Path, words: Sequence[str]) -> None:
    """Write the page, fastest first. words: `winner_in_words` of the result.

    Raises UserError if it cannot be written, or if nothing fits.
    """
    slowest_s = max(simulated.prediction.step_s for simulated in (result.best, *result.results))
    title = html.escape(title_of(result))
    results = distinct(result)
    frames = list(_frames(results, slowest_s))
    numbers = iter(range(len(frames)))
    plans = "".join(
        _plan(place, simulated, None if frame is None else next(numbers))
        for place, (simulated, frame) in enumerate(zip(results, frames))
    )
    best = result.best.candidate
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"{_ranking(result)}{_paragraphs(remarks(result))}"
        f'<h2>{html.escape(f"{best.strategy}, {best.what}")}</h2><div class="winner">{_list(words)}</div>'
        f"{_ruled_out(result)}"
        "<h2>Plans that were simulated</h2><p>On one batch, fastest first. All Timelines have one scale; a row is a "
        f"rank, or ranks that share their work or do the same. The wheel with Ctrl {HINT}</p>"
        f'<div class="plans">{plans}</div>{_scripts([frame for frame in frames if frame])}</body></html>\n'
    )
    save_page(page, path)


def _frames(results: Sequence[SimulatedCandidate], shown_s: float) -> Iterator[_Frame | None]:
    """A frame for each Plan; None where the page has no room for it."""
    left = _MAX_BYTES
    for place, simulated in enumerate(results):
        share = left // (len(results) - place)
        frame = next((frame for frame in _smaller(simulated, shown_s, share) if len(frame.data) <= share), None)
        left -= len(frame.data) if frame else 0
        yield frame


def _smaller(simulated: SimulatedCandidate, shown_s: float, size_bytes: int) -> Iterator[_Frame]:
    timeline: Timeline = simulated.prediction.timeline
    for factor in (3.0, 1.0, 0.25):  # Of rows that are too many, a third is drawn.
        drawing = drawing_of(timeline, int(factor * size_bytes) // _SPAN_BYTES)
        note = rows_in_words(simulated.candidate.plan)
        yield _Frame(head_of(drawing, note), data_text(drawing, shown_s))


def _scripts(frames: Sequence[_Frame]) -> str:
    constants = {"FRAME": page_of("@HEAD@", "@DATA@", framed=True), "FRAMES": [frame._asdict() for frame in frames]}
    # "</" would end the script element. In data it is escaped already, for the element in the frame.
    lines = (f"const {name} = {json.dumps(value, ensure_ascii=False)};" for name, value in constants.items())
    return "<script>" + "\n".join(line.replace("</", "<\\/") for line in lines) + _SCRIPT + "</script>"


def _ranking(result: SearchResult) -> str:
    is_measured = any(simulated.measured_s is not None for simulated in result.results)
    names = (COLUMNS[0], "predicted", "measured", *COLUMNS[2:]) if is_measured else COLUMNS
    rows = []
    for number, simulated in enumerate(distinct(result)):
        name, predicted, *rest = map(html.escape, figures(simulated))
        took = () if simulated.measured_s is None else (shown_seconds(simulated.measured_s),)
        cells = (predicted, *(took or ("",)), *rest) if is_measured else (predicted, *rest)
        rows.append((f'<a href="#plan-{number}">{name}</a>', *cells))
    return _table(names, rows)


def _ruled_out(result: SearchResult) -> str:
    if not result.ruled_out:
        return ""
    rows = [tuple(map(html.escape, row)) for row in ruled_out_rows(result.ruled_out)]
    return f'<h2>Ruled out</h2><div class="why">{_table(("strategy", "plans", "why"), rows)}</div>'


def _plan(place: int, simulated: SimulatedCandidate, frame: int | None) -> str:
    candidate, prediction = simulated.candidate, simulated.prediction
    title = html.escape(f"{candidate.strategy}, {candidate.what}")
    _, *words = plan_in_words(candidate.plan)
    sentences = [*words, *candidate.facts]
    sentences.append(f"Estimated to take {shown_seconds(candidate.estimate_s)} before it was simulated.")
    if simulated.measured_s is not None:
        sentences.append(f"Measured: {shown_seconds(simulated.measured_s)} a step.")
    if simulated.obstacle:
        sentences.append(f"Training cannot run it yet: {simulated.obstacle}.")
    picture = "<p>Its Timeline has more spans than this page has room for; `motet simulate --html` draws it.</p>"
    if frame is not None:
        picture = f'<iframe height="320" title="{title}" data-frame="{frame}"></iframe>'
    return f'<section id="plan-{place}"><h2>{title}</h2>{_list(sentences)}{_memory(prediction)}{picture}</section>'


def _memory(prediction: Prediction) -> str:
    table = memory_table(prediction)
    capacity = prediction.capacity_bytes / 1e9
    names = (f"memory by rank, {table.unit}", *table.parts, f"all, of {capacity:,.4g} GB")
    rows = [(html.escape(row.ranks), *(f"{size:,.1f}" for size in row.sizes)) for row in table.rows]
    left_out = [f"{table.left_out:,} more kinds of ranks are between these."] if table.left_out else []
    return f'<div class="wide">{_table(names, rows)}</div>{_paragraphs(left_out)}'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """names: as text. rows: as HTML."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
