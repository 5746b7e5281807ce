"""Cases of mutated real files for bad_inputs.py: images, clips, manifests, tokenizers, models, recipes, checkpoints,
Plans, profiles, indexes and run folders, each with its verdict.

Each is made from a file that is whole, by the libraries' own writers, and damaged in one place. Where a verdict can be
argued about, it is what a user would want, and a comment beside it says why.
"""

from __future__ import annotations

from collections.abc import Iterator

from bad.files.audio import audio_cases
from bad.files.checkpoints import checkpoint_cases
from bad.files.images import image_cases
from bad.files.manifests import manifest_cases
from bad.files.media import place_cases
from bad.files.models import model_cases
from bad.files.plans import plan_cases
from bad.files.recipes import folder_cases, index_cases, recipe_cases
from bad.run import Case


def file_cases(seed: int) -> Iterator[Case]:
    """All of them; the seed draws which bits are flipped."""
    yield from place_cases()
    yield from image_cases(seed)
    yield from audio_cases(seed)
    yield from manifest_cases(seed)
    yield from model_cases(seed)
    yield from checkpoint_cases(seed)
    yield from plan_cases(seed)
    yield from recipe_cases()
    yield from folder_cases()
    yield from index_cases(seed)
