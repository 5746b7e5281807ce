"""The metrics of a step, over all ranks.

Loads, bounds and bytes follow from the decision, which all ranks have. Only times and memory differ between ranks; one
small all-gather on the host joins them.
"""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from motet.assign.orchestrator import Decision, with_cut_loads
from motet.assign.whole_step import DecidedStep
from motet.balance import Packed, Padded, dist_ratio, score
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.spec import ModelSpec, Module
from motet.core.workload import BACKBONE
from motet.cost.flops import BackwardOf, hfu, mfu
from motet.data.decode import Decoder
from motet.dispatch import RankBatch
from motet.runtime.step import StepResult
from motet.simulate.predict.prediction import Prediction
from motet.train.input.feed import Ahead, StepInput
from motet.train.report.rank_time import RankTime, busiest_bubbles, joined_bubbles
from motet.train.world import World


@dataclass(frozen=True)
class DecodingSoFar:
    """What was loaded for a rank, and by whom.

    ahead:       what waited, loaded, when the step was asked for.
    store_bytes: the most that results of the rank's actors have taken in Ray's object store at once.
    num_workers, num_deaths: of what decodes for the rank: those that do, and those that have died so far.
    """

    ahead: Ahead
    store_bytes: int
    num_workers: int
    num_deaths: int

    @classmethod
    def of(cls, ahead: Ahead, decoder: Decoder) -> DecodingSoFar:
        """The figures of a decoder now. ahead: what was loaded ahead."""
        return cls(ahead, decoder.store_bytes, decoder.num_workers, decoder.num_deaths)

    @property
    def row(self) -> list[float]:
        """As numbers, of which `joined` takes the largest and the sum over ranks."""
        figures = (self.store_bytes, host_bytes(), self.num_workers, self.num_deaths)
        return [-float(self.ahead.steps), float(self.ahead.media_bytes), *map(float, figures)]

    @staticmethod
    def joined(largest: Sequence[float], sums: Sequence[float]) -> dict[str, int]:
        """For the metrics: of the rank that has fewest steps, most bytes; and all workers."""
        return {
            "steps": int(-largest[0]),
            "media_bytes": int(largest[1]),
            "store_bytes": int(largest[2]),
            "host_bytes": int(largest[3]),
            "workers": round(sums[4]),
            "deaths": round(sums[5]),
        }


@dataclass(frozen=True)
class MeasuredStep:
    """What one rank measured in one step.

    wall_s:      seconds from the end of the last step to the end of this one.
    data_wait_s: seconds in which the step waited for its input.
    decide_s:    seconds for deciding the balance, in the prefetch thread.
    core_wait_s: seconds of wall_s in which the step was ready to run and had no core; NaN if the kernel does not count.
    actions:     name -> seconds of an action; all ranks have the same names in the same order.
    recomputed:  module -> the recomputed blocks of each microbatch; all ranks have the same names in the same order.
    time:        in which it computed, and bubbles.
    decoding:    what was loaded for the rank, and by whom.
    lacking_bytes: what a microbatch takes, by prediction, above what the rank may fill; 0 if nothing is predicted.
    """

    wall_s: float
    data_wait_s: float
    decide_s: float
    core_wait_s: float
    actions: Mapping[str, float]
    recomputed: Mapping[str, Sequence[int]]
    time: RankTime
    decoding: DecodingSoFar
    lacking_bytes: float = 0.0


@dataclass(frozen=True)
class StepEnd:
    """The end of a step, on two clocks of this thread. core_wait_s: as the function of that name."""

    time_s: float
    core_wait_s: float

    @staticmethod
    def now() -> StepEnd:
        """The end of a step that ends now."""
        return StepEnd(time.perf_counter(), core_wait_s())


def core_wait_s() -> float:
    """Seconds that the calling thread has been ready to run while other work, such as decoding, had its cores.

    Linux counts them (run delay, in schedstat). NaN on other systems, and on a Linux that was built without.
    """
    try:
        ran_ns, waited_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):
        return math.nan
    return waited_ns / 1e9 if ran_ns else math.nan


