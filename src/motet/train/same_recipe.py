"""Whether all ranks have read one recipe.

Each rank reads it by itself, on machines without a common disk from files of their own. Ranks that share weights and
have other rates, seeds or modules would train on, and end with weights that are of neither recipe.
"""

from __future__ import annotations

import hashlib
import json

from motet.core.errors import JointUserError
from motet.train.checkpoint.same_run import own_files, stated, table_leaves
from motet.train.recipe.recipe import Recipe
from motet.train.world import World

_MAX_SHOWN = 60


def check_same_recipe(recipe: Recipe, world: World) -> None:
    """Raise JointUserError if a rank has read another recipe than rank 0, or has other files beside it. A collective.

    Those are files of the user's own code, and what directories say of models. Paths may differ: machines may have the
    same files elsewhere.
    """
    with world.together():
        said, files = _said(recipe), own_files(recipe)
    digests = world.gather(hashlib.blake2b(json.dumps([said, _texts(files)]).encode(), digest_size=16).hexdigest())
    if len(set(digests)) == 1:
        return
    everywhere = world.gather((said, files))
    (first, first_files), rank = everywhere[0], next(n for n, digest in enumerate(digests) if digest != digests[0])
    other, other_files = everywhere[rank]
    if key := next((key for key in sorted({*first, *other}) if first.get(key) != other.get(key)), ""):
        theirs, ours = (_shown(each.get(key)) for each in (other, first))
        raise JointUserError(
            f"Rank {rank} has read another recipe than rank 0: there {key} is {theirs}, and here {ours}; start all "
            "ranks with the same recipe and the same --set."
        )
    texts, theirs_texts = _texts(first_files), _texts(other_files)
    key = next(key for key in sorted({*texts, *theirs_texts}) if texts.get(key) != theirs_texts.get(key))
    raise JointUserError(
        f"Rank {rank} has another text of the file of {key} than rank 0: copy one file to all machines."
    )


def _said(recipe: Recipe) -> dict[str, str]:
    """All that a recipe says, with defaults, but for paths; and what its directories say. By key, as JSON."""
    leaves = {key: json.dumps(value, sort_keys=True) for key, value in table_leaves(recipe.model_dump(mode="json"))}
    return {key: value for key, value in leaves.items() if "/" not in value} | {
        key: value for key, value in stated(recipe).items() if "/" not in value
    }


def _texts(files: dict[str, str]) -> dict[str, str]:
    return {key: file.rpartition(" ")[2] for key, file in sorted(files.items())}


def _shown(value: str | None) -> str:
    if value is None:
        return "not said"
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]} ..."
