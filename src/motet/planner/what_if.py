"""What would change if products were in bf16, if replicas shared long sequences, if the devices had more memory, if
there were one node more, or if batches were larger.

Each change of the job is planned anew, by the strategy of the best Plan alone and with its TP, so that a gain is at
least what is said. The best Plan itself counts as an answer: more memory and a further node take nothing away. Shared
sequences are those of the best Plan's own replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from motet.core.errors import UserError
from motet.core.words import counted_words, size_words
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.planner.candidate import Candidate, Strategy, prediction_that_fits
from motet.planner.evaluation import NO_QUOTA, Quota
from motet.planner.job import Job
from motet.planner.search import search
from motet.planner.search_result import SearchResult, SimulatedCandidate
from motet.schedule import check_fit

MAX_RANKS, MAX_EXAMPLES = 64, 1024
"""Jobs of more ranks, or of more examples a step, take seconds to plan: they are planned anew only where that is asked
for."""
_MEMORY, _BATCH = 2, 2
"""The factors by which memory and batches grow."""
_MAX_SIMULATED = 3
_LEAST_GAIN = 0.005
"""A smaller gain is none."""


class Change(NamedTuple):
    """A change of a job. what: in words. gain: by which share more tokens a second are trained, at least.

    plan: the degrees by which they are, and what they take; "" for those of the best Plan.
    """

    what: str
    gain: float
    plan: str = ""

    def __str__(self) -> str:
        if self.gain < _LEAST_GAIN:
            return f"{self.what}: no gain was found."
        return f"{self.what}: at least {self.gain:.1%} more tokens a second{f', by {self.plan}' if self.plan else ''}."


def is_quick(job: Job) -> bool:
    """Whether changes of a job are planned anew without being asked for."""
    return job.cluster.num_ranks <= MAX_RANKS and job.batch_size <= MAX_EXAMPLES


def what_if(result: SearchResult, strategies: Mapping[str, Strategy], quota: Quota = NO_QUOTA) -> Iterator[Change]:
    """The changes of a job that was planned, each by itself; without those that no cluster can have or that are too
    large to simulate. strategies, quota: as in `search`.
    """
    with suppress(UserError):
        yield from _shared_sequences(result, quota)
    for changes in (_precision, _memory, _node, _batches):
        with suppress(UserError):
            yield from changes(result, lambda job: _planned(job, result, strategies, quota))


_Plans = Callable[[Job], SimulatedCandidate | None]
"""Plans a changed job; None: there is no Plan."""


def _precision(result: SearchResult, planned: _Plans) -> Iterator[Change]:
    """A job in fp32 in bf16; nothing where its seconds were measured, as they were in one type."""
    job, peaks = result.job, result.job.cluster.device.peak_flops
    if job.precision != "fp32" or not isinstance(job.cost, Analytic) or peaks.get("bf16", 0.0) <= peaks["fp32"]:
        return
    cost = Analytic(job.cluster, "bf16", job.cost.efficiency, job.cost.moments)
    words = 'In bf16 instead of fp32 (fsdp.param_dtype = "bfloat16", reduce_dtype = "float32")'
    yield _change(words, result.best, planned(replace(job, precision=cost.precision, cost=cost)), "")


def _memory(result: SearchResult, planned: _Plans) -> Iterator[Change]:
    cluster, device = result.job.cluster, result.job.cluster.device
    memory = replace(device, memory_bytes=_MEMORY * device.memory_bytes)
    answer = planned(result.job.on(replace(cluster, device=memory)))
    words = f"With {_MEMORY} times the memory, {memory.memory_bytes / 1e9:,.4g} GB a device"
    held = "" if answer is None else f", which fill {size_words(answer.prediction.peak_bytes.max())} of it"
    yield _change(words, result.best, answer, held)


def _node(result: SearchResult, planned: _Plans) -> Iterator[Change]:
    job, cluster = result.job, result.job.cluster
    more = replace(cluster, num_nodes=cluster.num_nodes + 1)
    answer = planned(job.on(more))
    nodes = f"With {counted_words(more.num_nodes, 'node')} instead of {cluster.num_nodes:,}"
    change = _change(f"{nodes} and the same batch", result.best, answer, "")
    yield change
    if change.gain < _LEAST_GAIN:
        # The batch may not divide among the ranks: one that has as many examples for each rank does.
        size = -(-job.batch_size * more.num_nodes // cluster.num_nodes)
        answer = planned(replace(job.on(more), batch_size=size))
        yield _change(f"{nodes} and batches of {size:,}", result.best, answer, "")


def _batches(result: SearchResult, planned: _Plans) -> Iterator[Change]:
    job = result.job
    batches = replace(job, batch_size=_BATCH * job.batch_size)
    words = f"With batches of {counted_words(batches.batch_size, 'example')} instead of {job.batch_size:,}"
    yield _change(words, result.best, planned(batches), "")


def _shared_sequences(result: SearchResult, quota: Quota) -> Iterator[Change]:
    """The best Plan with sequences, and items, cut over its replicas; nothing where none is too long for one."""
    job, best = result.job, result.best
    plan = replace(best.candidate.plan, balance="split")
    if result.pins.balance is not None or (quota.num_plans and not quota.suitable(plan)):
        return
    check_fit(plan)
    cut = [name for name, items in job.assignment(plan).modules.items() if items.cuts is not None]
    if cut:
        answer = _as_it_is(job, replace(best.candidate, plan=plan))
        what = "sequences" if BACKBONE in cut else "items"
        yield _change(f"With {what} cut over replicas (--pin balance=split)", best, answer, "")


def _change(words: str, best: SimulatedCandidate, answer: SimulatedCandidate | None, note: str) -> Change:
    if answer is None:
        return Change(words, 0.0)
    gain = answer.prediction.tokens_per_s / best.prediction.tokens_per_s - 1
    is_other = answer.candidate.what != best.candidate.what
    by = answer.candidate.what if is_other else "the same degrees" if note else ""
    return Change(words, gain, f"{by}{note}")


def _planned(
    job: Job, result: SearchResult, strategies: Mapping[str, Strategy], quota: Quota
) -> SimulatedCandidate | None:
    """The fastest Plan found for a changed job, by tokens a second; None if there is none."""
    best, pins, precision = result.best.candidate, result.pins, result.job.precision
    # What trains does not hang on the precision, in which a Plan and its recipe agree.
    suits = replace(quota, suitable=lambda plan: quota.suitable(replace(plan, precision=precision)))
    found = [one for one in (_as_it_is(job, best),) if one is not None]
    tp = best.plan.unit_of(BACKBONE).tp
    pins = replace(pins, strategies=(best.strategy,), tp=tp)
    try:
        search_of_one = {best.strategy: strategies[best.strategy]}
        anew = search(job, search_of_one, pins, max_simulated=_MAX_SIMULATED, quota=suits)
        found += [one for one in anew.results if not quota.num_plans or suits.suitable(one.candidate.plan)]
    except UserError:  # No Plan of the changed job is as pinned.
        pass
    return max(found, key=lambda one: one.prediction.tokens_per_s, default=None)


def _as_it_is(job: Job, best: Candidate) -> SimulatedCandidate | None:
    """The best Plan in the changed job; None if it cannot be, as its fills and caps name microbatches."""
    plan = replace(best.plan, cluster=job.cluster, batch_size=job.batch_size, precision=job.precision)
    if job.batch_size != best.plan.batch_size and (plan.fills or plan.microbatch_caps):
        return None
    candidate = replace(best, plan=plan)
    prediction = prediction_that_fits(job, candidate)
    return None if prediction is None else SimulatedCandidate(candidate, prediction)
