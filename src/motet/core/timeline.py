"""The spans of actions on ranks. Measured and simulated steps have one format, so prediction error is a subtraction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from motet.core.arrays import Float64Array, Int32Array

COMPUTE_STREAM = "compute"
"""The stream that computes; every other stream communicates."""
# Names of chrome://tracing's colours: pale blue for forward, blue for backward, dark blue for weights alone.
# Perfetto chooses its own colours, by the name of the action without its numbers.
_TRACE_COLOURS = {
    "R": "thread_state_sleeping",
    "F": "thread_state_runnable",
    "B": "rail_response",
    "I": "rail_response",
    "W": "light_memory_dump",
    "STEP": "black",
}


@dataclass(frozen=True)
class Span:
    """One action of one rank.

    action:           the text of an action of a Program, e.g. "2F0".
    step, microbatch: their numbers; -1 is none.
    kind:             the name of its `schedule.program.Kind`: "F", "EXCHANGE_F".
    module:           the module that it belongs to; "" is none.
    stream:           COMPUTE_STREAM, or the communication stream that it held, e.g. "send".
    """

    rank: int
    action: str
    step: int
    microbatch: int
    start_s: float
    end_s: float
    kind: str = ""
    module: str = ""
    stream: str = COMPUTE_STREAM

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans as columns, in the order in which they were recorded. All times of a Timeline share one zero.

    rank, microbatch, step:       int32 [num_spans].
    start_s, end_s:               float64 [num_spans].
    action, kind, module, stream: a text for each span.
    rank_names:                   per rank, its name if it stands for several of a cluster; by default "rank 0", ...
    rank_counts:                  per rank, how many of a cluster it stands for; by default one.

    Example:
        >>> spans = [Span(0, "0F0", 0, 0, 0.0, 1.0, kind="F"), Span(1, "0B0", 0, 0, 1.0, 3.0, kind="B")]
        >>> timeline = Timeline.of(spans)
        >>> timeline.makespan_s, timeline.seconds_by_kind()
        (3.0, {('F', ''): 1.0, ('B', ''): 2.0})
    """

    rank: Int32Array
    start_s: Float64Array
    end_s: Float64Array
    action: Sequence[str]
    kind: Sequence[str]
    module: Sequence[str]
    stream: Sequence[str]
    microbatch: Int32Array
    step: Int32Array
    num_ranks: int = field(default=0)
    rank_names: Sequence[str] = ()
    rank_counts: Sequence[int] = ()

    @staticmethod
    def of(spans: Iterable[Span] = ()) -> Timeline:
        """The Timeline of these spans, in this order."""
        rows = list(spans)
        ranks = np.array([span.rank for span in rows], dtype=np.int32)
        return Timeline(
            ranks,
            np.array([span.start_s for span in rows], dtype=np.float64),
            np.array([span.end_s for span in rows], dtype=np.float64),
            [span.action for span in rows],
            [span.kind for span in rows],
            [span.module for span in rows],
            [span.stream for span in rows],
            np.array([span.microbatch for span in rows], dtype=np.int32),
            np.array([span.step for span in rows], dtype=np.int32),
            int(ranks.max(initial=-1)) + 1,
        )

    def named(self, rank_names: Sequence[str], rank_counts: Sequence[int] = ()) -> Timeline:
        """The same spans, on ranks of these names, which stand for so many of a cluster."""
        return replace(self, rank_names=rank_names, rank_counts=rank_counts)

    def rank_name(self, rank: int) -> str:
        """The name of a rank."""
        return self.rank_names[rank] if self.rank_names else f"rank {rank}"

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Span]:
        columns = (self.rank, self.action, self.step, self.microbatch, self.start_s, self.end_s)
        for rank, action, step, microbatch, start_s, end_s, kind, module, stream in zip(
            *columns, self.kind, self.module, self.stream
        ):
            yield Span(
                int(rank), action, int(step), int(microbatch), float(start_s), float(end_s), kind, module, stream
            )

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end; 0 without spans."""
        return float(self.end_s.max() - self.start_s.min()) if len(self) else 0.0

    def seconds_by_kind(self) -> dict[tuple[str, str], float]:
        """The summed seconds of each (kind, module), in order of first appearance.

        Measured and simulated Timelines are compared by these sums, which join ranks, microbatches and parts.
        """
        seconds: dict[tuple[str, str], float] = {}
        for kind, module, duration in zip(self.kind, self.module, (self.end_s - self.start_s).tolist()):
            seconds[kind, module] = seconds.get((kind, module), 0.0) + duration
        return seconds

    def write_json(self, path: Path) -> None:
        """Write a list with an object a span, which has the fields of `Span`."""
        lines = ",\n".join(json.dumps(asdict(span)) for span in self)
        path.write_text(f"[\n{lines}\n]\n")

    def write_chrome_trace(self, path: Path) -> None:
        """Write the JSON that chrome://tracing and Perfetto open: a process a rank, a thread a stream, microseconds."""
        streams = sorted(set(self.stream), key=lambda stream: (stream != COMPUTE_STREAM, stream))
        row = {stream: number for number, stream in enumerate(streams)}
        events = [
            {
                "name": span.action,
                "cat": span.kind or span.action.split()[0],
                "ph": "X",
                "pid": span.rank,
                "tid": row[span.stream],
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
                "cname": _TRACE_COLOURS.get(span.kind, "generic_work"),
                "args": {"step": span.step, "microbatch": span.microbatch, "module": span.module},
            }
            for span in self
        ]
        names: list[dict[str, object]] = []
        for rank in sorted(set(self.rank.tolist())):
            names.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": self.rank_name(rank)}})
            names.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
            names += [
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": stream}}
                for stream, number in row.items()
            ]
        path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