def gather_measured(measured: MeasuredStep, world: World, request: int) -> tuple[dict[str, Any], int]:
    """Join the ranks' measurements: (part of the step's metrics, the largest request of any rank). A collective."""
    fixed = [
        float(request),
        measured.wall_s,
        measured.data_wait_s,
        measured.decide_s,
        measured.core_wait_s,
        float(peak_memory_bytes(world.device)),
        measured.lacking_bytes,
        *measured.decoding.row,
    ]
    most = [float(max(blocks)) for blocks in measured.recomputed.values()]
    usual = [sum(blocks) / len(blocks) for blocks in measured.recomputed.values()]
    row = torch.tensor([*fixed, *measured.actions.values(), *most, *usual, *measured.time.row], dtype=torch.float64)
    table = torch.empty(world.num_ranks, len(row), dtype=torch.float64)
    dist.all_gather_single(table.view(-1), row, group=world.control)
    largest, mean = table.max(dim=0).values.tolist(), table.mean(dim=0).tolist()
    actions = {
        name: {"max_s": _rounded(largest[i]), "mean_s": _rounded(mean[i])}
        for i, name in enumerate(measured.actions, start=len(fixed))
    }
    first_most = len(fixed) + len(actions)
    recomputed = {
        name: {"max": int(largest[first_most + i]), "mean": _rounded(mean[first_most + len(most) + i])}
        for i, name in enumerate(measured.recomputed)
    }
    found = joined_bubbles(table[:, -RankTime.num_columns() :].numpy())
    joined = {
        "step_s": _rounded(largest[1]),
        "makespan_s": _rounded(found.step_s),
        "bubbles_s": {kind: _rounded(seconds) for kind, seconds in busiest_bubbles(found).items()},
        "data_wait_s": _rounded(largest[2]),
        "decide_s": _rounded(largest[3]),
        "core_wait_s": _rounded(largest[4]),
        "memory": {
            "peak_bytes": int(largest[5]),
            "kind": memory_kind(world.device),
            "lacking_bytes": math.ceil(largest[6]),
        },
        "ahead": DecodingSoFar.joined(largest[7:], [share * world.num_ranks for share in mean[7:]]),
        "actions": actions,
        "recompute": recomputed,
    }
    return joined, int(largest[0])


def exchange_metrics(actions: Mapping[str, Mapping[str, float]], result: StepResult, fed: StepInput) -> dict[str, Any]:
    """Seconds of the step's exchanges on the slowest rank, and bytes moved in them and in loading its inputs.

    Where bytes moved in messages between stages, seconds are None: a rank that receives one waits for its sender, too.
    """
    found = [seconds["max_s"] for name, seconds in actions.items() if name.startswith("exchange")]
    return {
        "seconds": sum(found) if found or not result.moved_bytes else None,
        "bytes": result.moved_bytes,
        "crossing_bytes": result.crossing_bytes,
        "input_bytes": fed.moved_bytes,
        "input_crossing_bytes": fed.crossing_bytes,
    }


def step_metrics(decided: DecidedStep | None) -> dict[str, Any] | None:
    """Which microbatches examples got, and why; None if it was not compared.

    method:      "stay" as they come, or "defer".
    predicted_s: predicted seconds of the step, by method.
    why:         a sentence.
    """
    if decided is None or not decided.method:
        return None
    return {
        "method": decided.method,
        "predicted_s": {method: _rounded(seconds) for method, seconds in decided.predicted_s.items()},
        "why": decided.why,
    }


def prediction_metrics(prediction: Prediction | None) -> dict[str, Any]:
    """What the simulator says of a step: its seconds, and bubbles on its busiest rank; null where it says nothing."""
    if prediction is None:
        return {"predicted_s": None, "predicted_bubbles_s": None}
    return {
        "predicted_s": _rounded(prediction.step_s),
        "predicted_bubbles_s": {
            kind: _rounded(seconds) for kind, seconds in busiest_bubbles(prediction.bubbles).items()
        },
    }


def balance_metrics(batches: Sequence[RankBatch], step_gained_s: float | None = None) -> dict[str, Any]:
    """How the microbatches of a step were balanced. step_gained_s: as of `cut_metrics`.

    methods:     method -> number of microbatches for which it was chosen.
    predicted_s: method -> predicted seconds, summed over the microbatches for which it was considered.
    why:         method -> a sentence, of the last microbatch for which it was chosen.
    cut:         what was cut; None: nothing.
    """
    decisions = [batch.decision for batch in batches]
    predicted_s: Counter[str] = Counter()
    for decision in decisions:
        predicted_s.update(decision.predicted_s)
    return {
        "methods": dict(Counter(decision.method for decision in decisions)),
        "predicted_s": {method: _rounded(seconds) for method, seconds in predicted_s.items()},
        "why": {decision.method: decision.why for decision in decisions if decision.why},
        "cut": cut_metrics(batches, step_gained_s),
    }


