"""What `own_truth.py` tells of its rounds: predicted against measured, by setting and by action."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from motet.core.timeline import COMPUTE_STREAM, Span, Timeline
from motet.schedule.program import COMPUTE_KINDS, Kind, action_words

INSIDE = {Kind.GATHER: Kind.F, Kind.GATHER_B: Kind.B, Kind.REDUCE: Kind.B}
"""Kinds that are simulated by themselves, and the passes in which FSDP2 does their work."""


class Sample(NamedTuple):
    """One step on one rank. delay_s: that its threads could have run and had no core.

    actions, processor_s: seconds by action in words, by the clock and of the main thread's processor.
    """

    step_s: float
    delay_s: float
    actions: dict[str, float]
    processor_s: dict[str, float]


Repeats = list[tuple[Sample, ...]]
"""A sample a rank, for each repeat of a step."""


def compare(steps: Iterable[tuple[Repeats, Timeline]]) -> dict:
    """Figures of one setting: columns over its batches, and by action the mean over batches and ranks, in seconds:
    by the clock, predicted, of the processor.

    Of the repeats of a step those count, by the clock, in which ranks were least delayed: a tenth, or two.
    """
    columns = defaultdict(list)
    actions: dict[str, tuple[list, list, list]] = defaultdict(lambda: ([], [], []))
    for repeats, timeline in steps:
        calm = sorted(repeats, key=lambda sample: sum(own.delay_s for own in sample))[: max(len(repeats) // 10, 2)]
        columns["measured_s"].append(_median(max(own.step_s for own in sample) for sample in calm))
        columns["predicted_s"].append(timeline.makespan_s)
        idle = [_idle_share([own.actions for own in each], max(own.step_s for own in each)) for each in calm]
        columns["idle_share"].append(_median(idle))
        foreseen = [by_action(timeline, rank) for rank in range(timeline.num_ranks)]
        columns["predicted_idle_share"].append(_idle_share(foreseen, timeline.makespan_s))
        columns["delayed_share"].append(_median(max(own.delay_s / own.step_s for own in sample) for sample in calm))
        columns["measured_processor_s"].append(
            max(_median(sum(own.processor_s.values()) for own in rank) for rank in zip(*repeats, strict=True))
        )
        columns["predicted_processor_s"].append(max(_busy(timeline, rank) for rank in range(timeline.num_ranks)))
        for rank, (own, all_own) in enumerate(zip(zip(*calm, strict=True), zip(*repeats, strict=True), strict=True)):
            predicted = by_action(timeline, rank)
            for action in own[0].actions:  # Those of all ranks; in a pipeline, a rank has some of them.
                actions[action][0].append(_median(sample.actions[action] for sample in own))
                actions[action][1].append(predicted.get(action, 0.0))
                actions[action][2].append(_median(sample.processor_s.get(action, 0.0) for sample in all_own))
    means = {action: [float(np.mean(each)) for each in three] for action, three in actions.items()}
    return {**columns, "actions": means}


def by_action(timeline: Timeline, rank: int) -> dict[str, float]:
    """Seconds of a simulated rank by the step's actions: each lasts from the end of the one before it to its own.

    What arrives while the rank computes is waited for no longer than until that computation began.
    """
    own = [span for span in timeline if span.rank == rank]
    inside_passes = INSIDE if any(span.kind == Kind.NORM for span in own) else {}  # Pipelines reduce by themselves.
    computed = sorted((span.start_s, span.end_s) for span in own if span.stream == COMPUTE_STREAM)

    def end_s(span: Span) -> float:
        index = bisect_right(computed, (span.end_s,)) - 1
        inside = index >= 0 and span.stream != COMPUTE_STREAM and span.end_s < computed[index][1]
        return computed[index][0] if inside else span.end_s

    seconds: dict[str, float] = defaultdict(float)
    last_s = 0.0
    for span in sorted(own, key=end_s):
        if end_s(span) > last_s:
            seconds[action_words(inside_passes.get(Kind(span.kind), span.kind), span.module)] += end_s(span) - last_s
            last_s = end_s(span)
    return seconds


def summary(rounds: Sequence[dict]) -> dict[str, dict]:
    """Per setting, medians over batches and rounds."""
    figures = {}
    for name in rounds[0]["settings"]:
        own = [each["settings"][name] for each in rounds]
        column = {key: np.array([each[key] for each in own]) for key in own[0] if key != "actions"}
        ratio = column["predicted_s"] / column["measured_s"]
        figures[name] = {key: float(np.median(values)) for key, values in column.items()} | {
            "ratio": float(np.median(ratio)),
            "worst_ratio": float(ratio.flat[np.abs(np.log(ratio)).argmax()]),
            "idle_points": float(np.median(column["predicted_idle_share"] - column["idle_share"])),
            "processor_ratio": float(np.median(column["predicted_processor_s"] / column["measured_processor_s"])),
            "ratio_by_round": np.median(ratio, axis=1).tolist(),
            "actions": {
                action: np.median([each["actions"][action] for each in own], axis=0).tolist()
                for action in own[0]["actions"]
            },
        }
    return figures


def show(figures: dict[str, dict]) -> None:
    heads = (
        "measured ms",
        "predicted",
        "off by",
        "worst",
        "delayed",
        "processor ms",
        "predicted",
        "off by",
        "idle off",
    )
    print(f"{'setting':30}" + "".join(f"{head:>13}" for head in heads))
    for name, it in figures.items():
        cells = [
            _ms(it["measured_s"]), _ms(it["predicted_s"]), f"{it['ratio'] - 1:+.1%}", f"{it['worst_ratio'] - 1:+.0%}",
            f"{it['delayed_share']:.0%}", _ms(it["measured_processor_s"]), _ms(it["predicted_processor_s"]),
            f"{it['processor_ratio'] - 1:+.1%}", f"{100 * it['idle_points']:+.1f}",
        ]  # fmt: skip
        print(f"{name:30}" + "".join(f"{cell:>13}" for cell in cells))
    print(f"\n{'ms of a rank, in the mean':30}{'measured':>13}{'predicted':>13}{'off by':>13}{'processor':>13}")
    for name, it in figures.items():
        print(name)
        for action, (measured, predicted, processor) in it["actions"].items():
            cells = map(_ms, (measured, predicted, predicted - measured, processor))
            print(f"  {action:28}" + "".join(f"{cell:>13}" for cell in cells))


def _idle_share(ranks: Sequence[Mapping[str, float]], step_s: float) -> float:
    """The share of a step in which ranks compute nothing, from the seconds of each rank's actions in words."""
    begins = tuple(kind.words for kind in COMPUTE_KINDS)
    computed_s = sum(seconds for rank in ranks for name, seconds in rank.items() if name.startswith(begins))
    return 1 - computed_s / (len(ranks) * step_s)


def _busy(timeline: Timeline, rank: int) -> float:
    return sum(span.duration_s for span in timeline if span.rank == rank and span.stream == COMPUTE_STREAM)


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
