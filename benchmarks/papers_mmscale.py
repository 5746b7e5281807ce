"""MMScale, Figures 18, 19, 20 and 22 and Tables 2 and 3. Used by papers.py.

Figures are bars; the numbers are those that the text says of them. Jobs are those of planner_mmscale.py: catalogue's
A800, no efficiency fitted, 96 GPUs for the paper's 98 in section 7.2.

Figure 18: the planner's disaggregated Plan in the order given and in that of sections 5.1 and 5.2, on the recipe's
           lengths, 1 to 7 images a sequence; benchmarks/order.py has real ones.
Figure 20: all frozen, or all but one module; projectors are trained. Megatron-LM as in Figure 17. Throughput a GPU.
Figure 22: the passes of one stage of the backbone with its tensor-parallel communication, over those without: what
           there would be to gain if all of it were hidden.
Table 2:   processor time of the allocation of ranks; the tables that it chooses from are priced before.
Table 3:   processor time of the order of a step, both reorderings together; as many replicas of all units.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from planner_mmscale import BACKBONES, PP, SMALL, allocated, job_with
from published import Absent, Range, Row
from trials import Subject

from motet.assign.plan import assign_step
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.cost.model import backward_seconds
from motet.planner.candidate import Candidate, Pins
from motet.planner.disaggregated.allocate import allocate, rigid
from motet.planner.disaggregated.propose import fastest_allocated, options, propose_disaggregated
from motet.planner.job import Job
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.step_seconds import PricedSteps

ONE_SEQUENCE = Pins(strategies=("disaggregated",), microbatch_size=1, schedule="1f1b")
FROZEN = {
    "all frozen": (),
    "encoder trained": ("image",),
    "LLM trained": (BACKBONE,),
    "generator trained": ("generated",),
}
NUM_NODES = 12


def _figure_18() -> Iterator[Row]:
    source, stated = "MMScale, Figure 18", Range(1.03, 1.11)
    gains = []
    for name, batch_size in SMALL.items():
        job = job_with(name, NUM_NODES, batch_size)
        plan = _proposed(job, ONE_SEQUENCE)
        given, ordered = (_step_s(job, replace(plan, order=order)) for order in ("given", "both"))
        gains.append(given / ordered)
        yield Row(source, f"{name}: ordered over given", "times", stated, gains[-1])
    smaller, _, larger = gains
    yield Row(source, "gain of MLLM-9B over that of MLLM-72B", "", Range(low=1.0), smaller / larger)


def _proposed(job: Job, pins: Pins) -> Plan:
    found = [one for one in propose_disaggregated(job, pins) if isinstance(one, Candidate)]
    return min(found, key=lambda one: one.estimate_s).plan


def _step_s(job: Job, plan: Plan) -> float:
    return predict_assigned(plan, job.planned(plan), job.assignment(plan), job.cost).step_s


def _figure_20() -> Iterator[Row]:
    stated = Range(1.2, 2.9)
    for name, batch_size in SMALL.items():
        for setting, trained in FROZEN.items():
            subject = Subject(job_with(name, NUM_NODES, batch_size, _training(trained)))
            own = subject.searched(ONE_SEQUENCE)
            megatron = allocated(subject, rigid, Pins(tp=8, pp=PP[name], microbatch_size=1))
            what = f"{name}, {setting}: over Megatron-LM"
            yield Row("MMScale, Figure 20", what, "times a GPU", stated, own.times(megatron), note=own.what)


def _training(trained: tuple[str, ...]) -> dict[str, Any]:
    """What a recipe's model says if these modules alone are trained, and all projectors."""
    return {
        "backbone": {"train": BACKBONE in trained},
        "encoders": {"image": {"train": "image" in trained}},
        "generators": {"generated": {"train": "generated" in trained}},
    }


def _figure_22() -> Iterator[Row]:
    stated = {4: Range(1.1, 1.17), 8: Range(1.15, 1.17)}
    for tp, published in stated.items():
        for name in BACKBONES:
            hidden = _exposed(job_with(name, NUM_NODES, SMALL[name]), tp)
            what = f"{name}, TP {tp}: with communication over without"
            yield Row("MMScale, Figure 22", what, "times", published, hidden, 0.02 if tp == 4 else None)


def _exposed(job: Job, tp: int) -> float:
    """Seconds of all transformer layers of the backbone, forward and backward, with communication over without."""
    computed_s = tensor_s = 0.0
    for layer in job.model.module(BACKBONE).layers:
        if layer.attention is None:
            continue
        work = job.work(BACKBONE, layer, 1)
        seconds = job.cost.layer_seconds(BACKBONE, layer, work, tp)
        computed_s += float(np.mean(seconds.forward_s + backward_seconds(seconds, layer, True)))
        tensor_s += 2 * float(np.mean(job.cost.tensor_seconds(layer, work, range(tp))))
    return (computed_s + tensor_s) / computed_s


def _table_2() -> Iterator[Row]:
    source = "MMScale, Table 2"
    for num_gpus, batch_size, published_ms in ((1296, 1920, 922), (648, 960, 641), (324, 480, 441), (112, 240, 133)):
        job = job_with("MLLM-72B", num_gpus // 8 + num_gpus % 8 // 4, batch_size)
        pins = Pins(microbatch_size=1)
        began_s = time.process_time()
        units = options(job, pins)
        priced_s = time.process_time()
        fastest_allocated(job, pins, units, allocate)
        note = f"{1e3 * (priced_s - began_s):.0f} ms more for its tables"
        taken_ms = 1e3 * (time.process_time() - priced_s)
        yield Row(
            source, f"{num_gpus:,} GPUs, batch {batch_size:,}", "ms", Range(high=published_ms), taken_ms, note=note
        )


def _table_3() -> Iterator[Row]:
    published_ms = {30: 1.82 + 5.87, 60: 1.87 + 3.02, 120: 1.89 + 1.71}
    job = job_with("MLLM-72B", 162, 1920)
    for dp, stated_ms in published_ms.items():
        alike = {name: ModuleDegrees(dp=dp) for name in ("image", "generated")}
        pins = Pins(tp=4 if dp > 60 else 8, dp=dp, microbatch_size=1, modules=alike)
        plan = replace(_proposed(job, pins), order="both")
        steps, taken_s = PricedSteps(plan, job.cost), []
        for number in range(9):
            batch = job.drawn(number)
            began_s = time.process_time()
            assign_step(plan, batch, seconds=steps)
            taken_s.append(time.process_time() - began_s)
        taken_ms = 1e3 * statistics.median(taken_s[1:])
        yield Row("MMScale, Table 3", f"DP {dp}: both", "ms", Range(high=stated_ms), taken_ms)


TABLES: Mapping[str, Callable[[], Iterable[Row]]] = {"MMScale, Figure 22": _figure_22}
PLANNED: Mapping[str, Callable[[], Iterable[Row]]] = {
    "MMScale, Figure 18": _figure_18,
    "MMScale, Figure 20": _figure_20,
}
MEASURED: Mapping[str, Callable[[], Iterable[Row]]] = {
    "MMScale, Table 2": _table_2,
    "MMScale, Table 3": _table_3,
}
"""Processor time of this machine."""
ABSENT = (
    Absent("MMScale, Figure 3", "needs GPUs: bars of forward seconds on A800, without numbers."),
    Absent("MMScale, Figures 15 to 17, 19, 21", "benchmarks/mmscale.py has rows of these, and all others of MMScale."),
)
