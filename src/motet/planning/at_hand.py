"""What a recipe would train on here."""

from __future__ import annotations

import os

import torch

from motet.cost.catalogue import device_called
from motet.train.recipe.recipe import Recipe


def device_at_hand(recipe: Recipe) -> str:
    """What a rank runs on, by its name in the catalogue; "" for a GPU that is not in it."""
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    found = device_called(torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    return "" if found is None else found.name
