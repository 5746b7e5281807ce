"""Training examples in splits: which rank reads which, what ranks tell each other of them, and their common order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from motet.core.errors import JointUserError, UserError
from motet.core.words import counted_words
from motet.data.dataset import Dataset
from motet.data.examples import Examples
from motet.data.left_out import LeftOut, describe_left_out
from motet.data.order import GlobalOrder, MixedOrder
from motet.data.splits import OwnSplits, SplitOrder
from motet.train.checkpoint.choice import Say, Start
from motet.train.recipe.recipe import Recipe
from motet.train.world import World


def say_left_out(manifests: Sequence[str], left_out: LeftOut, num_in_manifests: int, say: Say) -> None:
    """Print which examples of some manifests are left out or truncated, if any are."""
    if left_out:
        say(f"{', '.join(manifests)}: {describe_left_out(left_out, num_in_manifests)}.")
        for example in left_out.named:
            say(f"Left out: {example}")
        if unnamed := len(left_out) - len(left_out.named):
            say(f"Left out: {unnamed:,} more like these")


def own_splits(recipe: Recipe, world: World) -> dict[int, tuple[str, ...]]:
    """Number of a split -> its manifests, for the splits that this rank reads; all examples are split 0 if shared.

    Raises UserError for fewer splits than ranks.
    """
    if not recipe.data.is_split:
        return {0: recipe.data.train}
    num_splits = recipe.data.num_splits or world.num_ranks
    if num_splits < world.num_ranks:
        raise UserError(
            f"data.num_splits = {num_splits} leaves some of {world.num_ranks} ranks without examples; start "
            f"{counted_words(num_splits, 'rank')} at most."
        )
    return {number: recipe.data.split(number) for number in range(world.rank, num_splits, world.num_ranks)}


def joined_splits(opened: dict[int, Dataset], world: World, say: Say) -> OwnSplits:
    """The examples of all splits, seen from this rank. opened: the splits of this rank, by number. A collective.

    Raises JointUserError if two splits are equal.
    """
    described = {
        number: (part.num_examples, part.fingerprint, part.left_out, part.num_in_manifests)
        for number, part in opened.items()
    }
    by_rank = world.gather(described)
    splits = [by_rank[number % len(by_rank)][number] for number in range(sum(map(len, by_rank)))]
    sizes, fingerprints, left_out, num_in_manifests = zip(*splits, strict=True)
    for number, fingerprint in enumerate(fingerprints):
        if (first := fingerprints.index(fingerprint)) < number:
            raise JointUserError(
                f"data.train: the splits {first} and {number} are the same examples, and each must have its own."
            )
    # Rank 0 alone speaks, and has spoken of its own splits.
    for number in range(len(splits)):
        if number % len(by_rank):
            say_left_out([f"data.train, split {number}"], left_out[number], num_in_manifests[number], say)
    return OwnSplits(opened, sizes, fingerprints, LeftOut.joined(left_out), sum(num_in_manifests))


@overload
def order_of(recipe: Recipe, dataset: Examples) -> GlobalOrder | MixedOrder: ...
@overload
def order_of(recipe: Recipe, dataset: Examples | OwnSplits) -> GlobalOrder | MixedOrder | SplitOrder: ...
def order_of(recipe: Recipe, dataset: Examples | OwnSplits) -> GlobalOrder | MixedOrder | SplitOrder:
    """The order in which the whole job takes the training examples.

    Raises UserError for a manifest with a weight and without examples.
    """
    data = recipe.data
    if isinstance(dataset, OwnSplits):
        return SplitOrder(dataset.sizes, data.seed, data.shuffle)
    if not data.weights:
        return GlobalOrder(dataset.num_examples, data.seed, data.shuffle)
    counts = dataset.num_by_manifest.tolist()
    if 0 in counts:
        raise UserError(
            f"data.mixture gives {data.train[counts.index(0)]} a share, but none of its examples can be used: mend it, "
            "or leave it out of data.train and data.mixture."
        )
    return MixedOrder(tuple(counts), data.weights, data.seed, data.shuffle)


def check_same_splits(chosen: Start, recipe: Recipe, world: World) -> None:
    """Raise UserError if there are other splits, because there are other ranks, than when a checkpoint was written."""
    num_ranks = chosen.state.num_ranks
    if recipe.data.num_splits is None and num_ranks != world.num_ranks:
        raise UserError(
            f"The checkpoint {chosen.path} was written by {counted_words(num_ranks, 'rank')}, each with examples of "
            f"its own, and {world.num_ranks} are started: start {num_ranks}; or, where the ranks can read all splits, "
            "set data.num_splits to the number of splits."
        )