def cut_metrics(batches: Sequence[RankBatch], step_gained_s: float | None = None) -> dict[str, Any] | None:
    """The items of a step that several ranks shared; None if none were.

    step_gained_s: what cuts gain in the step as a whole (`PredictedStep.gained_s`); None: that is not known.

    microbatches: in which some were. sequences, rows: cut ones, and their rows. degrees: ranks -> sequences so shared.
    items: encoder -> of its items, how many were cut (`cut`), their `length`, and `degrees`.
    gained_s: predicted seconds of the fastest way of whole sequences that was considered, less those of cutting, summed
              over those of these microbatches that fit whole; None if none was considered. Under a Plan with stages,
              of the whole step, whether whole sequences fit or not; less than 0 where cutting takes longer.
    by_memory: of these microbatches, those that no rank could hold whole.
    """
    cut = [batch for batch in batches if batch.decision.shares_items]
    if not cut:
        return None
    phases = (BACKBONE, *batches[0].lengths.items)
    degrees: dict[str, Counter[int]] = {phase: Counter() for phase in phases}
    rows, of_microbatches_s = Counter(), []
    for batch in cut:
        for phase in phases:
            if (cuts := batch.decision.cuts_of(phase)) is not None:
                degrees[phase].update(cuts.degrees.values())
                rows[phase] += int(batch.lengths.of(phase).length[cuts.items].sum())
        gained = gained_by_cuts_s(batch.decision)
        of_microbatches_s += [] if gained is None else [gained]
    return {
        "microbatches": len(cut),
        "sequences": degrees[BACKBONE].total(),
        "rows": rows[BACKBONE],
        "degrees": _by_degree(degrees[BACKBONE]),
        "items": {
            phase: {"cut": of.total(), "length": rows[phase], "degrees": _by_degree(of)}
            for phase, of in degrees.items()
            if of and phase != BACKBONE
        },
        "gained_s": _rounded_or_none(sum(of_microbatches_s) if of_microbatches_s else step_gained_s),
        "by_memory": sum(not batch.decision.fits_whole for batch in cut),
    }


def gained_by_cuts_s(decision: Decision) -> float | None:
    """Predicted seconds of the fastest way of whole sequences, less those of cutting; None if they were not compared,
    or if whole ones fit no rank."""
    whole_s = dict(decision.predicted_s)
    cut_s = whole_s.pop("split", None)
    is_compared = whole_s and cut_s is not None and decision.fits_whole
    return min(whole_s.values()) - cut_s if is_compared and cut_s is not None else None


_UNEVEN = "more than an even share of its microbatch"
"""Why a Plan with stages cuts an item."""


def cut_items(batches: Sequence[RankBatch], step_gained_s: float | None = None) -> list[dict[str, Any]]:
    """The items of a step that several ranks shared, one by one. step_gained_s: as of `cut_metrics`.

    microbatch, module, item: where, of what, and its number there (of the backbone: the example). length: its own.
    ranks: how many share it. why: "memory" where no way of whole items fits, else what the decision says; a Plan with
           stages compares no ways, and cuts what is more than an even share.
    gain_s: of all cuts of its microbatch, as of `gained_by_cuts_s`. Under a Plan with stages, of all cuts of the step
            over replicas, as microbatches run at the same time there; None of an item that ranks of one replica share.
    """
    found = []
    for microbatch, batch in enumerate(batches):
        decision = batch.decision
        own_s = gained_by_cuts_s(decision)
        for module in (BACKBONE, *batch.lengths.items) if decision.shares_items else ():
            degrees = {} if (cuts := decision.cuts_of(module)) is None else cuts.degrees
            length = batch.lengths.of(module).length
            gain_s = own_s if own_s is not None or not decision.is_over_all(module) else step_gained_s
            found += [
                {
                    "microbatch": microbatch,
                    "module": module,
                    "item": item,
                    "length": int(length[item]),
                    "ranks": ranks,
                    "why": (decision.why or _UNEVEN) if decision.fits_whole else "memory",
                    "gain_s": _rounded_or_none(gain_s),
                }
                for item, ranks in degrees.items()
            ]
    return found


def _by_degree(degrees: Counter[int]) -> dict[str, int]:
    return {str(degree): count for degree, count in sorted(degrees.items())}


