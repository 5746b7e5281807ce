"""Checks before training that a recipe's transforms make the rows that its encoders take.

Equal shapes are not enough. A row of 192 values may be 8 x 8 pixels in three colours, or a smaller patch in several
frames; patches may be in raster order or block by block; pixels may be centred on another mean. So a transform's
options are compared key by key with what the encoder declares (`contract.Encoder.takes`), and with the file beside its
weights (preprocessor_config.json).
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from motet.core.errors import UserError
from motet.core.modalities import IMAGE
from motet.data.transforms import Transform
from motet.models.contract import AudioRows, ImageRows
from motet.models.generator import GeneratorModule
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.train.input.latents import LatentTransform
from motet.train.processors import preprocessed
from motet.train.recipe.recipe import Recipe

_PREPROCESSED = {
    "image": {"mean": "image_mean", "std": "image_std", "resample": "resample"},
    "audio": {"sampling_rate": "sampling_rate", "hop_length": "hop_length", "n_fft": "n_fft"},
}
"""Modality -> options of a transform that no shape shows, and their names in HF's files."""


def check_rows(recipe: Recipe, model: MLLM) -> None:
    """Raise UserError for the first option of a transform that differs from its encoder or the encoder's files."""
    for name, module in model.encoders.items():
        transform = recipe.transform(name)
        key = recipe.table_of(name)
        # What a callback makes of the rows of a transform is its own affair.
        if module.before is None:
            _check_takes(name, key, transform, module)
        if path := recipe.modules.encoders[name].path:
            _check_preprocessed(key, transform, path)
        _run(name, key, transform, module)
    for name, generator in model.generators.items():
        _check_made(name, recipe.table_of(name), recipe.transform(name), generator, recipe.fsdp.param_dtype)


def _check_made(name: str, key: str, transform: Transform, module: GeneratorModule, compute: str | None) -> None:
    """Raise UserError for rows that a generator cannot learn to make."""
    if isinstance(transform, LatentTransform):
        transform = transform.image
    row_dim = getattr(module.generator, "row_dim", transform.row_dim)
    if transform.row_dim != row_dim:
        raise UserError(
            f"transforms.{key} makes rows of {transform.row_dim} values, but model.generators.{name} makes rows of "
            f"{row_dim}; let both be one (config.row_dim, in_channels of a UNet; channels * patch_size squared, where "
            "patch_size is the factor of a VAE)."
        )
    if hasattr(module.generator, "row_dim") and getattr(transform, "merge_size", 1) != 1:
        raise UserError(
            f"transforms.{key}.merge_size is {transform.merge_size}, but model.generators.{name} takes patches in "
            "raster order; set it to 1, or give the generator a table of its own."
        )
    if getattr(transform, "temporal_patch_size", 1) != 1:
        raise UserError(
            f"transforms.{key}.temporal_patch_size is {transform.temporal_patch_size}, so that "
            f"model.generators.{name} would make each patch several times; set it to 1, or give the generator a table "
            "of its own."
        )
    if vae := getattr(module.generator, "vae", None):
        _check_pixels(name, key, transform)
        if compute == "float16" and vae.vae.config.force_upcast:
            raise UserError(
                f'fsdp.param_dtype = "float16" is beyond what the VAE of model.generators.{name} can hold '
                '(force_upcast in its config.json is true); take "bfloat16" or "float32".'
            )


def _check_pixels(name: str, key: str, transform: Transform) -> None:
    """Raise UserError for pixels that are not from -1 to 1, as the VAEs of diffusers take them."""
    for option in ("mean", "std"):
        if any(value != 0.5 for value in getattr(transform, option, ())):
            raise UserError(
                f"transforms.{key}.{option} is not 0.5, but the VAE of model.generators.{name} takes pixels from -1 to "
                "1; remove it, or give the generator a table of its own."
            )


