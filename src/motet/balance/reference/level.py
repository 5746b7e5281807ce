"""Move few items between groups, ranks or nodes, so that no group is over its limit: minimal movement.

Renaming balanced batches (OrchMLLM Algorithm 3) leaves most tokens on the move, because a batch is drawn from
everywhere. Here a group keeps what it holds and exports only its excess over its target. An exchange between the
group that is furthest over its limit and the one that is furthest under closes the smaller of the two gaps, so that a
group is settled with each, and what moves is the sum of the excesses, which no other way undercuts, and little more.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

Item = tuple[int, int]
"""(-weight, number): ascending order is heaviest first, then by number."""

MAX_PARTNERS = 64
"""So many groups, furthest under their limit first, are asked for an exchange before the heaviest counts as settled."""

NO_ITEM: Item = (0, -1)


@dataclass
class Holder:
    """What one rank or node holds, items ascending; a load above `limit` is to come down, to `target` at best."""

    items: list[Item]
    load: int
    target: int
    limit: int


def level(groups: list[Holder], turns: list[int] | None = None) -> None:
    """Exchange items until no group is over its limit or no exchange helps; the targets add up to the loads.

    turns: by item number, whose turn to be given is first; None: the heaviest first.
    At most 100 + 20 num_groups exchanges of O(items of the two groups) with up to `MAX_PARTNERS` groups each.
    """
    for _ in range(100 + 20 * len(groups)):
        lightest_first = sorted(groups, key=lambda group: group.load - group.limit)
        heavy = lightest_first[-1]
        if heavy.load <= heavy.limit:
            return
        if not any(_exchange(heavy, light, turns) for light in lightest_first[:-1][:MAX_PARTNERS]):
            return


def _exchange(heavy: Holder, light: Holder, turns: list[int] | None) -> bool:
    """Close the smaller of the two gaps, as nearly as the items allow; False where no exchange brings them closer."""
    room = (heavy.load - heavy.target) - (light.load - light.target)
    gap = max(1, min(heavy.load - heavy.target, light.target - light.load))
    if room <= gap:
        return False
    given, left = _whole_items(heavy.items if turns is None else sorted(heavy.items, key=lambda i: turns[i[1]]), gap)
    rest = [item for item in heavy.items if item not in given]
    give, take = _best_swap(rest, light.items, left, gap - left, room)
    given += [give] if give != NO_ITEM else []
    if not given:
        return False
    for item in given:
        heavy.items.remove(item)
        insort(light.items, item)
    if take != NO_ITEM:
        light.items.remove(take)
        insort(heavy.items, take)
    change = take[0] - sum(negated for negated, _ in given)
    heavy.load -= change
    light.load += change
    return True


def _whole_items(items: list[Item], gap: int) -> tuple[list[Item], int]:
    """Items in their turn, as long as they fit into the gap, and what is left of it."""
    given: list[Item] = []
    for item in items:
        if 0 < -item[0] <= gap:
            given.append(item)
            gap += item[0]
    return given, gap


def _best_swap(heavy: list[Item], light: list[Item], left: int, moved: int, room: int) -> tuple[Item, Item]:
    """An item to give, and one to take or none, whose difference is nearest to `left`; of equals, the lightest to take.

    With what has `moved` already, the change must stay within 0 and `room`, both excluded.
    """
    best = (NO_ITEM, NO_ITEM)
    smallest_miss = left if moved else room
    for take in [NO_ITEM, *reversed(light)]:
        if smallest_miss == 0:
            break
        after = bisect_right(heavy, take[0] - left, key=lambda item: item[0])  # the first lighter than what is wanted
        for give in heavy[max(after - 1, 0) : after + 1]:
            change = take[0] - give[0]
            if abs(left - change) < smallest_miss and 0 < moved + change < room:
                smallest_miss = abs(left - change)
                best = (give, take)
    return best
