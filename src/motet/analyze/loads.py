"""What a step's phases would cost on each rank: unbalanced, and balanced in each of the ways that the trainer knows.

Batches are drawn from the lengths with a fixed seed and placed as the trainer's orchestrator places them: unbalanced,
an example and its media are computed on its home rank; with the backbone balanced, media go where their example goes;
jointly, so they do, but whole examples are placed to balance all phases; with every phase balanced, each encoder's
items are placed by themselves, and of those that pack only the excess leaves the rank of its example. Backbone and
image encoders pack (cost: the sum of lengths), audio encoders pad (cost: clips times the longest).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.analyze.lengths import Lengths
from motet.analyze.mixture import MFLOP_PER_LENGTH, PHASES
from motet.balance import Choice, Cost, Link, Packed, Padded, Phase, assign, assign_apart, choose, score
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
COSTS: dict[str, Cost] = {BACKBONE: Packed(), IMAGE: Packed(), AUDIO: Padded()}
Mix = Literal["rows", "even"]

CHOSEN = "chosen"
PREDICTED = {
    "unbalanced": MODE_NAMES["off"],
    "joint": MODE_NAMES["joint"],
    "per_phase": MODE_NAMES["all"],
    CHOSEN: "as chosen",
}
"""Ways whose seconds are predicted, and what they are called."""

_FLOPS_PER_S = 400e12
_LINK = Link(bytes_per_s=40e9, latency_s=50e-6)
_BYTES_A_TOKEN = 2 * 3584
SPEED_ASSUMPTION = (
    "Seconds: a backbone of 7 B, an image encoder of 2 B and an audio encoder of 0.6 B parameters, all trained, at "
    f"{_FLOPS_PER_S / 1e12:.0f} TFLOP/s a rank; outputs of 3,584 bf16 values a token at {_LINK.bytes_per_s / 1e9:.0f} "
    f"GB/s a rank and {_LINK.latency_s * 1e6:.0f} microseconds an exchange."
)


@dataclass(frozen=True, eq=False)
class PhaseLoads:
    """Loads of one phase over the drawn batches, by mode.

    loads:   int64 [num_batches, num_ranks].
    crossed: float64 [num_batches], the share of the phase's output tokens that another rank computes than the one that
             runs their sequence; 0 for the backbone.
    bounds:  int64 [num_batches], below which no placement of whole items can bring the maximum load; 0 where the phase
             has nothing to do in a batch.
    """

    loads: dict[Mode, NDArray[np.int64]]
    crossed: dict[Mode, NDArray[np.float64]]
    bounds: NDArray[np.int64]

    def max_over_mean(self, mode: Mode) -> NDArray[np.float64]:
        """Per batch with such items, float64 [n]: 1 is perfect; at 2, ranks wait for half of the phase on average."""
        loads = self.loads[mode][self.bounds > 0]
        ratios: NDArray[np.float64] = loads.max(axis=1) / loads.mean(axis=1)
        return ratios

    def max_over_bound(self, mode: Mode) -> NDArray[np.float64]:
        """Per batch with such items, float64 [n]: how much longer the phase takes than it would at its bound."""
        busy = self.bounds > 0
        ratios: NDArray[np.float64] = self.loads[mode][busy].max(axis=1) / self.bounds[busy]
        return ratios


@dataclass(frozen=True, eq=False)
class PredictedSteps:
    """What `motet.balance.choose` predicts for the drawn batches, and what it would choose.

    seconds, exchange_s: float64 [num_batches] for each of `PREDICTED`; of the seconds, what moving outputs takes.
    methods:             in how many batches each method is the fastest.
    why:                 a sentence on the last batch for which the most frequent one is.
    """

    seconds: dict[str, NDArray[np.float64]]
    exchange_s: dict[str, NDArray[np.float64]]
    methods: dict[str, int]
    why: str

    @staticmethod
    def of(choices: list[Choice]) -> PredictedSteps:
        """One entry of each array a choice, in their order."""

        def by_way(of_choices: list[dict[str, float]]) -> dict[str, NDArray[np.float64]]:
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
    lengths: Lengths, *, num_ranks: int, batch_size: int, num_batches: int, seed: int, mix: Mix
) -> tuple[dict[str, PhaseLoads], PredictedSteps]:
    """Loads of each phase that occurs in the batches, backbone first, and what is predicted for a step."""
    phases = (BACKBONE, *lengths.phases)
    loads: dict[str, dict[Mode, list[NDArray[np.int64]]]] = {phase: {mode: [] for mode in MODES} for phase in phases}
    crossed: dict[str, dict[Mode, list[float]]] = {phase: {mode: [] for mode in MODES} for phase in phases}
    bounds: dict[str, list[int]] = {phase: [] for phase in phases}
    choices = []
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        batch = take(lengths.batch, _draw(lengths, batch_size, rng, mix), num_ranks)
        choices.append(choose(timed_phases(batch, phases), num_ranks, _LINK, home=batch.home))
        for mode in MODES:
            placed = place(batch, phases, num_ranks, mode)
            for phase, assignment in placed.items():
                loads[phase][mode].append(assignment.loads)
                crossed[phase][mode].append(_crossed(batch, phase, assignment, placed[BACKBONE]))
                if mode == "all":
                    bounds[phase].append(int(assignment.bound))
    found = {
        phase: PhaseLoads(
            {mode: np.stack(rows) for mode, rows in loads[phase].items()},
            {mode: np.array(shares) for mode, shares in crossed[phase].items()},
            np.array(bounds[phase]),
        )
        for phase in phases
        if any(bounds[phase])
    }
    return found, PredictedSteps.of(choices)


def place(batch: BatchLengths, phases: tuple[str, ...], num_ranks: int, mode: Mode) -> dict[str, Assignment]:
    """The placement of each phase in one mode."""
    if mode == "joint":
        choice = choose(timed_phases(batch, phases), num_ranks, _LINK, methods=["joint"])
        return dict(zip(phases, choice.assignments, strict=True))
    if mode == "off":
        backbone = score(batch.home, batch.sequence, num_ranks, COSTS[BACKBONE])
    else:
        backbone = assign(batch.sequence, num_ranks, COSTS[BACKBONE])
    placed = {BACKBONE: backbone}
    for phase in phases[1:]:
        items = batch.items[phase]
        if mode == "all":
            placed[phase] = assign_apart(items.length, COSTS[phase], items.example, backbone)
        else:
            placed[phase] = score(backbone.ranks[items.example], items.length, num_ranks, COSTS[phase])
    return placed


def timed_phases(batch: BatchLengths, phases: tuple[str, ...]) -> list[Phase]:
    """The phases with their seconds under `SPEED_ASSUMPTION`."""
    timed = []
    for name in phases:
        items = None if name == BACKBONE else batch.items[name]
        # Backward takes twice as long as forward.
        flops_per_length = 3e6 * MFLOP_PER_LENGTH[PHASES.index(name)]
        timed.append(
            Phase(
                name,
                batch.sequence if items is None else items.length,
                COSTS[name],
                np.arange(batch.num_examples) if items is None else items.example,
                flops_per_length / _FLOPS_PER_S,
                None if items is None else items.num_tokens * _BYTES_A_TOKEN,
            )
        )
    return timed


def _crossed(batch: BatchLengths, phase: str, placed: Assignment, backbone: Assignment) -> float:
    if phase == BACKBONE:
        return 0.0
    items = batch.items[phase]
    away = placed.ranks != backbone.ranks[items.example]
    return float(items.num_tokens[away].sum() / max(int(items.num_tokens.sum()), 1))


def take(batch: BatchLengths, examples: NDArray[np.int64], num_ranks: int) -> BatchLengths:
    """Some examples, in the order given; int64 [n], repeats allowed; at home in equal consecutive shares."""
    return replace(batch.take(examples), home=home_ranks(len(examples), num_ranks))


def _draw(lengths: Lengths, batch_size: int, rng: np.random.Generator, mix: Mix) -> NDArray[np.int64]:
    if mix == "rows":
        return rng.integers(0, lengths.batch.num_examples, batch_size)
    kinds = lengths.kinds()
    present = np.unique(kinds)
    chosen = rng.choice(present, batch_size)
    drawn = np.zeros(batch_size, dtype=np.int64)
    for kind in present:
        drawn[chosen == kind] = rng.choice(np.flatnonzero(kinds == kind), int((chosen == kind).sum()))
    return drawn