def _check_takes(name: str, key: str, transform: Transform, module: ModalityModule) -> None:
    takes = getattr(module.encoder, "takes", None)
    if not isinstance(takes, ImageRows | AudioRows | None):
        raise UserError(f"model.encoders.{name}: takes is {takes!r}; it must be ImageRows or AudioRows.")
    for field in fields(takes) if takes is not None else ():
        taken, made = getattr(takes, field.name), getattr(transform, field.name, None)
        if made is None:
            raise UserError(
                f"transforms.{key} makes rows of {transform.modality}, but model.encoders.{name} reads rows that have "
                f"{field.name}; name an encoder after what it reads, or say it by `reads`."
            )
        if made != taken:
            raise UserError(
                f"transforms.{key}.{field.name} is {made}, but model.encoders.{name} takes rows with {field.name} = "
                f"{taken}; set it to that."
            )
    joins = module.projector.downsample > 1
    says = hasattr(module.encoder, "grid") or hasattr(module.between, "num_rows")
    if joins and transform.modality == "image" and not says:
        raise UserError(
            f"model.encoders.{name}.projector.{module.joins_by} joins rows of an image, and "
            f"{type(module.encoder).__name__} does not say how they lie; give it `grid` (see motet.models.contract), "
            f"or set {module.joins_by} to 1."
        )


def _check_preprocessed(name: str, transform: Transform, path: Path) -> None:
    for file, stored in preprocessed(path):
        differ, told = {}, []
        if stored.get("do_normalize") is False:
            stored = stored | {"image_mean": 0.0, "image_std": 1.0}
        if stored.get("do_resize") is False or stored.get("resample") is None:
            stored = {key: value for key, value in stored.items() if key != "resample"}
        white = _white(path / file, stored) if transform.modality == IMAGE else 1.0
        for ours, theirs in _PREPROCESSED.get(transform.modality, {}).items():
            is_scaled = white != 1.0 and ours != "resample"
            if theirs not in stored:
                if is_scaled:
                    raise UserError(
                        f"{path / file} scales pixels to 0 ... {white:.6g} and has no {theirs}, so that it does not "
                        f"say what they become; write it there, or remove the file and set transforms.{name}.{ours}."
                    )
                continue
            made = _divided(stored[theirs], white) if is_scaled else stored[theirs]
            if not _equal(getattr(transform, ours), made):
                differ[ours] = made
                told.append(f"{theirs} = {stored[theirs]}")
        if differ:
            scaled = "" if white == 1.0 else f", of pixels from 0 to {white:.6g} (do_rescale, rescale_factor)"
            lines = ", ".join(f"{ours} = {made}" for ours, made in differ.items())
            raise UserError(
                f"transforms.{name} is not what the weights in {path} were made with: {file} has "
                f"{' and '.join(told)}{scaled}; set {lines}, or remove the file if you mean another."
            )


def _white(file: Path, stored: dict[str, Any]) -> float:
    """What HF's processor scales a pixel of 255 to, before it subtracts the mean; 1.0 also if about 1."""
    factor = stored.get("rescale_factor")
    if stored.get("do_rescale") is False:
        factor = 1
    elif factor is None:
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise UserError(f"{file} has rescale_factor = {factor!r}; it must be a number above 0, mostly 1 / 255.")
    return 1.0 if _equal(1.0, 255 * factor) else float(255 * factor)


def _divided(stored: Any, divisor: float) -> Any:
    """A number, or a list of them, divided; anything else as it is, which then equals nothing."""
    try:
        values: Any = np.round(np.asarray(stored, np.float64) / divisor, 6).tolist()
    except (TypeError, ValueError):
        return stored
    return values


def _equal(made: float | tuple[float, ...], stored: Any) -> bool:
    """Whether two options are equal: each a number, or a list with a number a channel or one for all channels."""
    try:
        ours, theirs = np.broadcast_arrays(np.asarray(made, np.float64), np.asarray(stored, np.float64))
    except (TypeError, ValueError):
        return False
    return np.allclose(ours, theirs, rtol=1e-3, atol=1e-6)


def _run(name: str, key: str, transform: Transform, module: ModalityModule) -> None:
    """Run the encoder on one small item, in shapes only if its weights are still to come (`models/materialise.py`).

    Raises UserError if it cannot take the rows.
    """
    sizes = transform.sizes(np.array([[1, 1]], dtype=np.int64))
    values = torch.zeros(int(module.num_values(sizes).sum()), transform.row_dim)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(tensor.is_meta for tensor in state.values()):
        if module.before or module.between or module.after:
            return  # Code of a user's own may need values.
        values, state = values.to("meta"), {key: tensor.to("meta") for key, tensor in state.items()}
    try:
        with torch.no_grad():
            functional_call(module, state, (values, torch.from_numpy(sizes)))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"transforms.{key} does not fit model.encoders.{name}: it makes rows of {transform.row_dim} values, "
            f"which the encoder cannot take ({reason})."
        ) from error
