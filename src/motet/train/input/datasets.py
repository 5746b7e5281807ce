"""Opens the examples of a recipe in the form that its model takes, and checks that a run can use them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from motet.core.errors import JointUserError, UserError
from motet.core.example import ItemText
from motet.core.grid_positions import AS_TEXT
from motet.core.modalities import VIDEO
from motet.core.words import counted_words
from motet.data.dataset import Dataset
from motet.data.drawn import DrawnDataset, DrawnVocabulary
from motet.data.examples import Examples
from motet.data.manifest import Manifest
from motet.data.modality import Modality
from motet.data.panned_images import PannedImages
from motet.data.remote import is_url
from motet.data.split_images import SplitImages
from motet.data.split_videos import SplitVideos
from motet.data.splits import OwnSplits
from motet.data.text import ChatTokenizer
from motet.data.timed_videos import TimedVideos
from motet.data.transforms import Transform
from motet.models.mllm import MLLM
from motet.train.checkpoint.choice import Say
from motet.train.input.own_splits import say_left_out
from motet.train.recipe.drawn import DrawnRecipe
from motet.train.recipe.recipe import Recipe
from motet.train.world import World

_INDEX_PROGRESS_EVERY_S = 5.0


def open_dataset(
    recipe: Recipe,
    manifests: Sequence[str],
    vocabulary: ChatTokenizer | DrawnVocabulary,
    model: MLLM,
    say: Say,
    *,
    whole: bool = False,
) -> Examples:
    """The examples of the manifests, or those that are drawn, in the form that the model takes.

    The model's weights are not read. whole: examples are not truncated, but left out, as answers are compared whole.
    """
    _check_fits_positions(recipe, model, answers=whole)
    modalities = {
        name: Modality(
            recipe.transform(name),
            module.num_tokens,
            module.lengths,
            module.segments,
            is_made=name in model.generators,
            max_turn=getattr(module, "max_turn", 0),
            grids=module.grids if model.backbone.places_items and name in model.encoders else None,
            behind=model.backbone.behind_grids if module.has_raster else AS_TEXT,
            item_text=_item_text(vocabulary, recipe.transform(name)),
        )
        for name, module in model.measured.items()
    }
    dataset: Examples
    if isinstance(recipe, DrawnRecipe):
        dataset = DrawnDataset(
            recipe.drawn(),
            modalities,
            vocabulary_size=vocabulary.vocabulary_size,
            seed=recipe.data.seed,
            max_sequence_length=recipe.data.max_sequence_length,
        )
    else:
        dataset = Dataset.open(
            manifests,
            vocabulary,
            modalities,
            combine=recipe.modules.combine,
            max_sequence_length=recipe.data.max_sequence_length,
            too_long="drop" if whole and recipe.data.too_long == "truncate" else recipe.data.too_long,
            index_folder=recipe.data.index_folder,
            copies=recipe.data.copies,
            num_workers=recipe.data.num_workers,
            progress=_index_progress(manifests, say),
        )
    say_left_out(manifests or ("[workload]",), dataset.left_out, dataset.num_in_manifests, say)
    if dataset.left_out.num_too_long and not (whole or recipe.is_drawn or recipe.data.too_long == "truncate"):
        say(
            f"Examples longer than data.max_sequence_length = {recipe.data.max_sequence_length:,} are left out; "
            'data.too_long = "truncate" would cut them there, at an item that fits.'
        )
    return dataset


def open_heldout(recipe: Recipe, vocabulary: ChatTokenizer | DrawnVocabulary, model: MLLM, say: Say) -> Dataset | None:
    """The held-out examples of a recipe, none of them truncated; None if it has none. Raises UserError."""
    if not recipe.data.heldout:
        return None
    heldout = open_dataset(recipe, recipe.data.heldout, vocabulary, model, say, whole=True)
    assert isinstance(heldout, Dataset), "drawn examples are not held out"
    return heldout


def say_named_twice(recipe: Recipe, say: Say) -> None:
    """Say which manifests, or shards, are in `data.train` twice, or there and in `data.heldout`; both may be meant."""
    data = recipe.data
    named = () if data.is_split else data.train, data.heldout  # Splits that are alike are refused.
    train, heldout = ([file for manifest in manifests for file in _files_of(manifest)] for manifests in named)
    for key, files in (("train", train), ("heldout", heldout)):
        if twice := [file for file, count in Counter(files).items() if count > 1]:
            how = " (data.mixture says how often the examples of a manifest come)" if key == "train" else ""
            say(
                f"data.{key} has {_first_of(twice)} more than once, so each of its examples counts as several; name it "
                f"once if that is not meant{how}."
            )
    if both := [file for file in dict.fromkeys(heldout) if file in set(train)]:
        say(
            f"data.heldout has {_first_of(both)}, which is in data.train, too: what is measured on these examples says "
            "how well they were learned, not how well others would be answered."
        )


def _files_of(manifest: str) -> list[str]:
    """What a manifest is read from, by names that are equal for the same file; a URL is its own."""
    return (
        [manifest] if is_url(manifest) else [str(Path(str(file)).resolve()) for file in Manifest.find(manifest).files]
    )


def _first_of(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} (and {counted_words(len(files) - 1, 'other')})"


def say_unlearned(vocabulary: ChatTokenizer | DrawnVocabulary, dataset: Examples, say: Say) -> None:
    """Say what the chat template keeps from being learned around answers, where the first example is a conversation."""
    if not isinstance(vocabulary, ChatTokenizer) or not isinstance(dataset, Dataset):
        return
    lead, ends, prompt = vocabulary.unlearned_lead, vocabulary.ends_answers, vocabulary.untrained_prompt
    if (not lead and not prompt and ends) or dataset.conversation(0).is_document:
        return
    if lead:
        say(
            f"The tokenizer's chat template writes {lead!r} behind the prompt for an answer and before {{% generation "
            "%}, so it is not learned, and a model may not write it; begin {% generation %} before it if it is to."
        )
    if prompt:
        say(
            f"The tokenizer's chat template ends the prompt for an answer with {prompt!r}, and does not write it "
            "before answers that are there: they are learned without it, and asked for, held-out ones too, behind it; "
            "let the template write both alike."
        )
    if not ends:
        say(
            "The tokenizer's chat template writes no special token behind the last answer, so no end of it is learned, "
            "and a model may go on writing; let the template write eos_token there if it is to stop."
        )


def check_same_examples(world: World, dataset: Examples | OwnSplits, heldout: Dataset | None) -> None:
    """Raise JointUserError if ranks see different examples, and are to see the same."""
    parts = {"train": dataset, "heldout": heldout}
    shared = {key: part for key, part in parts.items() if part is not None and not isinstance(part, OwnSplits)}
    by_rank = world.gather({key: (part.num_examples, part.fingerprint) for key, part in shared.items()})
    for rank, datasets in enumerate(by_rank):
        for key, other in datasets.items():
            if other != (first := by_rank[0][key]):
                raise JointUserError(
                    f"data.{key} is not the same everywhere: rank 0 finds {counted_words(first[0], 'example')} that "
                    f"can be used, rank {rank} finds {other[0]:,}, or others; give all machines the same files."
                )


def check_bad_at_indexing(recipe: Recipe, dataset: Examples | OwnSplits) -> None:
    """Raise UserError if more examples were left out of the index as bad than data.max_bad_fraction allows."""
    num_bad, allowed = dataset.left_out.num_bad, recipe.data.max_bad_fraction
    if num_bad > allowed * dataset.num_in_manifests:
        raise UserError(
            f"{counted_words(num_bad, 'example has', 'examples have')} files that cannot be used, of "
            f"{dataset.num_in_manifests:,} for training, more than data.max_bad_fraction = {allowed:g} allows; the "
            f"first: {dataset.left_out.first()}; mend or remove them, or allow more."
        )


def check_items_to_make(model: MLLM, datasets: Iterable[Examples], world: World) -> None:
    """Raise JointUserError if a generator learns and no rank has an item for it to make. A collective."""
    for name, generator in model.generators.items():
        learns = any(parameter.requires_grad for parameter in generator.parameters())
        # Drawn examples have what the recipe's workload says.
        is_there = any(not isinstance(dataset, Dataset) or dataset.has_items(name) for dataset in datasets)
        if not any(world.gather(is_there or not learns)):
            raise JointUserError(
                f"model.generators.{name} learns to make items of answers, and no answer of data.train has any; add "
                "examples whose answers do, or remove the generator."
            )


def check_items_to_read(model: MLLM, datasets: Sequence[Examples], world: World) -> None:
    """Raise JointUserError if all that learns are encoders whose items no rank has any of. A collective."""
    encoders = [name for name, module in model.encoders.items() if any(p.requires_grad for p in module.parameters())]
    others = (model.backbone, *model.generators.values())
    learns = any(parameter.requires_grad for module in others for parameter in module.parameters())
    # Drawn examples have what the recipe's workload says.
    is_there = any(
        not isinstance(dataset, Dataset) or dataset.has_items(name) for dataset in datasets for name in encoders
    )
    if not any(world.gather(learns or is_there)):
        raise JointUserError(
            f"Nothing learns: only {' and '.join(f'model.encoders.{name}' for name in encoders)} would, and no example "
            "of data.train has anything to read for it; add examples that have, or let another part learn."
        )


def check_buckets_used(recipe: Recipe, model: MLLM, datasets: Iterable[Examples], world: World) -> None:
    """Raise JointUserError for a bucket of a transform that no example of any rank fits. A collective."""
    for name in model.measured:
        transform = recipe.transform(name)
        if not (buckets := getattr(transform, "buckets", None)):
            continue
        own = [dataset.sizes_of(name).tolist() for dataset in datasets if isinstance(dataset, Dataset)]
        used = {tuple(size) for of_rank in world.gather(own) for sizes in of_rank for size in sizes}
        for width, height in buckets:
            if (height // transform.patch_size, width // transform.patch_size) not in used:
                raise JointUserError(
                    f"transforms.{recipe.table_of(name)}.buckets has [{width}, {height}], which no example of "
                    f"data.train fits that {name} computes; remove it."
                )


def _check_fits_positions(recipe: Recipe, model: MLLM, answers: bool) -> None:
    """Raise UserError if a sequence may be longer than a table of learned positions, or grow longer as it is answered.

    A document may not be found to be too long in a step, by the one rank that has it.
    """
    rows, allowed = model.backbone.max_rows, recipe.data.max_sequence_length
    if rows is None:
        return
    most = rows - (recipe.evaluate.max_new_tokens if answers else 0)
    if allowed is None or allowed > most:
        raise UserError(
            f"data.max_sequence_length is {'not set' if allowed is None else f'{allowed:,}'}, but model.backbone has "
            f"positions for {rows:,} rows{' with the evaluate.max_new_tokens of an answer' if answers else ''}; set it "
            f"to {most} at most."
        )


def _item_text(
    vocabulary: ChatTokenizer | DrawnVocabulary, transform: Transform
) -> Callable[[tuple[int, ...]], ItemText | None] | None:
    """As of `Modality`. Raises UserError for a tokenizer that tells tiles apart, beside a transform that makes none."""
    if not isinstance(vocabulary, ChatTokenizer):
        return None
    if isinstance(transform, TimedVideos):
        return lambda key: vocabulary.timed_text(VIDEO, transform.times(key))
    text = vocabulary.item_text(transform.modality)
    if isinstance(transform, SplitVideos):
        return partial(_text_of_tiles, vocabulary, transform, text)
    if text is not None and not isinstance(transform, SplitImages | PannedImages):
        raise UserError(
            "data.tokenizer is of a model that cuts images into tiles and marks each of them, which the transform here "
            "does not; take the tokenizer of another model, or the whole model (model.path)."
        )
    return text


def _text_of_tiles(
    vocabulary: ChatTokenizer,
    transform: SplitVideos,
    of_images: Callable[[tuple[int, ...]], ItemText] | None,
    key: tuple[int, ...],
) -> ItemText | None:
    """What stands in the place of an image or a video, by one of the transform's `text_keys`."""
    if (times := transform.times(key)) is not None:
        return vocabulary.frames_text(*times)
    return of_images(key) if of_images else None


def _index_progress(manifests: Sequence[str], say: Say) -> Callable[[int, float], None]:
    """A function that prints the progress of building an index every few seconds."""
    last_s = time.monotonic()

    def show(num_examples: int, share: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _INDEX_PROGRESS_EVERY_S:
            last_s = time.monotonic()
            say(f"Indexing {', '.join(manifests)}: {counted_words(num_examples, 'example')}, {share:.0%}")

    return show
