"""The load of each rank in each phase, unbalanced and balanced in each mode that training has.

Batches are drawn from the lengths with a fixed seed. Their items are placed as the trainer's orchestrator places them:

off       an example and its media are computed on the example's home rank
backbone  examples are placed to balance the backbone; media follow their example
joint     examples are placed to balance all phases; media follow their example
all       every phase is balanced by itself; in a packed phase, only the excess leaves the rank of its example

`StepCosts` states the cost of an item: training's costs for a recipe, else lengths, padded for audio encoders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from motet.analyze.lengths import LENGTH_UNITS, Lengths
from motet.analyze.mixture import MFLOP_PER_LENGTH, PHASES
from motet.balance import (
    ASSUMED_SPEEDS,
    Choice,
    LengthWork,
    Packed,
    Padded,
    Phase,
    StepCosts,
    StepTimes,
    assign,
    assign_apart,
    choose,
    follow,
)
from motet.balance.phases import scored_phase
from motet.core.arrays import Float64Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.workload import BACKBONE, BatchLengths, home_ranks
from motet.data.media import AUDIO, IMAGE

Mode = Literal["off", "backbone", "joint", "per_phase"]
MODES: tuple[Mode, ...] = ("off", "backbone", "joint", "per_phase")
MODE_NAMES: dict[Mode, str] = {
    "off": "unbalanced",
    "backbone": "backbone only",
    "joint": "joint (whole examples)",
    "per_phase": "every phase",
}
Mix = Literal["rows", "even"]

CHOSEN = "chosen"
PREDICTED = {
    "unbalanced": MODE_NAMES["off"],
    "joint": MODE_NAMES["joint"],
    "per_phase": MODE_NAMES["per_phase"],
    CHOSEN: "as chosen",
}
"""The methods whose seconds are predicted, and their titles."""

_SPEED = ASSUMED_SPEEDS["cuda"]
# 3e6: operations of forward and backward from forward MFLOPs; backward takes twice as many as forward.
_UNIT_S = {name: 3e6 * mflop / _SPEED.flops_per_s for name, mflop in zip(PHASES, MFLOP_PER_LENGTH, strict=True)}
LENGTH_COSTS = StepCosts(
    {BACKBONE: Packed(), IMAGE: Packed(), AUDIO: Padded()},
    LengthWork(LENGTH_UNITS),
    StepTimes(lambda _: _UNIT_S, _SPEED.link, token_bytes=2 * 3584),
)
"""The costs if no model is known: lengths, and seconds by `SPEED_ASSUMPTION`."""
SPEED_ASSUMPTION = (
    "Seconds: a backbone of 7 B, an image encoder of 2 B and an audio encoder of 0.6 B parameters, all trained, at "
    f"{_SPEED.flops_per_s / 1e12:.0f} TFLOP/s a rank; outputs of 3,584 bf16 values a token at "
    f"{_SPEED.link.bytes_per_s / 1e9:.0f} GB/s a rank and {_SPEED.link.latency_s * 1e6:.0f} microseconds an exchange."
)


@dataclass(frozen=True, eq=False)
class PhaseLoads:
    """The loads of one phase over the drawn batches, by mode.

    unit:    the unit of loads.
    padded:  whether a rank's load is its number of items times the largest item.
    loads:   per mode, int64 [num_batches, num_ranks].
    crossed: per mode, float64 [num_batches], the share of the phase's output tokens that are not computed on the rank
             of their sequence; 0 for the backbone.
    bounds:  int64 [num_batches], a lower bound of the maximum load over all placements of whole items; 0 for a batch
             without items of the phase.

    Example:
        >>> loads = {"off": np.array([[6, 2]]), "per_phase": np.array([[4, 4]])}
        >>> crossing = {"off": np.zeros(1), "per_phase": np.ones(1)}
        >>> image = PhaseLoads("patches", False, loads, crossing, bounds=np.array([4]))
        >>> image.max_over_mean("off").tolist(), image.max_over_bound("per_phase").tolist()
        ([1.5], [1.0])
    """

    unit: str
    padded: bool
    loads: dict[Mode, Int64Array]
    crossed: dict[Mode, Float64Array]
    bounds: Int64Array

    def max_over_mean(self, mode: Mode) -> Float64Array:
        """Maximum / mean load of each batch that has items, float64 [n]. At 2, ranks wait half of the time."""
        loads = self.loads[mode][self.bounds > 0]
        ratios: Float64Array = loads.max(axis=1) / loads.mean(axis=1)
        return ratios

    def max_over_bound(self, mode: Mode) -> Float64Array:
        """Maximum load / bound of each batch that has items, float64 [n]."""
        busy = self.bounds > 0
        ratios: Float64Array = self.loads[mode][busy].max(axis=1) / self.bounds[busy]
        return ratios

    def crossing(self, mode: Mode) -> Float64Array:
        """The entries of `crossed` of each batch that has items, float64 [n]."""
        shares: Float64Array = self.crossed[mode][self.bounds > 0]
        return shares


@dataclass(frozen=True, eq=False)
class PredictedSteps:
    """The predictions and choices of `motet.balance.choose` for the drawn batches.

    seconds:    for each key of `PREDICTED`, float64 [num_batches], the seconds of the batch.
    exchange_s: for each key of `PREDICTED`, float64 [num_batches], the part of `seconds` that moves outputs.
    methods:    per method, the number of batches in which it was chosen.
    why:        the reason for the most frequent method in the last batch that chose it.
    """

    seconds: dict[str, Float64Array]
    exchange_s: dict[str, Float64Array]
    methods: dict[str, int]
    why: str

    @staticmethod
    def of(choices: list[Choice]) -> PredictedSteps:
        """One entry of each array a choice, in their order."""

        def by_method(of_choices: list[dict[str, float]]) -> dict[str, Float64Array]:
            rows = [
                seconds | {CHOSEN: seconds[choice.method]} for seconds, choice in zip(of_choices, choices, strict=True)
            ]
            return {method: np.array([row[method] for row in rows]) for method in PREDICTED}

        methods = Counter(choice.method for choice in choices)
        most_frequent = max(methods, key=lambda method: methods[method])
        return PredictedSteps(
            by_method([choice.predicted_s for choice in choices]),
            by_method([choice.exchange_s for choice in choices]),
            dict(methods),
            next(choice.why for choice in reversed(choices) if choice.method == most_frequent),
        )


def sample_loads(
    lengths: Lengths, costs: StepCosts, *, num_ranks: int, batch_size: int, num_batches: int, seed: int, mix: Mix
) -> tuple[dict[str, PhaseLoads], PredictedSteps]:
    """Draw batches; return the loads of each phase that occurs in them, backbone first, and the predicted steps."""
    names = (BACKBONE, *lengths.phases)
    loads: dict[str, dict[Mode, list[Int64Array]]] = {name: {mode: [] for mode in MODES} for name in names}
    crossed: dict[str, dict[Mode, list[float]]] = {name: {mode: [] for mode in MODES} for name in names}
    bounds: dict[str, list[int]] = {name: [] for name in names}
    choices = []
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        batch = take(lengths.batch, _draw(lengths, batch_size, rng, mix), num_ranks)
        phases = [phase for phase in costs.phases(batch) if phase.name in names]
        choices.append(choose(phases, num_ranks, costs.times.link, home=batch.home))
        for mode in MODES:
            placed = place(batch, phases, num_ranks, mode)
            for name, assignment in placed.items():
                loads[name][mode].append(assignment.loads)
                crossed[name][mode].append(_crossed(batch, name, assignment, placed[BACKBONE]))
                if mode == "per_phase":
                    bounds[name].append(int(assignment.bound))
    phase_loads = {
        name: PhaseLoads(
            costs.unit(name),
            isinstance(costs.costs[name], Padded),
            {mode: np.stack(rows) for mode, rows in loads[name].items()},
            {mode: np.array(shares) for mode, shares in crossed[name].items()},
            np.array(bounds[name]),
        )
        for name in names
        if any(bounds[name])
    }
    return phase_loads, PredictedSteps.of(choices)


def place(batch: BatchLengths, phases: Sequence[Phase], num_ranks: int, mode: Mode) -> dict[str, Assignment]:
    """The placement of each phase of a batch in one mode. phases: the backbone first."""
    backbone, *encoders = phases
    if mode == "joint":
        joint = choose(phases, num_ranks, _SPEED.link, methods=["joint"]).assignments
        return {phase.name: assignment for phase, assignment in zip(phases, joint, strict=True)}
    if mode == "off":
        sequences = scored_phase(backbone, batch.home, num_ranks)
    else:
        sequences = assign(backbone.lengths, num_ranks, backbone.cost)
    placed = {backbone.name: sequences}
    for phase in encoders:
        if mode == "per_phase":
            placed[phase.name] = assign_apart(phase.lengths, phase.cost, phase.owner, sequences)
        else:
            placed[phase.name] = follow(phase, sequences)
    return placed


def _crossed(batch: BatchLengths, phase: str, placed: Assignment, backbone: Assignment) -> float:
    """The share of a phase's output tokens that are not computed on the rank of their sequence."""
    if phase == BACKBONE:
        return 0.0
    items = batch.items[phase]
    crosses = placed.ranks != backbone.ranks[items.example]
    return float(items.num_tokens[crosses].sum() / max(int(items.num_tokens.sum()), 1))


def take(batch: BatchLengths, examples: Int64Array, num_ranks: int) -> BatchLengths:
    """The given examples, int64 [n], in this order, repeats allowed. Their homes are equal consecutive shares."""
    return replace(batch.take(examples), home=home_ranks(len(examples), num_ranks))


def _draw(lengths: Lengths, batch_size: int, rng: np.random.Generator, mix: Mix) -> Int64Array:
    if mix == "rows":
        return rng.integers(0, lengths.batch.num_examples, batch_size)
    kinds = lengths.kinds()
    present = np.unique(kinds)
    chosen = rng.choice(present, batch_size)
    drawn = np.zeros(batch_size, dtype=np.int64)
    for kind in present:
        drawn[chosen == kind] = rng.choice(np.flatnonzero(kinds == kind), int((chosen == kind).sum()))
    return drawn
