"""The report of a run: one HTML page, made from its `summary.json`, `metrics.jsonl`, `answers.json` and
`made.json`.

Charts are inline SVG and media are data URIs, so that the page can be mailed and read without a network.
"""

from __future__ import annotations

import base64
import html
import json
import mimetypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from motet.core.words import counted_words
from motet.data.media import AUDIO, IMAGE, VIDEO, modality_of
from motet.train.report.beside import beside_sections
from motet.train.report.charts import NARROW, grouped_bars, horizontal_bars, line_chart
from motet.train.report.step_lines import read_lines
from motet.train.report.style import CSS
from motet.train.report.summary import methods_line, shared_phases, steady
from motet.train.run_folder import REPORT

_MAX_POINTS = 600
_MAX_MEDIA_BYTES = 2_000_000


def write_report(run_dir: Path) -> Path:
    """Write the report into a run's folder and return its path."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    steps = read_lines(run_dir / "metrics.jsonl")
    answers_file = run_dir / "answers.json"
    answers = json.loads(answers_file.read_text(encoding="utf-8")) if answers_file.exists() else []
    made_file = run_dir / "made.json"
    made = json.loads(made_file.read_text(encoding="utf-8")) if made_file.exists() else []
    title = f"Motet run: {run_dir.name}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{counted_words(summary['num_ranks'], 'rank')} on {html.escape(summary['device'])}, "
        f"{counted_words(summary['steps'], 'step')}.</p>",
        _tiles(summary),
        *_loss(steps, summary),
        *_balance(steps, summary),
        *_time(steps),
        *_ahead(summary),
        *beside_sections(run_dir, summary),
        *_exact_match(summary),
        *_made(made, run_dir),
        *_answers(answers),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )
    path = run_dir / REPORT
    path.write_text(page, encoding="utf-8")
    return path


def _tiles(summary: dict[str, Any]) -> str:
    tiles = {
        "wall time": _duration(summary["wall_s"]),
        **_loss_tile(summary),
        "tokens/s": f"{summary['tokens_per_s']:,.0f}",
        f"MFU ({summary['peak_source']} peak)": f"{summary['mfu']:.1%}",
        **({} if summary["hfu"] is None else {"HFU, with recomputation and padding": f"{summary['hfu']:.1%}"}),
        "peak memory a rank": f"{summary['memory']['peak_bytes'] / 2**20:,.0f} MiB ({summary['memory']['kind']})",
        "waiting for data": f"{summary['data_wait_share']:.1%} of the time",
        "waiting for a core": f"{summary['core_wait_share']:.1%} of the time",
    }
    if summary["bad_examples"]:
        tiles["unreadable examples"] = f"{summary['bad_examples']:,}"
    if summary["bad_steps"]:
        tiles["steps not finite, skipped"] = f"{summary['bad_steps']:,}"
    if summary.get("loss_scale") is not None:
        tiles["loss scale at last, steps that overflowed"] = f"{summary['loss_scale']:,.0f}, {summary['overflows']:,}"
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{shown}</b><span>{name}</span></div>' for name, shown in tiles.items())
        + "</div>"
    )


def _loss_tile(summary: dict[str, Any]) -> dict[str, str]:
    first, last, count = _shown(summary["loss_first"]), _shown(summary["loss_last"]), summary["loss_steps"]
    if summary["steps"] - summary["bad_steps"] == 1:
        return {"loss of its one step": first}
    return {f"loss, first to last {count} steps" if count > 1 else "loss, first to last step": f"{first} → {last}"}


def _shown(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.3f}"


def _loss(steps: list[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    raw = [(step["step"], step["loss"]) for step in steps if step["loss"] is not None]
    if not raw:
        return []
    series = {"each step": _thinned(raw), "smoothed": _thinned(_smoothed(raw))}
    if heldout := summary["heldout_loss_by_step"]:
        series["held out"] = [(int(step), loss) for step, loss in heldout.items() if loss is not None]
    chart = line_chart(series, x_label="step", y_label="loss a target token, nats", faint="each step")
    return ["<h2>Loss</h2>", chart]


def _balance(steps: list[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    phases = shared_phases(summary)
    if not phases:
        return []
    parts = [
        "<h2>Load of the ranks, phase by phase</h2>",
        "<p>A step lasts as long as its busiest rank; under a plan, a replica takes the place of a rank. Maximum load "
        "over the lower bound: 1 means that no placement of "
        "whole items is better. “Before” is every example on its home rank, “after” is what was run.</p>",
        "<table><tr><th>phase</th><th>load in</th><th>max/bound before</th><th>after</th></tr>",
        *(
            f"<tr><td>{html.escape(name)}</td><td>{phase['unit']}</td>"
            f"<td>{phase['max_over_bound_before']:.3f}</td><td>{phase['max_over_bound']:.3f}</td></tr>"
            for name, phase in phases.items()
        ),
        "</table>",
        *_methods(summary["balance"]),
    ]
    for name, phase in phases.items():
        rows = [(step["step"], step["phases"][name]) for step in steps if step["phases"][name]["bound"]]
        if not rows:
            continue
        ratios = {
            label: _thinned(_smoothed([(step, phase[key]) for step, phase in rows]))
            for label, key in (("before", "max_over_bound_before"), ("after", "max_over_bound"))
        }
        step, typical = sorted(rows, key=lambda row: row[1]["max_over_bound_before"])[len(rows) // 2]
        loads = {"before": typical["loads_before"], "after": typical["loads"]}
        bound = ("bound", typical["bound"])
        holder = "rank" if phase["num_replicas"] == summary["num_ranks"] else "replica"
        holders = [f"{holder} {number}" for number in range(len(typical["loads"]))]
        parts += [
            f'<h3>{html.escape(name)}</h3><div class="pair"><div>',
            line_chart(ratios, x_label="step (smoothed)", y_label="max load / bound", y_min=1, width=NARROW),
            "</div><div>",
            grouped_bars(
                loads, holders, y_label=f"{typical['unit']} in step {step}, the median", rule=bound, width=NARROW
            ),
            "</div></div>",
        ]
    return parts


def _methods(balance: dict[str, Any]) -> list[str]:
    """A paragraph on which method of balancing was chosen, and why."""
    if not balance["why"]:
        return []
    return [
        f"<p>Way of balancing, chosen for each microbatch from predicted seconds: "
        f"{html.escape(methods_line(balance['methods']))}. “joint” places whole examples, so that no encoder output "
        "crosses ranks; “per_phase” places the items of each phase by themselves; “mixed” only those of some "
        f"encoders. When the most frequent way was last chosen: {html.escape(balance['why'])}</p>"
    ]


def _time(steps: list[dict[str, Any]]) -> list[str]:
    counted = steady(steps)
    names = list(dict.fromkeys(name for step in counted for name in step["actions"]))

    def mean_ms(seconds: Iterable[float]) -> float:
        return 1000 * sum(seconds) / len(counted)

    milliseconds = {
        name: mean_ms(step["actions"].get(name, {}).get("max_s", 0.0) for step in counted) for name in names
    }
    milliseconds["waiting for data"] = mean_ms(step["data_wait_s"] for step in counted)
    milliseconds["waiting for a core"] = mean_ms(step.get("core_wait_s") or 0.0 for step in counted)
    step_ms, decide_ms = (mean_ms(step[name] for step in counted) for name in ("step_s", "decide_s"))
    return [
        "<h2>Where a step's time goes</h2>",
        f"<p>Mean step: {step_ms:,.1f} ms. Each action on its slowest rank, mean over steps. Deciding the balance "
        f"takes {decide_ms:.2f} ms a step in the prefetch thread, beside the step. Waiting for a core is part of all "
        "the others: other threads and processes, decoding for example, ran where the step would have.</p>",
        horizontal_bars(milliseconds, unit="ms"),
    ]


def _ahead(summary: dict[str, Any]) -> list[str]:
    """What was loaded ahead, by how many workers, and the memory that it took. Earlier summaries do not say."""
    ahead = summary.get("ahead")
    if ahead is None or not ahead["workers"]:
        return []
    fewest, deaths = ahead["fewest_workers"], ahead["deaths"]
    lost = f" {deaths} of them died, and others went on with their items." if deaths else ""
    fewer = f" While there was room for no more, {fewest} decoded." if fewest < ahead["workers"] else ""
    rows = {
        "media loaded ahead": ahead["media_bytes"],
        "results in Ray's object store": ahead["store_bytes"],
        "resident memory of the process": ahead["host_bytes"],
    }
    lines = (f"<tr><td>{name}</td><td>{num_bytes / 2**20:,.1f}</td></tr>" for name, num_bytes in rows.items())
    return [
        "<h2>Loading ahead</h2>",
        f"<p>{counted_words(ahead['workers'], 'worker')} decoded for all ranks.{lost}{fewer} "
        "The most, on any rank:</p>",
        f"<table><tr><th>what</th><th>MiB</th></tr>{''.join(lines)}</table>",
    ]


def _exact_match(summary: dict[str, Any]) -> list[str]:
    if not summary["exact_match"]:
        return []
    counts = summary["num_heldout"]
    rows = "".join(
        f"<tr><td>{html.escape(task)}</td><td>{share:.1%}</td><td>{counts[task]}</td></tr>"
        for task, share in summary["exact_match"].items()
    )
    return [
        "<h2>Held-out answers that match exactly</h2>",
        f"<table><tr><th>task</th><th>exact match</th><th>examples</th></tr>{rows}</table>",
    ]


def _answers(answers: list[dict[str, Any]]) -> list[str]:
    if not answers:
        return []
    return ["<h2>Held-out examples and the model's answers</h2>", '<div class="cards">', *map(_card, answers), "</div>"]


def _made(made: list[dict[str, Any]], run_dir: Path) -> list[str]:
    """What generators made of held-out prompts, beside what the answer holds."""
    if not made:
        return []
    cards = [
        f'<div class="card shown"><div class="task">{html.escape(item["generator"])}</div>'
        f"{''.join(_player(Path(path)) for path in item['media'])}<dl>"
        f"<dt>asked</dt><dd>{html.escape(item['prompt'])}</dd></dl>"
        f'<div class="made"><div>made{_player(run_dir / item["file"])}</div>'
        f"<div>held out{_held_out(item, run_dir)}</div></div></div>"
        for item in made
    ]
    return [
        f"<h2>What was made of held-out prompts after step {made[0]['step']:,}</h2>",
        '<div class="cards">',
        *cards,
        "</div>",
    ]


def _held_out(item: dict[str, Any], run_dir: Path) -> str:
    """What the answer holds, and of a clip its spectrogram, as what was made is one."""
    shown = _player(run_dir / item["expected_shown"]) if "expected_shown" in item else ""
    return shown + _player(Path(item["expected"]))


def _card(answer: dict[str, Any]) -> str:
    right = answer["is_exact"]
    media = "".join(_player(Path(path)) for path in answer["media"])
    return (
        f'<div class="card{" right" if right else ""}"><div class="task">{html.escape(answer["task"])}</div>{media}<dl>'
        f"<dt>asked</dt><dd>{html.escape(answer['prompt'])}</dd><dt>answered</dt>"
        f'<dd class="{"good" if right else "wrong"}">{html.escape(answer["answer"]) or "(nothing)"}</dd>'
        f"<dt>expected</dt><dd>{html.escape(answer['expected'])}</dd></dl></div>"
    )


def _player(path: Path) -> str:
    modality = modality_of(path.name)
    if modality not in (IMAGE, AUDIO, VIDEO) or not path.exists() or path.stat().st_size > _MAX_MEDIA_BYTES:
        return f"<p>{html.escape(path.name)}</p>"
    kind = mimetypes.guess_type(path.name)[0] or f"{modality}/{path.suffix.lower().removeprefix('.')}"
    uri = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    if modality == IMAGE:
        return f'<img alt="{html.escape(path.name)}" src="{uri}">'
    return f'<{modality} controls preload="metadata" src="{uri}"></{modality}>'


def _smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running mean over the last 2 % of the points, at least 1 point."""
    width = max(len(points) // 50, 1)
    total, result = 0.0, []
    for i, (x, y) in enumerate(points):
        total += y - (points[i - width][1] if i >= width else 0.0)
        result.append((x, total / min(i + 1, width)))
    return result


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every n-th point, at most _MAX_POINTS."""
    every = -(-len(points) // _MAX_POINTS) or 1
    return points[::every]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
