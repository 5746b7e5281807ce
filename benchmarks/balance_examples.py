"""Sections of balance.py on whole examples, on nodes and on microbatches, beside what a user would write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from balance_items import Sources
from measure import Case
from peers import heapq_lpt

from motet.analyze.mixture import MFLOP_PER_LENGTH, PHASES, Caps
from motet.balance import (
    Choice,
    Deferral,
    Link,
    Overhead,
    Packed,
    Padded,
    Phase,
    Split,
    assign,
    assign_jointly,
    choose,
    crossing,
    defer,
    order_microbatches,
    pipeline_makespan,
    place_on_nodes,
    score,
    split,
)
from motet.core.arrays import Float64Array, Int64Array
from motet.core.assignment import Assignment

RANKS_PER_NODE = 8
MFLOPS_PER_S = 400e6
"""Of a rank; with LINK it decides what `choose` takes."""
LINK = Link(bytes_per_s=50e9, latency_s=50e-6)
BYTES_PER_LENGTH = (4, 588, 512)
"""What moves with an example: a token's number, a patch of 14 x 14 pixels, a frame of 128 mel bins."""

JOINT_SIZES = ((64, 60), (128, 60), (512, 60), (2560, 80), (128, 32), (512, 32), (128, 16))
SPLIT_SIZES = ((8, 4), (8, 60), (64, 4), (64, 16), (64, 60), (128, 60), (512, 4), (512, 16), (512, 60))
HOME_SIZES = ((64, 60), (128, 60), (512, 60), (2560, 80))


def draws_costs(sources: Sources, num_examples: int, caps: Caps | None) -> Callable[[np.random.Generator], Int64Array]:
    return lambda rng: sources.mixture.draw(num_examples, rng, caps) * MFLOP_PER_LENGTH


def joint(sources: Sources) -> Iterator[Case]:
    ways: dict[str, Callable[[Int64Array, int], Any]] = {
        "motet": assign_jointly,
        "heapq LPT, summed costs": lambda costs, n: lpt_by(costs.sum(axis=1), costs, n),
        "heapq LPT, tokens alone": lambda costs, n: lpt_by(costs[:, 0], costs, n),
    }
    for num_ranks, per_rank in JOINT_SIZES:
        for who, solve in ways.items():
            yield Case(
                "joint",
                f"{num_ranks} x {per_rank}",
                f"{sources.mixture_name}, capped",
                draw=draws_costs(sources, num_ranks * per_rank, Caps()),
                solve=lambda costs, n=num_ranks, solve=solve: solve(costs, n),
                quality=over_ideal,
                max_batches=10,
                who=who,
            )


def lpt_by(weights: Int64Array, costs: Int64Array, num_ranks: int) -> Any:
    """Longest first by one figure an example; gives the loads, int64 [num_ranks, num_phases]."""
    examples = heapq_lpt()([], weights.tolist(), num_ranks)
    return np.array([costs[of_rank].sum(axis=0) for of_rank in examples])


def over_ideal(found: Assignment | Int64Array, costs: Int64Array) -> dict[str, float]:
    loads = found.loads if isinstance(found, Assignment) else found
    largest, ideal = loads.max(axis=0), costs.sum(axis=0) / len(loads)
    return {
        "sum of max / ideal - 1": float(largest.sum() / ideal.sum()) - 1,
        "worst phase - 1": float((largest / np.maximum(ideal, 1)).max()) - 1,
    }


def splitting(sources: Sources) -> Iterator[Case]:
    ways: dict[str, Callable[[Int64Array, int], list[Split] | Assignment]] = {}
    for told, overhead in (("no overhead", Overhead()), ("1 % a fragment", Overhead(fraction=0.01))):
        ways[f"motet, examples, {told}"] = lambda costs, n, overhead=overhead: [split(costs, n, overhead)]
        ways[f"motet, per phase, {told}"] = lambda costs, n, overhead=overhead: [
            split(column.copy(), n, overhead) for column in costs.T
        ]
    ways["nothing cut"] = assign_jointly
    for num_ranks, per_rank in SPLIT_SIZES:
        for who, solve in ways.items():
            yield Case(
                "split",
                f"{num_ranks} x {per_rank}",
                f"{sources.mixture_name}, uncapped",
                draw=draws_costs(sources, num_ranks * per_rank, None),
                solve=lambda costs, n=num_ranks, solve=solve: solve(costs, n),
                quality=lambda found, costs, n=num_ranks: split_quality(found, costs, n),
                max_batches=10,
                who=who,
            )


def split_quality(found: list[Split] | Assignment, costs: Int64Array, num_ranks: int) -> dict[str, float]:
    parts = [found] if isinstance(found, Assignment) else [one.assignment for one in found]
    largest = sum(int(np.sum(part.loads.max(axis=0))) for part in parts)
    quality = {"sum of max / ideal - 1": largest * num_ranks / int(costs.sum()) - 1}
    if not isinstance(found, Assignment):
        num_items = len(costs) if len(found) == 1 else int(np.count_nonzero(costs))
        quality["share of items cut"] = sum(one.num_cut for one in found) / num_items
    return quality


