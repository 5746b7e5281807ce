"""OrchMLLM, Figures 8 and 9: what balancing gains grows with the model. Used by papers.py.

"The ratios between them increase as MLLM grows larger" (section 8.1): minibatches of 80, 60 and 30 examples a GPU,
balanced, over 65, 40 and 15, not balanced. Each is one minibatch a step, as the paper runs it; planner_orchmllm.py has
what the planner finds where it may cut them into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from planner_orchmllm import DATA_PARALLEL, NUM_GPUS, TABLE
from published import Absent, Range, Row
from trials import Subject, job_of

SOURCE = "OrchMLLM, Figure 9"


def _figure_9() -> Iterator[Row]:
    gains = []
    for row in TABLE:
        job = job_of(f"orchmllm_{row.model.lower()}", name=f"MLLM-{row.model}")
        fewer = replace(job, batch_size=row.unbalanced * NUM_GPUS)
        balanced = Subject(job).searched(replace(DATA_PARALLEL, microbatch_size=row.balanced))
        unbalanced = Subject(fewer).searched(replace(DATA_PARALLEL, microbatch_size=row.unbalanced, balance="off"))
        gains.append(balanced.times(unbalanced))
        what, note = f"MLLM-{row.model}: balanced over not", f"MFU {balanced.mfu:.1%} and {unbalanced.mfu:.1%}"
        yield Row(SOURCE, what, "times a GPU", Range(1.4, 2.0), gains[-1], note=note)
    for smaller, larger, before, after in zip(TABLE, TABLE[1:], gains, gains[1:]):
        what = f"gain of MLLM-{larger.model} over that of MLLM-{smaller.model}"
        yield Row(SOURCE, what, "", Range(low=1.0), after / before, 0.0)


PLANNED: Mapping[str, Callable[[], Iterable[Row]]] = {SOURCE: _figure_9}
ABSENT = (
    Absent("OrchMLLM, Figures 8 and 9", "over Megatron-LM: jobs of benchmarks/planner.py."),
    Absent("OrchMLLM, Figures 10 to 13, Table 2", "in real steps, scaled down: benchmarks/orchmllm.py."),
)
