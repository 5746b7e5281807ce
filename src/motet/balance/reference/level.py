"""Move few items between groups (ranks or nodes) so that no group is over its limit.

OrchMLLM Algorithm 3 renames balanced batches; most tokens still move, because a batch has items from everywhere. Here a
group keeps its items and exports only its excess over its target. One exchange is between the group furthest over its
limit and the group furthest under it, and closes the smaller of the two gaps. So each exchange brings one group to its
target. The weight that moves is little more than the sum of the excesses, which is the minimum.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

Item = tuple[int, int]
"""(-weight, item number): ascending order is heaviest first, then by number."""

MAX_PARTNERS = 64
"""Number of groups, furthest under their limit first, that are tried as partners of the heaviest."""

NO_ITEM: Item = (0, -1)


@dataclass
class Holder:
    """The items of one rank or node, ascending. A load above `limit` must come down, if possible to `target`."""

    items: list[Item]
    load: int
    target: int
    limit: int


def level(groups: list[Holder], turns: list[int] | None = None) -> None:
    """Exchange items until no group is over its limit or no exchange helps.

    groups: the sum of their targets is the sum of their loads.
    turns: by item number; the item with the lowest turn is given first. None: the heaviest first.
    At most 100 + 20 num_groups exchanges; each tries up to `MAX_PARTNERS` groups in O(items of the two groups).
    """
    for _ in range(100 + 20 * len(groups)):
        lightest_first = sorted(groups, key=lambda group: group.load - group.limit)
        heavy = lightest_first[-1]
        if heavy.load <= heavy.limit:
            return
        if not any(_exchange(heavy, light, turns) for light in lightest_first[:-1][:MAX_PARTNERS]):
            return


def _exchange(heavy: Holder, light: Holder, turns: list[int] | None) -> bool:
    """Close the smaller of the two gaps as nearly as the items allow; False if no exchange brings the groups closer."""
    # A change of the loads by less than `max_change` brings the groups closer; one by `gap` closes the smaller gap.
    max_change = (heavy.load - heavy.target) - (light.load - light.target)
    gap = max(1, min(heavy.load - heavy.target, light.target - light.load))
    if max_change <= gap:
        return False
    # 1. Give items that fit into the gap.
    by_turn = heavy.items if turns is None else sorted(heavy.items, key=lambda item: turns[item[1]])
    given, left = _fitting_items(by_turn, gap)
    # 2. Fill the rest of the gap by a swap.
    kept = [item for item in heavy.items if item not in given]
    give, take = _best_swap(kept, light.items, left, gap - left, max_change)
    given += [give] if give != NO_ITEM else []
    if not given:
        return False
    # 3. Move the items.
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


def _fitting_items(items: list[Item], gap: int) -> tuple[list[Item], int]:
    """The items that fit into the gap, one after the other, and the rest of the gap."""
    given: list[Item] = []
    for item in items:
        if 0 < -item[0] <= gap:
            given.append(item)
            gap += item[0]
    return given, gap


def _best_swap(heavy: list[Item], light: list[Item], left: int, moved: int, max_change: int) -> tuple[Item, Item]:
    """An item to give, and one (or NO_ITEM) to take, whose difference is nearest to `left`; a tie takes the lightest.

    moved: the weight that is given already. moved + difference must be between 0 and `max_change`, both excluded.
    """
    best = (NO_ITEM, NO_ITEM)
    smallest_miss = left if moved else max_change
    for take in [NO_ITEM, *reversed(light)]:
        if smallest_miss == 0:
            break
        after = bisect_right(heavy, take[0] - left, key=lambda item: item[0])  # the first lighter than take + left
        for give in heavy[max(after - 1, 0) : after + 1]:
            change = take[0] - give[0]
            if abs(left - change) < smallest_miss and 0 < moved + change < max_change:
                smallest_miss = abs(left - change)
                best = (give, take)
    return best
