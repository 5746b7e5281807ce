"""Cornstarch, Figures 9, 10 and 13 to 15: end to end, TP 2 and CP 2, stages of Tables 5 and 6. Used by papers.py.

The figures are bars; the numbers are those that the text says of them (sections 6.2.1, 6.2.2). A microbatch is one
sample, 24 a step; all is frozen but for the projectors, and recomputed. Four GPUs a stage, and up to seven stages, are
up to 28 of 24 GPUs: here there are as many as a row needs. Baselines cut by the seconds of forward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from baselines.modalities import Stages, encoders_colocated, encoders_replicated
from planner_cornstarch import ALM, AUDIO, LLMS, VISION, VLM
from published import Range, Row
from trials import job_of

from motet.core.plan import Plan
from motet.planner.job import Job
from motet.planner.modality_parallel.pipeline import ModalityDegrees, ModalityPipeline
from motet.simulate.predict.predict import predict_assigned

TP, CP = 2, 2


class Stated(NamedTuple):
    """A row of Table 5 or 6: stages of the LLM and of colocated encoders; of the LLM and of each encoder."""

    model: str
    colocated: tuple[int, int]
    parallel: tuple[int, ...]


def _table(text: str) -> tuple[Stated, ...]:
    """Lines such as "VALM-SS 3,4 3,1,1"."""
    lines = (line.split() for line in text.strip().splitlines())
    read = ((model, *(tuple(map(int, part.split(","))) for part in parts)) for model, *parts in lines)
    return tuple(Stated(*row) for row in read)


TABLES: Mapping[str, tuple[Stated, ...]] = {
    "S": _table(
        """
        VLM-S 5,2 4,2
        VLM-M 2,3 3,3
        VLM-L 1,4 2,4
        ALM-S 3,2 3,1
        ALM-M 3,5 2,3
        ALM-L 2,6 3,5
        VALM-SS 3,4 3,1,1
        VALM-SM 1,3 3,1,4
        VALM-SL 1,4 3,1,5
        VALM-MS 2,4 3,3,1
        VALM-MM 1,4 3,2,3
        VALM-ML 1,5 3,2,4
        VALM-LS 1,4 3,5,1
        VALM-LM 1,6 2,4,3
        VALM-LL 5,2 2,3,3
        """
    ),
    "M": _table(
        """
        VLM-S 3,1 5,1
        VLM-M 3,2 3,1
        VLM-L 2,3 3,2
        ALM-S 4,2 5,1
        ALM-M 3,3 4,2
        ALM-L 2,4 4,2
        VALM-SS 5,2 5,1,1
        VALM-SM 4,3 5,1,1
        VALM-SL 3,4 4,1,2
        VALM-MS 4,4 4,2,1
        VALM-MM 3,4 4,1,1
        VALM-ML 2,4 3,1,1
        VALM-LS 2,4 4,2,1
        VALM-LM 2,4 4,2,2
        VALM-LL 2,5 5,1,1
        """
    ),
    "L": _table(
        """
        VLM-S 5,1 5,1
        VLM-M 4,1 5,1
        VLM-L 3,2 4,1
        ALM-S 5,1 5,1
        ALM-M 5,1 5,1
        ALM-L 5,2 5,1
        VALM-SS 5,1 5,1,1
        VALM-SM 5,2 5,1,1
        VALM-SL 5,2 5,1,1
        VALM-MS 4,1 5,1,1
        VALM-MM 4,2 5,1,1
        VALM-ML 4,3 5,1,1
        VALM-LS 4,2 5,1,1
        VALM-LM 4,3 5,1,1
        VALM-LL 4,3 5,1,1
        """
    ),
}
"""By size of the LLM."""


class Simulated(NamedTuple):
    """Seconds of a step, and GPUs."""

    step_s: float
    num_ranks: int

    def over(self, other: Simulated) -> float:
        """How much faster it is a GPU."""
        return other.step_s * other.num_ranks / (self.step_s * self.num_ranks)


class Compared(NamedTuple):
    """Cornstarch, and the two that it compares with."""

    own: Simulated
    colocated: Simulated
    replicated: Simulated

    @property
    def gain(self) -> float:
        """Over the better of the two."""
        return min(self.own.over(self.colocated), self.own.over(self.replicated))


@cache
def compared(llm: str, model: str) -> Compared:
    stated = next(row for row in TABLES[llm] if row.model == model)
    kind, sizes = model.split("-")
    encoders: dict[str, Any] = {"image": VISION[sizes[0]], "audio": AUDIO[sizes[-1]]}
    changes: dict[str, Any] = {"model": {"backbone": LLMS[llm], "encoders": encoders}}
    changes["cluster"] = {"nodes": max(6, sum(stated.colocated), sum(stated.parallel))}
    if kind != "VALM":
        encoders["audio" if kind == "VLM" else "image"] = None
        changes["workload"] = {"task": [VLM if kind == "VLM" else ALM]}
    job = job_of("valm_mm", changes, model)
    degrees = ModalityDegrees((*stated.parallel[1:], stated.parallel[0]), TP, 1, 1, job.batch_size)
    own = ModalityPipeline(job, degrees, "full")
    colocated = Stages(*stated.colocated, tp=TP, recomputed=True)
    replicated = Stages(6, tp=TP, recomputed=True)
    return Compared(
        simulated(job, own.plan(own.settled())),
        simulated(job, encoders_colocated(job, colocated)),
        simulated(job, encoders_replicated(job, replicated)),
    )


def simulated(job: Job, plan: Plan) -> Simulated:
    """The Plan with CP in all units."""
    first_ranks = accumulate((unit.num_ranks * CP for unit in plan.units), initial=0)
    units = tuple(replace(unit, cp=CP, first_rank=first) for unit, first in zip(plan.units, first_ranks))
    whole = replace(plan, units=units)
    found = predict_assigned(whole, job.planned(whole), job.assignment(whole), job.cost)
    return Simulated(found.step_s, sum(unit.num_ranks for unit in units))


def _figures(llm: str, is_valm: bool) -> list[tuple[str, Compared]]:
    models = [row.model for row in TABLES[llm] if row.model.startswith("VALM") == is_valm]
    return [(model, compared(llm, model)) for model in models]


BEST, BETTER = 1.57, "over the better baseline"
"""The most that Cornstarch gains over the baselines in any of the figures (section 6.2.1)."""


def _gains(source: str, llms: str, *, is_valm: bool) -> Iterator[Row]:
    """Each model's gain over the better baseline, at most 1.57 in all figures."""
    for llm in llms:
        for model, found in _figures(llm, is_valm):
            yield Row(source, f"{model}, LLM-{llm}: {BETTER}", "times a GPU", Range(high=BEST), found.gain)


