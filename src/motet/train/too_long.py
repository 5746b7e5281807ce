"""Examples that no microbatch of a run can hold: left out and named before the first step, on all ranks alike.

One that needs more memory than a rank may fill, alone in its microbatch, would end the run in the step that has it.
Which these are follows from lengths, Plan and memory alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.words import counted_words, size_words
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.memory import USABLE_MEMORY
from motet.data.examples import Examples
from motet.data.left_out import MAX_NAMED
from motet.planner.alone import bytes_alone

_EXAMPLES_AT_ONCE = 1 << 16
_WHOLE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class TooLong:
    """Examples that do not fit alone, those that need most first.

    ids: int64 [n]. needed_bytes: float64 [n], of the fullest rank. tokens: int64 [n], of their sequences.
    cp:  int64 [n], the fewest ranks that could hold each by sharing its sequence; 0 where none of the job's can.
    most_cp: the most ranks of the job of which that was asked.
    """

    ids: Int64Array
    needed_bytes: Float64Array
    tokens: Int64Array
    cp: Int64Array
    capacity_bytes: int
    most_cp: int

    def reason(self, number: int) -> str:
        """Why one of them is left out, and what would hold it, in words. number: among these, from 0."""
        cp = int(self.cp[number])
        holds = f"a plan with cp = {cp} could hold it" if cp else f"no cp up to {self.most_cp} could hold it"
        return (
            f"takes {self.tokens[number]:,} tokens, for which a rank needs {size_words(self.needed_bytes[number])} and "
            f"may fill {size_words(self.capacity_bytes)}; {holds}"
        )


def too_long(
    plan: Plan,
    num_examples: int,
    lengths_of: Callable[[Int64Array], BatchLengths],
    *,
    shared_by: Mapping[str, int] = _WHOLE,
    exchange: str = "auto",
    trains: bool = True,
) -> TooLong:
    """Those of the examples 0 ... num_examples - 1 that need more than a device of the Plan's cluster may fill.

    None where a rank has no memory for the model itself: then no example is to blame.
    shared_by, exchange, trains: as of `bytes_alone`; the most ranks over which training cuts items, where the Plan does
    not say it.
    """
    capacity = int(plan.cluster.device.memory_bytes * USABLE_MEMORY)
    ids, needed = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    has_room = bytes_alone(plan, _nothing(plan))[0] <= capacity
    for first in range(0, num_examples if has_room else 0, _EXAMPLES_AT_ONCE):
        part = np.arange(first, min(first + _EXAMPLES_AT_ONCE, num_examples))
        bytes_of = bytes_alone(plan, lengths_of(part), shared_by=shared_by, exchange=exchange, trains=trains)
        ids.append(part[bytes_of > capacity])
        needed.append(bytes_of[bytes_of > capacity])
    found, found_bytes = np.concatenate(ids), np.concatenate(needed)
    order = np.argsort(-found_bytes, kind="stable")
    found, found_bytes = found[order], found_bytes[order]
    most_cp = plan.unit_of(BACKBONE).cp
    if not len(found):
        return TooLong(found, found_bytes, found, found, capacity, most_cp)
    lengths, holding = lengths_of(found), np.zeros(len(found), dtype=np.int64)
    for sharing in _shared_by_more(plan):
        try:
            fits = bytes_alone(sharing, lengths, exchange=exchange, trains=trains) <= capacity
        except UserError:  # Ranks of a unit behind it, or of its node, cannot be divided so.
            continue
        most_cp = sharing.unit_of(BACKBONE).cp
        holding[fits & (holding == 0)] = most_cp
        if holding.all():
            break
    return TooLong(found, found_bytes, lengths.sequence, holding, capacity, most_cp)


def _nothing(plan: Plan) -> BatchLengths:
    """One example without a token."""
    none, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    names = [module.name for module in plan.model.modules if module.name != BACKBONE]
    return BatchLengths(one, one, one.astype(np.int32), {name: ItemLengths(none, none, none) for name in names})


def _shared_by_more(plan: Plan) -> Iterator[Plan]:
    """The Plan with the backbone's sequences shared by more of its ranks: by each number of replicas that divides them
    all, and then by those of all stages, which become one.
    """
    unit = plan.unit_of(BACKBONE)
    in_stages = {"schedule": "1f1b", "balance": "off", "policy": {}} if plan.schedule == "data_parallel" else {}
    shared = replace(unit, zero=min(unit.zero, 1), shard_size=0)
    for share in range(2, unit.dp + 1):
        if unit.dp % share == 0:
            yield _with(plan, replace(shared, dp=unit.dp // share, cp=unit.cp * share), in_stages)
    if unit.pp > 1:
        one = {"stages": (_together(unit.stages),), "recompute": (_together(unit.recompute),) * bool(unit.recompute)}
        yield _with(plan, replace(shared, **one, pp=1, dp=1, cp=unit.num_ranks // unit.tp), {"schedule": "1f1b"})


def _together(stages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Layers of each module in all stages, in the order of the data."""
    counts = Counter[str]()
    for stage in stages:
        counts.update(stage)
    return dict(counts)


