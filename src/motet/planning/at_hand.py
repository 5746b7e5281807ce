"""What a recipe would train on here."""

from __future__ import annotations

import os

import torch

from motet.train.device import device_name
from motet.train.recipe.recipe import Recipe


def device_at_hand(recipe: Recipe) -> str:
    """What a rank runs on, by its name in the catalogue; "" for a GPU that is not in it."""
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return device_name(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
