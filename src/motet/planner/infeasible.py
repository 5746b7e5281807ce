"""Reasons why a strategy has no Plan under the pins, whatever the memory: sentences that strategies share."""

from __future__ import annotations

from motet.core.cluster import Cluster
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.job import Job
from motet.schedule.check.fit import undivided_parts

TENSOR_DEGREES = (1, 2, 4, 8)


def possible_tensor_degrees(cluster: Cluster, *, on_fewer: bool = False) -> list[int]:
    """The tensor-parallel degrees whose groups divide a node, or are whole nodes.

    on_fewer: those of Plans on some ranks of one node, too.

    Example: nodes of one device; and a node of three.
        >>> from motet.cost.catalogue import cluster
        >>> possible_tensor_degrees(cluster("a40", num_nodes=4, ranks_per_node=1))
        [1, 2, 4]
        >>> three = cluster("a40", ranks_per_node=3)
        >>> possible_tensor_degrees(three), possible_tensor_degrees(three, on_fewer=True)
        ([1], [1, 2])
    """
    node, most = cluster.ranks_per_node, cluster.num_ranks
    known = [tp for tp in TENSOR_DEGREES if tp <= most]
    return [tp for tp in known if node % tp == 0 or tp % node == 0 or (on_fewer and tp < node)]


def tensor_degrees(job: Job, *names: str, on_fewer: bool = False) -> list[int]:
    """The possible tensor-parallel degrees that divide the heads of these modules, by default of all, and that the cost
    model has times for. on_fewer: as of `possible_tensor_degrees`.
    """
    modules = [module for module in job.model.modules if not names or module.name in names]
    degrees = possible_tensor_degrees(job.cluster, on_fewer=on_fewer)
    degrees = [tp for tp in degrees if not any(undivided_parts(module, tp) for module in modules)]
    return [tp for tp in degrees if tp == 1 or not job.why_unpriced(tp)]


def indivisible(
    job: Job, pins: Pins, num_blocks: int, of: str = "backbone", modules: tuple[str, ...] = ()
) -> str | None:
    """Which pinned degree does not divide or is too large, as a sentence; None if none is.

    num_blocks: the blocks of `of`, the backbone or the model; a pipeline is cut between them.
    modules: those that the pinned TP is of; () is all.
    """
    if pins.tp is not None and pins.tp not in (known := tensor_degrees(job, *modules)):
        of_modules = [module for module in job.model.modules if not modules or module.name in modules]
        for module in of_modules:
            if pins.tp in possible_tensor_degrees(job.cluster) and (what := undivided_parts(module, pins.tp)):
                return f"TP is pinned to {pins.tp}, and {module.name} has {what}; it must be {one_of(known)}."
        return f"TP is pinned to {pins.tp}; it must be {one_of(known)}, in a node or over whole ones."
    if pins.pp is not None and pins.pp > num_blocks:
        return f"PP is pinned to {pins.pp}; it must be 1 to {num_blocks}, the layers of the {of}."
    pinned = {name: getattr(pins, name) for name in ("tp", "pp", "dp") if getattr(pins, name) is not None}
    needed = (pins.tp or 1) * (pins.pp or 1) * (pins.dp or 1)
    if needed > job.cluster.num_ranks:
        degrees = " with ".join(f"{name.upper()} {value}" for name, value in pinned.items())
        return f"{degrees} needs {counted_words(needed, 'rank')}; the cluster has {job.cluster.num_ranks:,}."
    if job.batch_size % ((pins.dp or 1) * (pins.microbatch_size or 1)):
        parts = {"DP": pins.dp, "a microbatch": pins.microbatch_size}
        what = " times ".join(f"{name} of {value:,}" for name, value in parts.items() if value is not None)
        return f"a batch of {job.batch_size:,} is no multiple of the pinned {what}."
    return None


def nothing_divides(job: Job) -> str:
    """The sentence for degrees of which each is possible, but which together are not."""
    batch = f"a batch of {job.batch_size:,} on {counted_words(job.cluster.num_ranks, 'rank')}"
    return f"no TP, PP, DP and microbatch that are allowed divide {batch}."


def not_apart(job: Job, pins: Pins, *, interleaved: bool = False) -> str | None:
    """Why the modules cannot each have ranks of their own, as a sentence; None if they can.

    interleaved: whether the backbone may run interleaved 1F1B.
    """
    model = job.model
    names = [module.name for module in model.modules]
    if len(names) == 1:
        return "the model has one module; there is nothing to take apart."
    for name in names:
        edges = [edge for edge in model.edges if name in edge]
        if name != BACKBONE and edges not in ([(name, BACKBONE)], [(BACKBONE, name)]):
            return f"module {name!r} must feed the backbone and nothing else, or be fed by it alone, to be a unit."
    if not pins.allow(schedule="1f1b") and not (interleaved and pins.allow(schedule="interleaved_1f1b")):
        schedules = "1F1B, interleaved or not" if interleaved else "1F1B"
        return f"units that feed each other run {schedules}; the schedule is pinned to {pins.schedule!r}."
    return None


def one_of(numbers: list[int]) -> str:
    """Example: `one_of([1, 2])` is "one of 1, 2", and `one_of([1])` is "1"."""
    return listed(numbers) if len(numbers) == 1 else f"one of {listed(numbers)}"


def listed(numbers: list[int]) -> str:
    """Numbers in a sentence."""
    return ", ".join(map(str, numbers))