def _with(plan: Plan, backbones: Unit, fields: Mapping[str, Any]) -> Plan:
    """The Plan with another unit in place of the backbone's."""
    old = plan.unit_of(BACKBONE)
    return replace(plan, units=tuple(backbones if each is old else each for each in plan.units), **fields)


def leave_out_too_long(
    dataset: Examples,
    plan: Plan,
    max_bad_fraction: float,
    say: Callable[[str], None],
    *,
    shared_by: Mapping[str, int] = _WHOLE,
    exchange: str = "auto",
) -> None:
    """Leave out of a dataset, in place, what does not fit alone under a Plan. say: prints which examples these are.

    Raises UserError, which names the one that needs most, for more of them than max_bad_fraction allows.
    shared_by, exchange: as of `too_long`.
    """
    found = too_long(
        plan,
        dataset.num_examples,
        lambda ids: dataset.batch_lengths(ids, 1),
        shared_by=shared_by,
        exchange=exchange,
    )
    if len(found.ids):
        where = dataset.where(int(found.ids[0]))
        check_too_long(found, max_bad_fraction, dataset.num_in_manifests, where)
        _leave_out(dataset, found, "examples", say)


def leave_out_of_evaluation(dataset: Examples, plan: Plan, say: Callable[[str], None], *, exchange: str) -> None:
    """Leave out of held-out examples, in place, what does not fit alone under a Plan.

    They are evaluated whole, but for sequences that the Plan's context-parallel ranks share. Others: as of
    `leave_out_too_long`.
    Raises UserError if no other is left.
    """
    found = too_long(
        plan,
        dataset.num_examples,
        lambda ids: dataset.batch_lengths(ids, 1),
        exchange=exchange,
        trains=False,
    )
    if len(found.ids):
        _leave_out(dataset, found, "held-out examples", say)


def _leave_out(dataset: Examples, found: TooLong, what: str, say: Callable[[str], None]) -> None:
    """Leave them out, and say which they are."""
    of_all = f"{len(found.ids):,} of {dataset.num_in_manifests:,} {what}"
    needs = "it needs" if len(found.ids) == 1 else "they need"
    say(f"{of_all} left out: {needs} more memory than a rank has.")
    for number, example in enumerate(found.ids[:MAX_NAMED].tolist()):
        say(f"Left out: {dataset.where(example)}: {found.reason(number)}")
    dataset.leave_out(found.ids, found.reason)


def check_too_long(found: TooLong, max_bad_fraction: float, num_examples: int, where: str) -> None:
    """Raise UserError for more of them than max_bad_fraction of all examples. where: of the one that needs most."""
    if len(found.ids) > max_bad_fraction * num_examples:
        raise UserError(
            f"{counted_words(len(found.ids), 'example needs', 'examples need')} more memory than a rank has, of "
            f"{num_examples:,} for training, more than data.max_bad_fraction = {max_bad_fraction:g} allows; the "
            f"largest: {where}: {found.reason(0)}."
        )
