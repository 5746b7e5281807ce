"""What ran when on which rank, measured or simulated, and its export as a Chrome trace."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Span:
    """One action of one rank: its name, e.g. "forward image", its step and microbatch, start and end in seconds."""

    rank: int
    action: str
    step: int
    microbatch: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class Timeline:
    """Spans in the order in which they were recorded; times of one Timeline share one zero."""

    spans: list[Span] = field(default_factory=list)

    def seconds_by_action(self) -> dict[str, float]:
        """Summed duration per action name, in order of first appearance."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.action] = seconds.get(span.action, 0.0) + span.duration_s
        return seconds

    def write_chrome_trace(self, path: Path) -> None:
        """Write the JSON that chrome://tracing and Perfetto open; a row a rank, microseconds."""
        events = [
            {
                "name": span.action,
                "cat": span.action.split()[0],
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
                "args": {"step": span.step, "microbatch": span.microbatch},
            }
            for span in self.spans
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted({span.rank for span in self.spans})
        ]
        path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
