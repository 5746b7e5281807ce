"""What balancing on lengths costs: operations of the busiest rank where lengths are balanced, and where operations are.

    python benchmarks/costs.py [--lengths ../shared/data/lengths.csv.gz] [--seed 0] [--json FILE] [--only NAME]

Batches are drawn from a table of lengths (each combination of modalities equally often; without a table, from a sampled
mixture) and placed as training does by default, by lengths (`balance.cost = "length"`) and by the operations of a
recipe's model ("flops"). Both placements are then weighed by operations. A step lasts as long as the busiest rank of
each phase: "step" is the sum of those over phases, of the one over that of the other. Nothing is run but decisions.

tiles: images that the table has in tiles (InternVL's, of 1,025 rows) are one item each, as an encoder sees them that
cuts images itself. They are placed as whole items, whose attention is the square of the sum, and as their tiles, whose
squares add up; both placements are weighed by what is computed, which is tiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rows import ROOT, Row, finish, options, show

from motet.analyze.lengths import read_lengths
from motet.balance import Choice, Packed, StepCosts, choose, score
from motet.core.arrays import Int64Array
from motet.core.item_segments import ItemSegments
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, Workload
from motet.dispatch import BalanceConfig
from motet.planning.planned_recipe import read_job_recipe
from motet.train.balancing import step_costs

MODELS = ("orchmllm_10b", "orchmllm_84b", "valm_mm")
SIZES = ((16, 8), (16, 32), (128, 60))
TIMED = ((128, 60), (2560, 80))
NUM_BATCHES, NUM_TIMED = 20, 9
TILE = 1025
MANY, EVEN = 32, 1.005
"""From so many examples a rank on, operations of phases that pack are to be even to within half a per cent."""


def workload_at(path: Path | None) -> Workload:
    """The lengths in a table; without one, and with a line that says so where it is not there, sampled ones."""
    if path is not None and path.exists():
        return read_lengths(str(path)).workload(even=True)
    if path is not None:
        print(f"{path} is not there: lengths are sampled.", file=sys.stderr, flush=True)
    from motet.analyze.mixture import Mixture

    kinds = Mixture.sampled(0)
    rows = np.concatenate([kinds.text, kinds.image, kinds.speech])
    items = {}
    for name, column in (("image", rows[:, 1]), ("audio", rows[:, 2])):
        example = np.flatnonzero(column)
        items[name] = ItemLengths(example, column[example], column[example] // 4)
    home = np.zeros(len(rows), dtype=np.int32)
    return Workload("sampled", BatchLengths(rows[:, 0], rows[:, 0] // 2, home, items))


def costs_of(model: ModelSpec) -> dict[str, StepCosts]:
    """By what a recipe of the model balances, on GPUs and in bf16, by `balance.cost`."""
    return {
        cost: step_costs(BalanceConfig(cost=cost), model, {}, "cuda", element_bytes=2, measured=None)
        for cost in ("length", "flops")
    }


def of_model(batch: BatchLengths, model: ModelSpec) -> BatchLengths:
    """Without the items of modules that the model does not have."""
    names = [module.name for module in model.modules if module.name != BACKBONE]
    return replace(batch, items={name: batch.items[name] for name in names})


def measure(name: str, model: ModelSpec, workload: Workload, seed: int) -> Iterator[Row]:
    costs = costs_of(model)
    for num_ranks, per_rank in SIZES:
        rng = np.random.default_rng(seed)
        busiest: dict[str, list[list[float]]] = {cost: [] for cost in costs}
        over_mean: dict[str, list[list[float]]] = {cost: [] for cost in costs}
        for _ in range(NUM_BATCHES):
            batch = of_model(workload.draw(num_ranks * per_rank, rng), model)
            for cost in costs:
                choice = choose(costs[cost].phases(batch), num_ranks, costs[cost].times.link)
                loads = operations(choice, costs["flops"], batch, num_ranks)
                busiest[cost].append([of.max() for of in loads])
                over_mean[cost].append([of.max() / max(of.mean(), 1) for of in loads])
        where = f"{name}, {num_ranks} x {per_rank}"
        for place, phase in enumerate(costs["flops"].names):
            for cost, ratios in over_mean.items():
                is_even = cost == "flops" and per_rank >= MANY and isinstance(costs[cost].costs[phase], Packed)
                ratio = float(np.mean(ratios, axis=0)[place])
                yield Row(f"{where}: {phase}, busiest over mean, by {cost}", ratio, EVEN if is_even else None)
        steps = np.sum(busiest["length"], axis=1) / np.sum(busiest["flops"], axis=1)
        yield Row(f"{where}: step, by length over by flops", float(steps.mean()))


def operations(choice: Choice, counted: StepCosts, batch: BatchLengths, num_ranks: int) -> list[Int64Array]:
    """Of each rank in each phase, padding included."""
    return [
        score(placed.ranks, phase.lengths, num_ranks, phase.cost).loads
        for phase, placed in zip(counted.phases(batch), choice.assignments, strict=True)
    ]


def in_tiles(batch: BatchLengths) -> BatchLengths:
    """The tiles of an example as one image with segments; other images as they are."""
    images = batch.items["image"]
    is_tile = images.length == TILE
    # An item begins with each other image, and with the first tile of an example.
    begins = ~is_tile | (np.diff(images.example, prepend=-1) != 0) | ~np.append(False, is_tile[:-1])
    first = np.flatnonzero(begins)
    segments = ItemSegments(images.length, np.append(first, len(begins)))
    joined = ItemLengths(
        images.example[first], segments.summed(images.length), segments.summed(images.num_tokens), segments
    )
    return replace(batch, items={**batch.items, "image": joined})


def measure_tiles(name: str, model: ModelSpec, workload: Workload, seed: int) -> Iterator[Row]:
    """What placing whole images by the square of the sum costs, over placing them by their tiles."""
    costs = costs_of(model)["flops"]
    for num_ranks, per_rank in SIZES:
        rng = np.random.default_rng(seed)
        over_mean: dict[str, list[float]] = {"square of the sum": [], "sum of squares": []}
        steps = []
        for _ in range(NUM_BATCHES):
            tiled = in_tiles(of_model(workload.draw(num_ranks * per_rank, rng), model))
            whole = replace(tiled, items={**tiled.items, "image": replace(tiled.items["image"], segments=None)})
            busiest = []
            for way, batch in zip(over_mean, (whole, tiled), strict=True):
                choice = choose(costs.phases(batch), num_ranks, costs.times.link)
                loads = operations(choice, costs, tiled, num_ranks)
                image = loads[costs.names.index("image")]
                over_mean[way].append(image.max() / image.mean())
                busiest.append(sum(int(of.max()) for of in loads))
            steps.append(busiest[0] / busiest[1])
        where = f"{name}, tiles, {num_ranks} x {per_rank}"
        for way, ratios in over_mean.items():
            goal = EVEN if way == "sum of squares" and per_rank >= MANY else None
            yield Row(f"{where}: image, busiest over mean, by {way}", float(np.mean(ratios)), goal)
        yield Row(f"{where}: step, by square of the sum over by sum of squares", float(np.mean(steps)))


def time_decisions(model: ModelSpec, workload: Workload, seed: int) -> Iterator[Row]:
    """Milliseconds to count and to decide, medians."""
    costs = costs_of(model)
    for num_ranks, per_rank in TIMED:
        rng, taken_s = np.random.default_rng(seed), {cost: [] for cost in (*costs, "counting")}
        for _ in range(NUM_TIMED):
            batch = of_model(workload.draw(num_ranks * per_rank, rng), model)
            for cost, own in costs.items():
                start_s = time.perf_counter()
                choose(own.phases(batch), num_ranks, own.times.link)
                taken_s[cost].append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            costs["flops"].work(batch)
            taken_s["counting"].append(time.perf_counter() - start_s)
        for what, seconds in taken_s.items():
            told = "counting operations" if what == "counting" else f"deciding by {what}"
            yield Row(f"{num_ranks} x {per_rank}: {told}, ms", 1e3 * float(np.median(seconds)))


def main() -> None:
    given = options(__doc__, [*MODELS, "tiles", "time"]).parse_args()
    workload = workload_at(given.lengths)
    rows: list[Row] = []
    for name in MODELS:
        if given.only in ("", name):
            rows += measure(name, read_job_recipe(ROOT / "recipes" / f"{name}.toml").model, workload, given.seed)
    if given.only in ("", "tiles"):
        model = read_job_recipe(ROOT / "recipes" / f"{MODELS[0]}.toml").model
        rows += measure_tiles(MODELS[0], model, workload, given.seed)
    if given.only in ("", "time"):
        model = read_job_recipe(ROOT / "recipes" / f"{MODELS[0]}.toml").model
        rows += time_decisions(model, workload, given.seed)
    print(f"lengths of {workload.source}")
    for row in rows:
        show(row)
    finish(rows, given.json, seed=given.seed)


if __name__ == "__main__":
    main()