def deferring(sources: Sources) -> Iterator[Case]:
    for num_ranks, per_rank, num_microbatches in ((8, 16, 4), (64, 16, 4), (128, 16, 4), (128, 60, 4)):
        for who, solve in (("motet", deferred), ("spread evenly", spread_evenly)):
            yield Case(
                "defer",
                f"{num_ranks} x {per_rank}, {num_microbatches} times",
                f"{sources.mixture_name}, uncapped",
                draw=draws_costs(sources, num_ranks * per_rank * num_microbatches, None),
                solve=lambda costs, n=num_ranks, m=num_microbatches, solve=solve: solve(costs, n, m),
                quality=lambda found, costs, n=num_ranks: {"sum of max / ideal - 1": found * n / int(costs.sum()) - 1},
                max_batches=5,
                who=who,
            )


def deferred(costs: Int64Array, num_ranks: int, num_microbatches: int) -> int:
    found: Deferral = defer(costs, num_ranks, num_microbatches)
    return found.max_sum


def spread_evenly(costs: Int64Array, num_ranks: int, num_microbatches: int) -> int:
    parts = [assign_jointly(part, num_ranks) for part in np.array_split(costs, num_microbatches)]
    return sum(int(part.loads.max(axis=0).sum()) for part in parts)


def homes(num_items: int, num_ranks: int) -> Int64Array:
    """Items are held in equal consecutive shares."""
    return np.arange(num_items) * num_ranks // num_items


def home(sources: Sources) -> Iterator[Case]:
    """Beside: OrchMLLM's way, batches balanced from nothing and renamed by `place_on_nodes`."""
    for num_ranks, per_rank in HOME_SIZES:
        at = homes(num_ranks * per_rank, num_ranks)
        for who, solve in (("motet", packed_from), ("balanced, then renamed", packed_renamed)):
            yield Case(
                "home, packed",
                f"{num_ranks} x {per_rank}",
                f"{sources.mixture_name}, capped",
                draw=lambda rng, at=at: sources.mixture.draw(len(at), rng, Caps())[:, 0].copy(),
                solve=lambda lengths, n=num_ranks, at=at, solve=solve: solve(lengths, n, at),
                quality=lambda found, lengths, at=at: {
                    "max / mean - 1": float(found.loads.max() / found.loads.mean()) - 1,
                    "share that leaves its node": crossing(found, at, lengths, RANKS_PER_NODE),
                },
                who=who,
            )
    for num_ranks, per_rank in HOME_SIZES:
        at = homes(num_ranks * per_rank, num_ranks)
        for who, solve in (("motet", jointly_from), ("balanced, then renamed", jointly_renamed)):
            yield Case(
                "home, joint",
                f"{num_ranks} x {per_rank}",
                f"{sources.mixture_name}, capped",
                draw=draws_costs(sources, len(at), Caps()),
                solve=lambda costs, n=num_ranks, at=at, solve=solve: solve(costs, n, at, bytes_of(costs)),
                quality=lambda found, costs, at=at: {
                    **over_ideal(found, costs),
                    "share that leaves its node": crossing(found, at, bytes_of(costs), RANKS_PER_NODE),
                },
                max_batches=10,
                who=who,
            )


def bytes_of(costs: Int64Array) -> Int64Array:
    return costs // MFLOP_PER_LENGTH @ np.array(BYTES_PER_LENGTH)


def packed_from(lengths: Int64Array, num_ranks: int, at: Int64Array) -> Assignment:
    return assign(lengths, num_ranks, home=at, ranks_per_node=RANKS_PER_NODE)


def packed_renamed(lengths: Int64Array, num_ranks: int, at: Int64Array) -> Assignment:
    found = assign(lengths, num_ranks)
    names = place_on_nodes(volume_of(found, at, lengths), RANKS_PER_NODE)
    return score(names[found.ranks], lengths, num_ranks)


def jointly_from(costs: Int64Array, num_ranks: int, at: Int64Array, sizes_bytes: Int64Array) -> Assignment:
    return assign_jointly(costs, num_ranks, home=at, bytes=sizes_bytes, ranks_per_node=RANKS_PER_NODE)


def jointly_renamed(costs: Int64Array, num_ranks: int, at: Int64Array, sizes_bytes: Int64Array) -> Assignment:
    found = assign_jointly(costs, num_ranks)
    names = place_on_nodes(volume_of(found, at, sizes_bytes), RANKS_PER_NODE)
    loads = np.empty_like(found.loads)
    loads[names] = found.loads
    renamed = score(names[found.ranks], costs[:, 0], num_ranks)
    return Assignment(renamed.ranks, renamed.items, renamed.offsets, loads, found.bound)


