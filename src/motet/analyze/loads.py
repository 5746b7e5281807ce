"""What a step's phases would cost on each rank: unbalanced, and balanced in each of the ways that the trainer knows.

Batches are drawn from the lengths with a fixed seed and placed as the trainer's orchestrator places them: unbalanced,
an example and its media are computed on its home rank; with the backbone balanced, media go where their example goes;
jointly, so they do, but whole examples are placed to balance all phases; with every phase balanced, each encoder's
items are placed by themselves, and of those that pack only the excess leaves the rank of its example. What an item
costs is said by `StepCosts`: a recipe's, as training has them, or else lengths, of which audio encoders pad theirs.
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

Mode = Literal["off", "backbone", "joint", "all"]
MODES: tuple[Mode, ...] = ("off", "backbone", "joint", "all")
MODE_NAMES: dict[Mode, str] = {
    "off": "unbalanced",
    "backbone": "backbone only",
    "joint": "joint (whole examples)",
    "all": "every phase",
}
Mix = Literal["rows", "even"]

CHOSEN = "chosen"
PREDICTED = {
    "unbalanced": MODE_NAMES["off"],
    "joint": MODE_NAMES["joint"],
    "per_phase": MODE_NAMES["all"],
    CHOSEN: "as chosen",
}
"""Ways whose seconds are predicted, and what they are called."""

_SPEED = ASSUMED_SPEEDS["cuda"]
# Backward takes twice as long as forward.
_UNIT_S = {name: 3e6 * mflop / _SPEED.flops_per_s for name, mflop in zip(PHASES, MFLOP_PER_LENGTH, strict=True)}
LENGTH_COSTS = StepCosts(
    {BACKBONE: Packed(), IMAGE: Packed(), AUDIO: Padded()},
    LengthWork(LENGTH_UNITS),
    StepTimes(lambda _: _UNIT_S, _SPEED.link, token_bytes=2 * 3584),
)
"""Where no model is known: lengths, and seconds by `SPEED_ASSUMPTION`."""
SPEED_ASSUMPTION = (
    "Seconds: a backbone of 7 B, an image encoder of 2 B and an audio encoder of 0.6 B parameters, all trained, at "
    f"{_SPEED.flops_per_s / 1e12:.0f} TFLOP/s a rank; outputs of 3,584 bf16 values a token at "
    f"{_SPEED.link.bytes_per_s / 1e9:.0f} GB/s a rank and {_SPEED.link.latency_s * 1e6:.0f} microseconds an exchange."
)


@dataclass(frozen=True, eq=False)
class PhaseLoads:
    """Loads of one phase over the drawn batches, by mode.

    unit:    what loads are counted in. padded: whether a rank's load is its number of items times the largest.
    loads:   int64 [num_batches, num_ranks].
    crossed: float64 [num_batches], the share of the phase's output tokens that another rank computes than the one that
             runs their sequence; 0 for the backbone.
    bounds:  int64 [num_batches], below which no placement of whole items can bring the maximum load; 0 where the phase
             has nothing to do in a batch.
    """

    unit: str
    padded: bool
    loads: dict[Mode, Int64Array]
    crossed: dict[Mode, Float64Array]
    bounds: Int64Array

    def max_over_mean(self, mode: Mode) -> Float64Array:
        """Per batch with such items, float64 [n]: 1 is perfect; at 2, ranks wait for half of the phase on average."""
        loads = self.loads[mode][self.bounds > 0]
        ratios: Float64Array = loads.max(axis=1) / loads.mean(axis=1)
        return ratios

    def max_over_bound(self, mode: Mode) -> Float64Array:
        """Per batch with such items, float64 [n]: how much longer the phase takes than it would at its bound."""
        busy = self.bounds > 0
        ratios: Float64Array = self.loads[mode][busy].max(axis=1) / self.bounds[busy]
        return ratios


@dataclass(frozen=True, eq=False)
class PredictedSteps:
    """What `motet.balance.choose` predicts for the drawn batches, and what it would choose.

    seconds, exchange_s: float64 [num_batches] for each of `PREDICTED`; of the seconds, what moving outputs takes.
    methods:             in how many batches each method is the fastest.
    why:                 a sentence on the last batch for which the most frequent one is.
    """

    seconds: dict[str, Float64Array]
    exchange_s: dict[str, Float64Array]
    methods: dict[str, int]
    why: str

    @staticmethod
    def of(choices: list[Choice]) -> PredictedSteps:
        """One entry of each array a choice, in their order."""

        def by_way(of_choices: list[dict[str, float]]) -> dict[str, Float64Array]:
            chosen = [told | {CHOSEN: told[choice.method]} for told, choice in zip(of_choices, choices, strict=True)]
            return {way: np.array([told[way] for told in chosen]) for way in PREDICTED}

        methods = Counter(choice.method for choice in choices)
        most = max(methods, key=lambda method: methods[method])
        return PredictedSteps(
            by_way([choice.predicted_s for choice in choices]),
            by_way([choice.exchange_s for choice in choices]),
            dict(methods),
            next(choice.why for choice in reversed(choices) if choice.method == most),
        )


def sample_loads(
    lengths: Lengths, costs: StepCosts, *, num_ranks: int, batch_size: int, num_batches: int, seed: int, mix: Mix
) -> tuple[dict[str, PhaseLoads], PredictedSteps]:
    """Loads of each phase that occurs in the batches, backbone first, and what is predicted for a step."""
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
                if mode == "all":
                    bounds[name].append(int(assignment.bound))
    found = {
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
    return found, PredictedSteps.of(choices)


def place(batch: BatchLengths, phases: Sequence[Phase], num_ranks: int, mode: Mode) -> dict[str, Assignment]:
    """The placement of each phase of a batch in one mode. phases: the backbone first."""
    backbone, *encoders = phases
    if mode == "joint":
        assigned = choose(phases, num_ranks, _SPEED.link, methods=["joint"]).assignments
        return {phase.name: own for phase, own in zip(phases, assigned, strict=True)}
    if mode == "off":
        of_backbone = scored_phase(backbone, batch.home, num_ranks)
    else:
        of_backbone = assign(backbone.lengths, num_ranks, backbone.cost)
    placed = {backbone.name: of_backbone}
    for phase in encoders:
        if mode == "all":
            placed[phase.name] = assign_apart(phase.lengths, phase.cost, phase.owner, of_backbone)
        else:
            placed[phase.name] = follow(phase, of_backbone)
    return placed


def _crossed(batch: BatchLengths, phase: str, placed: Assignment, backbone: Assignment) -> float:
    if phase == BACKBONE:
        return 0.0
    items = batch.items[phase]
    away = placed.ranks != backbone.ranks[items.example]
    return float(items.num_tokens[away].sum() / max(int(items.num_tokens.sum()), 1))


def take(batch: BatchLengths, examples: Int64Array, num_ranks: int) -> BatchLengths:
    """Some examples, in the order given; int64 [n], repeats allowed; at home in equal consecutive shares."""
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
