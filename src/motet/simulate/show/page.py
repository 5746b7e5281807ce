"""A Timeline as one HTML page to zoom and pan in. The page contains page.js and the spans, and loads nothing."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np

from motet.core.errors import UserError
from motet.core.timeline import Timeline
from motet.simulate.show.drawing import BUBBLE, INK, SOFT, Drawing, LegendEntry, draw, is_light

_MAX_ROWS, _MAX_SPANS = 512, 200_000
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
    """Write the page, 25 to 40 bytes a span. Of more than 512 ranks, or 200,000 spans, only some ranks are drawn.

    note: a sentence above the rows.
    Raises UserError if the file cannot be written. O(spans).
    """
    save_page(page_of(timeline, title=title, max_spans=_MAX_SPANS, note=note), path)


def save_page(page: str, path: str | Path) -> None:
    """Write a page. Raises UserError if the file cannot be written."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the page cannot be written to {path}: {error.strerror}.") from error


def page_of(timeline: Timeline, *, title: str, max_spans: int, framed_s: float = 0.0, note: str = "") -> str:
    """The text of the page. If the ranks have more than max_spans spans, only some ranks are drawn. O(spans).

    framed_s: for a page in a frame beside others, the seconds that it shows at first: all frames have one scale.
              Such a page has no heading, and zooms by the wheel only while Ctrl is held. 0 is a page without a frame.
    """
    num_ranks = max(timeline.num_ranks, 1)
    drawing = draw(timeline, max_rows=min(_MAX_ROWS, max(max_spans * num_ranks // max(len(timeline), 1), 4)))
    # "</" would end the script element that contains the text.
    spans = _data(drawing, list(timeline.action), framed_s)
    data = json.dumps(spans, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    head = f"<p>{html.escape(drawing.facts)}.</p>" + (f"<p>{html.escape(note)}</p>" if note else "")
    if not framed_s:
        head = f"<h1>{html.escape(title)}</h1>{head}<p>The wheel {HINT}</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body{' class=framed' if framed_s else ''}>"
        f'{head}<div class="legend">{"".join(map(_key, drawing.legend))}</div>'
        '<div><canvas id="rows"></canvas><canvas id="axis"></canvas></div><div id="tip" hidden></div>'
        f"<script>const DATA = {data};\n{script}</script></body></html>\n"
    )


def _data(drawing: Drawing, actions: list[str], shown_s: float) -> dict[str, Any]:
    """What page.js reads. actions: a text a span of the Timeline.

    ticks: of the makespan. shown: to begin with. paints: colour, 1 in the band of communication, colour of text on it,
    module.

    rows: a rank each; per span, in order of start: ticks from the start before it, ticks that it takes, the rest.
    """
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
                "actions": [actions[span] for span in drawing.span[spans].tolist()],
            }
        )
    paints = [
        (paint.colour, int(paint.band), INK if is_light(paint.colour) else "#ffffff", paint.module)
        for paint in drawing.paints
    ]
    shown = max(round(shown_s * per_s), _NUM_TICKS)
    return {"ticks": _NUM_TICKS, "shown": shown, "makespan_s": drawing.makespan_s, "paints": paints, "rows": rows}


def _key(key: LegendEntry) -> str:
    colours = "".join(
        f'<i style="background:{"var(--bubble)" if colour == BUBBLE else colour}"></i>' for colour in key.colours
    )
    return f'<span><span class="key">{colours}</span>{html.escape(key.name)}</span>'