def volume_of(found: Assignment, at: Int64Array, sizes: Int64Array) -> Int64Array:
    """What each rank holds of each batch, int64 [num_ranks, num_ranks]."""
    n = found.num_ranks
    return np.bincount(at * n + found.ranks, sizes, n * n).astype(np.int64).reshape(n, n)


def nodes(sources: Sources) -> Iterator[Case]:
    for num_ranks, ranks_per_node in ((16, 4), (128, 8), (512, 8), (2560, 8)):
        ways: dict[str, Callable[[Int64Array], Int64Array]] = {
            "motet": lambda volume, size=ranks_per_node: place_on_nodes(volume, size),
            "random names": lambda volume: np.random.default_rng(0).permutation(len(volume)),
        }
        if num_ranks <= 16:
            ways["motet, exact"] = lambda volume, size=ranks_per_node: place_on_nodes(volume, size, exact=True)
        for who, solve in ways.items():
            yield Case(
                "nodes",
                f"{num_ranks} x 60",
                f"{sources.mixture_name}, capped",
                draw=lambda rng, n=num_ranks: drawn_volume(sources, n, rng),
                solve=solve,
                quality=lambda names, volume, size=ranks_per_node: {
                    "most sent / mean held": most_sent(names, volume, size)
                },
                max_batches=5,
                who=who,
            )


def drawn_volume(sources: Sources, num_ranks: int, rng: np.random.Generator) -> Int64Array:
    lengths = sources.mixture.draw(num_ranks * 60, rng, Caps())[:, 0].copy()
    return volume_of(assign(lengths, num_ranks), homes(len(lengths), num_ranks), lengths)


def most_sent(names: Int64Array, volume: Int64Array, ranks_per_node: int) -> float:
    """Of what one source sends to other nodes; over what a source holds on average."""
    node_of_source = np.arange(len(volume)) // ranks_per_node
    leaves = node_of_source[:, None] != (names // ranks_per_node)[None, :]
    return float((volume * leaves).sum(axis=1).max() * len(volume) / volume.sum())


def ordering(sources: Sources) -> Iterator[Case]:
    """A sample a microbatch: the image encoder on the first stage, the backbone on seven."""
    for num_microbatches in (64, 1920):
        yield Case(
            "ordering",
            f"8 stages x {num_microbatches}",
            f"{sources.mixture_name}, capped",
            draw=lambda rng, n=num_microbatches: stage_seconds(sources.mixture.draw(n, rng, Caps())),
            solve=lambda seconds: order_microbatches(seconds, 2 * seconds, len(seconds)),
            quality=lambda order, seconds: {
                "makespan / given order's": pipeline_makespan(seconds, 2 * seconds, len(seconds), order)
                / pipeline_makespan(seconds, 2 * seconds, len(seconds))
            },
        )


def stage_seconds(lengths: Int64Array) -> Float64Array:
    """Forward seconds, float64 [8, num_microbatches]."""
    mflop = lengths * MFLOP_PER_LENGTH
    return np.stack([mflop[:, 1], *[mflop[:, 0] / 7] * 7]) / MFLOPS_PER_S


def choosing(sources: Sources) -> Iterator[Case]:
    for name, caps in (("capped", Caps()), ("uncapped", None)):
        for num_ranks, per_rank in ((128, 16), (128, 60)):
            yield Case(
                "choose",
                f"{num_ranks} x {per_rank}",
                f"{sources.mixture_name}, {name}",
                draw=lambda rng, n=num_ranks * per_rank, caps=caps: phases_of(sources.mixture.draw(n, rng, caps)),
                solve=lambda phases, n=num_ranks: choose(phases, n, LINK, home=homes(len(phases[0].lengths), n)),
                quality=chosen,
                max_batches=10,
            )


def phases_of(lengths: Int64Array) -> list[Phase]:
    """One item a phase where there is any; audio pads. Forward and backward take three forwards."""
    phases = []
    for name, column, mflop in zip(PHASES, lengths.T, MFLOP_PER_LENGTH, strict=True):
        owner = np.arange(len(lengths)) if name == "backbone" else np.flatnonzero(column)
        cost = Padded() if name == "audio" else Packed()
        output_bytes = None if name == "backbone" else column[owner] // 4 * 7168
        phases.append(Phase(name, column[owner], cost, owner, 3 * mflop / MFLOPS_PER_S, output_bytes))
    return phases


def chosen(choice: Choice, _: object) -> dict[str, float]:
    """Named by the method, so that batches of each are told apart."""
    predicted = choice.predicted_s
    return {f"seconds / unbalanced's, {choice.method}": predicted[choice.method] / predicted["unbalanced"]}


SECTIONS = {
    "joint": joint,
    "split": splitting,
    "defer": deferring,
    "home": home,
    "nodes": nodes,
    "ordering": ordering,
    "choose": choosing,
}
