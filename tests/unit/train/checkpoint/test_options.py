"""Options of an optimizer's groups in a checkpoint, by weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motet.core.errors import UserError
from motet.train.checkpoint.options import options_of, over_ranks, restore_options


def sgd(model, rates):
    """An optimizer of a group for each weight."""
    return torch.optim.SGD([{"params": [weight], "lr": rate} for weight, rate in zip(model.parameters(), rates)])


def test_groups_take_the_numbers_that_their_weights_had_and_keep_their_switches():
    model = nn.Linear(2, 3)
    stored = over_ranks([options_of(model, sgd(model, (0.5, 0.25)))])
    again = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], torch.tensor(1.0), foreach=True)
    restore_options(model, again, stored)
    assert [(float(group["lr"]), group["foreach"]) for group in again.param_groups] == [(0.25, True), (0.5, True)]
    assert isinstance(again.param_groups[0]["lr"], torch.Tensor)


def test_weights_of_several_options_in_one_group_are_refused():
    model = nn.Linear(2, 3)
    stored = options_of(model, sgd(model, (0.5, 0.25)))
    with pytest.raises(UserError, match="other options of the optimizer for bias than for weight, which are in one"):
        restore_options(model, torch.optim.SGD(model.parameters(), 1.0), stored)
