"""The examples of a job as a rank has opened them, before ranks have agreed on them."""

from __future__ import annotations

from dataclasses import dataclass

from motet.balance import StepCosts
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.data.dataset import Dataset
from motet.data.drawn import DrawnVocabulary
from motet.data.examples import Examples
from motet.data.splits import OwnSplits
from motet.data.text import ChatTokenizer
from motet.data.transforms import Transform
from motet.dispatch import Orchestrator
from motet.models.mllm import MLLM
from motet.train.checkpoint.choice import Say
from motet.train.evaluate import check_prompts
from motet.train.input.datasets import (
    check_buckets_used,
    check_items_to_make,
    check_items_to_read,
    check_same_examples,
    open_dataset,
    open_heldout,
    say_named_twice,
    say_unlearned,
)
from motet.train.input.own_splits import joined_splits, own_splits
from motet.train.recipe.recipe import Recipe
from motet.train.too_long import leave_out_of_evaluation, leave_out_too_long
from motet.train.world import World


@dataclass(frozen=True, eq=False)
class OpenedExamples:
    """The examples of a job, before ranks have agreed on them.

    splits: by number, those that this rank reads; {0: all} of data that are not split. heldout: None without any.
    """

    splits: dict[int, Examples]
    heldout: Dataset | None

    @classmethod
    def of(
        cls, recipe: Recipe, world: World, vocabulary: ChatTokenizer | DrawnVocabulary, model: MLLM, say: Say
    ) -> OpenedExamples:
        """The examples of a recipe, indexed if they were not. Raises UserError."""
        splits = {
            number: open_dataset(recipe, manifests, vocabulary, model, say)
            for number, manifests in own_splits(recipe, world).items()
        }
        say_unlearned(vocabulary, splits[min(splits)], say)
        say_named_twice(recipe, say)
        return cls(splits, open_heldout(recipe, vocabulary, model, say))

    @property
    def transforms(self) -> dict[str, Transform]:
        """What items are loaded with, which is the same in all splits."""
        return self.splits[min(self.splits)].transforms

    def leave_out_too_long(self, recipe: Recipe, alone: Plan, orchestrator: Orchestrator, say: Say) -> None:
        """Leave out examples for which no rank has memory, in a job without stages.

        alone: the Plan by which each rank has whole examples.
        """
        # Keys of items that training cuts by itself come by group-cast (`dispatch/cut_batch.py`).
        shared, exchange = _shared_by(recipe, orchestrator), "group_cast"
        for part in self.splits.values():
            leave_out_too_long(part, alone, recipe.data.max_bad_fraction, say, shared_by=shared, exchange=exchange)
        if self.heldout is not None:
            leave_out_of_evaluation(self.heldout, alone, say, exchange=exchange)

    def agreed(self, recipe: Recipe, model: MLLM, world: World, say: Say) -> Examples | OwnSplits:
        """The examples to train on, which all ranks know alike and which ask for what the model has. A collective."""
        splits = list(self.splits.values())
        check_items_to_make(model, splits, world)
        check_items_to_read(model, splits, world)
        check_buckets_used(recipe, model, splits, world)
        dataset = joined_splits(self.splits, world, say) if recipe.data.is_split else self.splits[0]
        check_same_examples(world, dataset, self.heldout)
        check_prompts(self.heldout, recipe.evaluate, world, say)
        return dataset


def _shared_by(recipe: Recipe, orchestrator: Orchestrator) -> dict[str, int]:
    """Module -> the most ranks over which training cuts an item of it; of those whose items it cuts."""
    costs = orchestrator.costs
    if not recipe.balance.cut_by or not isinstance(costs, StepCosts):
        return {}
    return dict.fromkeys((BACKBONE, *costs.times.item_keys), orchestrator.num_ranks)
