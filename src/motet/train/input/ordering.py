"""The order of a recipe's examples, and what is said of its groups before the run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from motet.core.words import counted_words
from motet.data.examples import Examples
from motet.data.groups import GroupedOrder, group_caps, phase_totals
from motet.data.order import EpochOrder
from motet.data.splits import OwnSplits
from motet.train.input.own_splits import order_of
from motet.train.recipe.recipe import Recipe

_MAX_NAMED = 3
"""Examples above a cap that are named."""


def build_order(recipe: Recipe, dataset: Examples | OwnSplits, say: Callable[[str], None]) -> EpochOrder:
    """The order in which a recipe takes its examples. Raises UserError for caps that do not fit the model or the data.

    With groups, those of the first epoch are made here, and the caps, the groups and the largest microbatch are said.
    """
    data = recipe.data
    if data.group is None:
        return order_of(recipe, dataset)
    assert not isinstance(dataset, OwnSplits), (
        "groups take lengths that are known, and each rank has those of its split"
    )
    totals = phase_totals(dataset)
    order = GroupedOrder(totals, group_caps(data.group, totals), data.seed)
    groups = order.epoch(0)
    say(
        f"Groups of data.group: at most {_listed(order.caps)}; {groups.num_groups:,} in the first epoch, of "
        f"{dataset.num_examples / groups.num_groups:.1f} examples in the mean, {groups.num_full:,} of them full. No "
        f"microbatch of a rank is larger than {_listed(order.largest)}."
    )
    oversized = order.oversized
    if len(oversized):
        named = "; ".join(dataset.where(int(example)) for example in oversized[:_MAX_NAMED])
        more = f"; and {len(oversized) - _MAX_NAMED:,} more" if len(oversized) > _MAX_NAMED else ""
        say(
            f"Above a cap of data.group, each a group of its own: {counted_words(len(oversized), 'example')}: "
            f"{named}{more}."
        )
    return order


def _listed(lengths: Mapping[str, int]) -> str:
    *first, last = (f"{length:,} of {name}" for name, length in lengths.items())
    return f"{', '.join(first)} and {last}" if first else last
