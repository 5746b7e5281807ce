"""A Timeline as one HTML page to zoom and pan in. The page contains page.js and the spans, and loads nothing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from motet.core.errors import UserError
from motet.core.timeline import Timeline
from motet.simulate.show.drawing import BUBBLE, INK, SOFT, Drawing, LegendEntry, draw, is_light

_MAX_ROWS, _MAX_SPANS = 512, 200_000
_NUMBER = "\x01"
_OF_MICROBATCH = re.compile(r"(\d+[A-Z]\w*?)(\d+)(\D.*)?$", re.ASCII)
_NUM_TICKS = 10_000_000
"""Ticks of the makespan: a step of a second is resolved to 0.1 microseconds."""
HINT = "zooms, dragging pans, a double click shows the whole; at the right of a row, its share of bubbles."
_STYLE = f"""
:root {{ --ink: {INK}; --soft: {SOFT}; --page: #ffffff; --bubble: {BUBBLE}; --line: #c9ced5; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 20px 40px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
body.framed {{ padding: 8px 10px 4px; }}
h1 {{ font-size: 20px; margin: 0; overflow-wrap: anywhere; }}
p {{ margin: 2px 0; color: var(--soft); font-size: 14px; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin: 10px 0 12px; }}
.key {{ display: inline-flex; width: 26px; height: 12px; margin-right: 6px; vertical-align: -1px; }}
.key i {{ flex: 1; }}
canvas {{ display: block; width: 100%; }}
#rows {{ cursor: crosshair; touch-action: pan-y; }}
#axis {{ position: sticky; bottom: 0; background: var(--page); }}
#tip {{ position: absolute; white-space: pre; background: var(--page); border: 1px solid var(--line); font-size: 13px;
  border-radius: 6px; padding: 5px 9px; pointer-events: none; font-variant-numeric: tabular-nums; }}
"""


def write_timeline_html(timeline: Timeline, path: str | Path, *, title: str = "Timeline", note: str = "") -> None:
    """Write the page, some 25 bytes a span. Of more than 512 ranks, or 200,000 spans, only some ranks are drawn.

    note: a sentence above the rows.
    Raises UserError if the file cannot be written. O(spans).
    """
    drawing = drawing_of(timeline, _MAX_SPANS)
    heading = f"<h1>{html.escape(title)}</h1>{head_of(drawing, note)}<p>The wheel {HINT}</p>"
    save_page(page_of(heading, data_text(drawing), title), path)


def save_page(page: str, path: str | Path) -> None:
    """Write a page. Raises UserError if the file cannot be written."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the page cannot be written to {path}: {error.strerror}.") from error


def framed_page(timeline: Timeline, *, max_spans: int, framed_s: float) -> str:
    """The text of a page for a frame beside others. framed_s: the seconds that it shows at first, as all of them do."""
    drawing = drawing_of(timeline, max_spans)
    return page_of(head_of(drawing), data_text(drawing, framed_s), framed=True)


def drawing_of(timeline: Timeline, max_spans: int) -> Drawing:
    """The drawing of a page. If the ranks that differ have more than max_spans spans, only some are drawn. O(spans)."""
    num_ranks = max(timeline.num_ranks, 1)
    return draw(timeline, max_rows=min(_MAX_ROWS, max(max_spans * num_ranks // max(len(timeline), 1), 4)))


def head_of(drawing: Drawing, note: str = "") -> str:
    """What stands above the legend and the rows, as HTML. note: a sentence above the rows."""
    facts = f"<p>{html.escape(drawing.facts)}.</p>" + (f"<p>{html.escape(note)}</p>" if note else "")
    return f'{facts}<div class="legend">{"".join(map(_key, drawing.legend))}</div>'


def data_text(drawing: Drawing, shown_s: float = 0.0) -> str:
    """The spans as JSON that a script element may contain. shown_s: the seconds that are shown at first; 0 is all."""
    data = json.dumps(_data(drawing, shown_s), ensure_ascii=False, separators=(",", ":"))
    # "</" would end the script element that contains the text.
    return data.replace("</", "<\\/")


def page_of(head: str, data: str, title: str = "", *, framed: bool = False) -> str:
    """The text of the page.

    head: as HTML, legend included. data: as `data_text` makes it.
    framed: for a page in a frame beside others: it zooms by the wheel only while Ctrl is held.
    """
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body{' class=framed' if framed else ''}>"
        f"{head}"
        '<div><canvas id="rows"></canvas><canvas id="axis"></canvas></div><div id="tip" hidden></div>'
        f"<script>const DATA = {data};\n{script}</script></body></html>\n"
    )


def _data(drawing: Drawing, shown_s: float) -> dict[str, Any]:
    """What page.js reads.

    ticks: of the makespan. shown: to begin with. numbered: whether boxes have the numbers of microbatches.
    paints: colour, 1 in the band of communication, colour of text on it, module.
    texts: of actions, the microbatch's number as _NUMBER.

    rows: a rank each; per span, in order of start: ticks from the start before it, ticks that it takes, the rest.
    """
    texts: dict[str, int] = {}
    per_s = _NUM_TICKS / drawing.makespan_s if drawing.makespan_s else 0.0
    start = np.rint(drawing.start_s * per_s).astype(np.int64)
    end = np.rint(drawing.end_s * per_s).astype(np.int64)
    bounds = np.searchsorted(drawing.row, np.arange(len(drawing.ranks) + 1))
    rows = []
    for row, (name, share) in enumerate(zip(drawing.names, drawing.bubble_share.tolist())):
        spans = slice(bounds[row], bounds[row + 1])
        rows.append(
            {
                "name": name,
                "bubble": round(share, 5),
                "gaps": np.diff(start[spans], prepend=0).tolist(),
                "durations": (end - start)[spans].tolist(),
                "paints": drawing.paint[spans].tolist(),
                "microbatches": drawing.number[spans].tolist(),
                "actions": [
                    texts.setdefault(_without_number(drawing.timeline.action[span], number), len(texts))
                    for span, number in zip(drawing.span[spans].tolist(), drawing.number[spans].tolist())
                ],
            }
        )
    paints = [
        (paint.colour, int(paint.band), INK if is_light(paint.colour) else "#ffffff", paint.module)
        for paint in drawing.paints
    ]
    return {
        "ticks": _NUM_TICKS,
        "shown": max(round(shown_s * per_s), _NUM_TICKS),
        "makespan_s": drawing.makespan_s,
        "numbered": drawing.is_numbered,
        "paints": paints,
        "texts": list(texts),
        "rows": rows,
    }


def _without_number(action: str, microbatch: int) -> str:
    """The text of an action with _NUMBER in place of its microbatch, so that there are few different ones."""
    found = _OF_MICROBATCH.match(action)
    return f"{found[1]}{_NUMBER}{found[3] or ''}" if found and found[2] == str(microbatch) else action


def _key(key: LegendEntry) -> str:
    colours = "".join(
        f'<i style="background:{"var(--bubble)" if colour == BUBBLE else colour}"></i>' for colour in key.colours
    )
    return f'<span><span class="key">{colours}</span>{html.escape(key.name)}</span>'
