"""Whether all ranks have read one recipe, beside the same files and packages.

Each rank reads all of it by itself, on machines without a common disk from files of their own. Ranks that share weights
and have other rates, seeds, weights or layers would train on, and end with a model that is of neither.
"""

from __future__ import annotations

import hashlib
import json

import torch
import transformers

import motet
from motet.core.errors import JointUserError
from motet.models.stored import weights_digest
from motet.train.checkpoint.same_run import own_files, stated, table_leaves
from motet.train.recipe.recipe import Recipe
from motet.train.world import World

_PACKAGES = (motet, torch, transformers)
_MAX_SHOWN = 60


def check_same_recipe(recipe: Recipe, world: World) -> None:
    """Raise JointUserError if a rank has read another recipe than rank 0, or has other files or packages. A collective.

    Files are those of the user's own code, of weights, and what directories say of models. Paths may differ: machines
    may have the same files elsewhere.
    """
    with world.together():
        own = _said(recipe), _contents(recipe)
    digests = world.gather(hashlib.blake2b(json.dumps(own, sort_keys=True).encode(), digest_size=16).hexdigest())
    if len(set(digests)) == 1:
        return
    everywhere = world.gather(own)
    rank = next(number for number, digest in enumerate(digests) if digest != digests[0])
    (said, contents), (others_said, others_contents) = everywhere[0], everywhere[rank]
    if key := _first_other(said, others_said):
        ours, theirs = (_shown(each.get(key)) for each in (said, others_said))
        raise JointUserError(
            f"Rank {rank} has not what rank 0 has: there {key} is {theirs}, and here {ours}; start all ranks with the "
            "same recipe, --set and versions."
        )
    raise JointUserError(
        f"Rank {rank} has another {_first_other(contents, others_contents)} than rank 0: copy the same files to all "
        "machines."
    )


def _said(recipe: Recipe) -> dict[str, str]:
    """All that a recipe says, with defaults, but for paths; what its directories say; and versions. By key, as JSON."""
    leaves = {key: json.dumps(value, sort_keys=True) for key, value in table_leaves(recipe.model_dump(mode="json"))}
    said = {key: value for key, value in (leaves | stated(recipe)).items() if "/" not in value}
    # Builds of a version for other devices compute alike.
    return said | {f"the version of {package.__name__}": package.__version__.partition("+")[0] for package in _PACKAGES}


def _contents(recipe: Recipe) -> dict[str, str]:
    """Files, in words -> what tells whether they are the same."""
    own = {f"text of the file of {key}": file.rpartition(" ")[2] for key, file in own_files(recipe).items()}
    return own | {
        f"content of the weights in the directory of {name}": weights_digest(path)
        for name, path in recipe.modules.paths.items()
    }


def _first_other(first: dict[str, str], other: dict[str, str]) -> str:
    """The first key whose value differs; "" if none does."""
    return next((key for key in sorted({*first, *other}) if first.get(key) != other.get(key)), "")


def _shown(value: str | None) -> str:
    if value is None:
        return "not said"
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]} ..."
