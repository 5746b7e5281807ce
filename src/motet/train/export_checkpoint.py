"""`motet export`: a checkpoint as the directory that `export.at_end` writes, in one process and without training.

A checkpoint has tensors under the names of the whole model, however many ranks wrote it and under whichever Plan. The
recipe of its run says of which model: recipe.toml in the run's folder, as the run itself wrote it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.models.build import build_mllm
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.train.checkpoint.contents import Damaged, RunState, verify
from motet.train.checkpoint.folder import check_checkpoint
from motet.train.checkpoint.remote import checkpoint_at, is_stored
from motet.train.checkpoint.restoring import load_weights
from motet.train.checkpoint.same_run import check_beside, check_stated, stated
from motet.train.checkpoint.state import store_frozen
from motet.train.export import check_adapters, write_export
from motet.train.recipe.drawn import DrawnRecipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.run_folder import writing

_CPU = torch.device("cpu")


def export_checkpoint(checkpoint: Path | str, out: Path, recipe_file: Path | None, overrides: Sequence[str]) -> None:
    """Write the model of a checkpoint to `out`, which must be empty or not there.

    checkpoint:  a folder, or a URL, which is copied to a temporary folder beside `out`.
    recipe_file: None for that of the checkpoint's run; a URL has none.
    Raises UserError for a checkpoint that is not whole, that does not fit the recipe's model or lies in no run, and for
    an `out` that cannot be written; all of it before anything is written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("motet export is one process, and would write the same files on each rank; leave out torchrun.")
    if not is_stored(checkpoint):
        _export(Path(checkpoint), out, recipe_file, overrides)
        return
    remote, name = checkpoint_at(str(checkpoint))
    if recipe_file is None:
        raise UserError(
            f"{checkpoint}: no recipe lies beside a checkpoint by URL; name the run's recipe with --recipe."
        )
    check_empty(out)
    load_recipe(recipe_file, overrides)  # What is wrong with it is said before anything is copied.
    with writing(out, "--out"):
        folder = tempfile.TemporaryDirectory(prefix=".motet-", dir=out.absolute().parent)
    with folder:
        print(f"Fetching {checkpoint}.")
        _export(remote.fetch(name, Path(folder.name)), out, recipe_file, overrides)


def _export(checkpoint: Path, out: Path, recipe_file: Path | None, overrides: Sequence[str]) -> None:
    check_checkpoint(checkpoint)
    check_empty(out)
    recipe = _recipe(checkpoint, recipe_file, overrides)
    state = _verified(checkpoint)
    beside = recipe.modules.beside_adapters(recipe.run.seed)
    check_beside(checkpoint, state, replace(state.progress, beside=beside, scales=recipe.modules.adapter_scales))
    check_stated(checkpoint, state, stated(recipe), "model.", ", so it is not of the model of this recipe: set it back")
    model = _model(recipe, checkpoint, state)
    with writing(out, "--out"):
        write_export(model, recipe, out, model.state_dict(), state.progress)
    print(f"Exported step {state.step} to {out}; its README.md says what lies there.")


def check_empty(out: Path) -> None:
    """Raise UserError for a folder that has something in it, or that is none."""
    with writing(out, "--out"):
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out} is no folder; name one that is empty, or not there.")
        if out.exists() and any(out.iterdir()):
            raise UserError(f"--out {out} is not empty; name a folder that is empty, or not there.")
        out.absolute().parent.mkdir(parents=True, exist_ok=True)


def _recipe(checkpoint: Path, given: Path | None, overrides: Sequence[str]) -> Recipe:
    """The recipe by which a checkpoint was trained."""
    file = given or checkpoint.absolute().parent.parent / "recipe.toml"
    if given is None and not file.is_file():
        raise UserError(
            f"{checkpoint} does not lie in the folder of its run, as there is no {file}; name the run's recipe with "
            "--recipe."
        )
    recipe = load_recipe(file, overrides)
    if isinstance(recipe, DrawnRecipe):
        raise UserError(f"{file}: a model of shapes cannot be exported: transformers has no class that would read it.")
    check_adapters(recipe)
    return recipe


def _verified(checkpoint: Path) -> RunState:
    try:
        return verify(checkpoint)
    except Damaged as damage:
        raise UserError(f"{checkpoint} is no complete Motet checkpoint: {damage}.") from damage


def _model(recipe: Recipe, checkpoint: Path, state: RunState) -> MLLM:
    """The model on the CPU, with the weights of a checkpoint."""
    dtype = getattr(torch, recipe.run.dtype)
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size, dtype, recipe.run.seed, deferred=True)
    beside = (state.beside or {}).keys()
    store_frozen(model, recipe.modules.lora.keys() - beside)
    # Only beside adapters does a checkpoint lack weights; all others would be read twice.
    materialise(model, recipe.modules, recipe.run.seed, _CPU, {BACKBONE, *recipe.modules.encoders} - beside)
    load_weights(checkpoint, model, None)
    return model