def utilisation_metrics(
    spec: ModelSpec,
    batches: Sequence[RankBatch],
    recomputed: Mapping[str, int],
    step_s: float,
    peak_flops: float,
    *,
    in_stages: bool = False,
) -> dict[str, float]:
    """Shares of the peak, and of operations, over all ranks.

    mfu:        operations that the model needs / peak (cost/flops.py).
    bound_s:    seconds in which all ranks at their peak do the operations that the model needs; no Plan is faster.
    regret:     the step's seconds over bound_s, less 1.
    hfu:        operations that the hardware computes / peak: with recomputation and padding.
    padding:    the share of operations that padding takes, recomputation aside; 0 where all modules are packed.
    recomputed: per module, the number of its recomputed blocks. peak_flops: operations a second of all ranks together.
    in_stages:  backward runs through each microbatch, also through one without items of what learns.
    """
    backward_of: BackwardOf = "all" if in_stages else "microbatch"
    padded_modules = [module.name for module in spec.modules if module.padded]
    computed = [
        (batch.lengths, {name: batch.decision.assignments[name].ranks.astype(np.int64) for name in padded_modules})
        for batch in batches
    ]
    needed = mfu(spec, [batch.lengths for batch in batches], step_s, peak_flops)
    with_padding, packed = (
        hfu(spec, each, step_s, peak_flops, backward_of=backward_of)
        for each in (computed, [(lengths, {}) for lengths, _ in computed])
    )
    return {
        "mfu": needed,
        "bound_s": needed * step_s,
        "regret": 1 / needed - 1 if needed else math.inf,
        "hfu": hfu(spec, computed, step_s, peak_flops, recomputed, backward_of),
        "padding": _rounded(1 - packed / with_padding) if with_padding else 0.0,
    }


def phase_metrics(spec: ModelSpec, batches: Sequence[RankBatch]) -> dict[str, dict[str, Any]]:
    """Phase -> loads of the ranks, and maximum load / lower bound, before and after balancing.

    unit: of loads and bounds.
    Loads, bounds and maxima are sums over microbatches: max = sum of each microbatch's maximum, as ranks wait for each
    other in each.
    pad_ratio:  the share of padding in a rank's microbatch (OmniBal equation 1), the mean over those with items; 0
                where the phase is computed packed, whatever `balance.policy` weighs.
    dist_ratio: the share of a microbatch in which a rank waits for the longest one, by lengths with padding (OmniBal
                equation 2), the mean over microbatches.
    """
    phases: dict[str, dict[str, Any]] = {}
    for phase in batches[0].decision.assignments:
        module = spec.module(phase)
        after = [batch.decision.assignments[phase] for batch in batches]
        before = [batch.decision.before[phase] for batch in batches]
        bound = sum(int(assignment.bound) for assignment in after)
        phases[phase] = {
            "unit": batches[0].decision.costs.unit(phase),
            "max_over_bound": _rounded(_summed_max(after) / bound) if bound else 1.0,
            "max_over_bound_before": _rounded(_summed_max(before) / bound) if bound else 1.0,
            "pad_ratio": _rounded(np.mean([share for batch in batches for share in _padding(module, batch)] or [0.0])),
            "dist_ratio": _rounded(_dist_ratio(module, batches, after)),
            "dist_ratio_before": _rounded(_dist_ratio(module, batches, before)),
            "bound": bound,
            "loads": np.sum([assignment.loads for assignment in after], axis=0).tolist(),
            "loads_before": np.sum([assignment.loads for assignment in before], axis=0).tolist(),
        }
    return phases


def _dist_ratio(module: Module, batches: Sequence[RankBatch], placed: Sequence[Assignment]) -> float:
    return dist_ratio(np.stack([_computed(module, batch, each) for batch, each in zip(batches, placed, strict=True)]))


def _padding(module: Module, batch: RankBatch) -> list[float]:
    """The share of padding on each rank that has items of a module."""
    placed, length = batch.decision.assignments[module.name], batch.lengths.of(module.name).length
    computed = _computed(module, batch, placed)
    needed = np.bincount(placed.ranks, length, placed.num_ranks) if module.padded else computed
    return (1 - needed[computed > 0] / computed[computed > 0]).tolist()


def _computed(module: Module, batch: RankBatch, placed: Assignment) -> Int64Array:
    """The lengths that each rank computes of a module, with padding, int64 [num_ranks]."""
    kind, length = Padded() if module.padded else Packed(), batch.lengths.of(module.name).length
    cuts = batch.decision.cuts_of(module.name)
    if cuts is not None and placed is batch.decision.assignments[module.name]:
        return with_cut_loads(placed, cuts, length).loads
    return score(placed.ranks, length, placed.num_ranks, kind).loads


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far: allocated by PyTorch on a GPU, else the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return host_bytes()


def host_bytes() -> int:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB.


def memory_kind(device: torch.device) -> str:
    """What `peak_memory_bytes` counts, in words."""
    return "allocated on the GPU" if device.type == "cuda" else "resident"


def _summed_max(assignments: Sequence[Assignment]) -> int:
    return sum(int(assignment.loads.max()) for assignment in assignments)


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else _rounded(value)


def _rounded(value: float) -> float:
    """A measurement rounded to six significant digits, for short lines."""
    return float(f"{value:.6g}")