def _figure_9() -> Iterator[Row]:
    """Above 1, with one exception: VLM-S, whose iteration is shorter all the same."""
    source = "Cornstarch, Figure 9"
    for model, found in _figures("M", is_valm=False):
        stated = Range(high=1.0) if model == "VLM-S" else Range(1.0, BEST)
        yield Row(source, f"{model}, LLM-M: {BETTER}", "times a GPU", stated, found.gain)
    small = compared("M", "VLM-S")
    faster = small.colocated.step_s / small.own.step_s
    yield Row(source, "VLM-S, LLM-M: iteration over colocated", "times", 1.13, faster)


def _figure_10() -> Iterator[Row]:
    source = "Cornstarch, Figure 10"
    yield from _gains(source, "M", is_valm=True)
    medium = compared("M", "VALM-MM")
    gain = medium.own.over(medium.colocated)
    yield Row(source, "VALM-MM, LLM-M: over colocated", "times a GPU", 1.44, gain, 0.05)


ROWS: Mapping[str, Callable[[], Iterable[Row]]] = {
    "Cornstarch, Figure 9": _figure_9,
    "Cornstarch, Figure 10": _figure_10,
    "Cornstarch, Figure 13": lambda: _gains("Cornstarch, Figure 13", "S", is_valm=False),
    "Cornstarch, Figure 14": lambda: _gains("Cornstarch, Figure 14", "L", is_valm=False),
    "Cornstarch, Figure 15": lambda: _gains("Cornstarch, Figure 15", "SL", is_valm=True),
}
