"""Models and noise schedules of diffusers: made of a config, or read from a directory that diffusers writes.

DIR/config.json                         a model alone, as `ModelMixin.save_pretrained` writes it, or
DIR/unet/config.json                    a pipeline of a UNet, or
DIR/transformer/config.json             one of a transformer, with
DIR/vae/config.json                     what makes latents of pixels, perhaps, and
DIR/scheduler/scheduler_config.json     the noise that the model learned with.

Nothing is fetched: a name on the hub is a directory that is missing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.core.words import counted_words
from motet.models.config_file import one_line
from motet.models.families.bounds import check_bounds
from motet.models.load import check_files

UNET, SD3, PIXART = "UNet2DConditionModel", "SD3Transformer2DModel", "PixArtTransformer2DModel"
AUTOENCODER = "AutoencoderKL"
_FOLDERS = {UNET: "unet", SD3: "transformer", PIXART: "transformer", AUTOENCODER: "vae"}
"""Class -> its folder in a pipeline."""
_UNBOUNDED = "lambda_min_clipped"
"""What bounds the sampler of a DPMSolverMultistepScheduler; diffusers writes its default as -Infinity."""
_SCHEDULER = Path("scheduler", "scheduler_config.json")


def check_diffusers(where: str) -> ModuleType:
    """The package diffusers. where: the key of the recipe that needs it. Raises UserError if it is not installed."""
    try:
        import diffusers
    except ImportError as error:
        raise UserError(
            f"{where} needs the package diffusers, which is not installed; run pip install 'motet[diffusion]'"
        ) from error
    return diffusers


def model_of_config(where: str, name: str, options: dict[str, Any]) -> nn.Module:
    """A model of diffusers with random weights. Raises UserError for options that diffusers does not take.

    where: the table of the recipe. name: of its class.
    """
    kind = getattr(check_diffusers(where), name)
    check_bounds(f"{where}.config.", options)
    try:
        with _quiet():
            return kind(**options)
    except Exception as error:
        # diffusers checks options with exceptions of any kind.
        raise UserError(f"{where}.config: no {name} can be made of it ({one_line(error)})") from error


def has_model(path: Path, name: str) -> bool:
    """Whether a directory is that of a pipeline with a model of this class."""
    return (path / _FOLDERS[name] / "config.json").is_file()


def denoiser_class(where: str, path: Path) -> str:
    """The class of the denoiser in a directory. Raises UserError for one that has none that is known."""
    known = UNET, SD3, PIXART
    if found := [name for name in known if has_model(path, name)]:
        known = tuple(name for name in found if _FOLDERS[name] == _FOLDERS[found[0]])
    folder = _folder(where, path, *dict.fromkeys(_FOLDERS[name] for name in known))
    named: str = _stored(where, folder / "config.json", known)["_class_name"]
    return named


def model_of_directory(where: str, path: Path, name: str, dtype: torch.dtype) -> nn.Module:
    """The model of this class in a directory, with its weights; on meta, with shapes only.

    Raises UserError for a directory that is missing or has another model, and for weights that are damaged, missing,
    too many, or of another shape.
    """
    kind, folder = getattr(check_diffusers(f"{where}.path"), name), _folder(where, path, _FOLDERS[name])
    options = _stored(where, folder / "config.json", (name,))
    own = {key: value for key, value in options.items() if not key.startswith("_")}
    if unknown := sorted(own.keys() - inspect.signature(kind.__init__).parameters.keys()):
        raise UserError(f"{where}.path: {folder / 'config.json'} has {unknown[0]}, which {name} does not know")
    if torch.get_default_device().type == "meta":
        return model_of_config(where, name, own)
    check_files(f"{where}.path", folder)
    try:
        with _quiet():
            model, info = kind.from_pretrained(
                folder,
                torch_dtype=dtype,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
                low_cpu_mem_usage=False,
            )
    except Exception as error:
        raise UserError(f"{where}.path: weights in {folder} cannot be loaded ({_first(error)})") from error
    for found, what in ((info["missing_keys"], "lacks"), (info["unexpected_keys"], "has, beyond its config,")):
        if found:
            raise UserError(
                f"{where}.path: {folder} {what} {counted_words(len(found), 'weight')} of {name}, {min(found)} for one"
            )
    return model.train()


def write_model(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model as diffusers does, with these whole weights: `model` itself may be sharded."""
    with _quiet():
        with torch.device("meta"):
            fresh = type(model).from_config(model.config)
        fresh.load_state_dict(weights, assign=True)
        fresh.save_pretrained(folder)


def scheduler_of_directory(where: str, path: Path, kinds: tuple[str, ...]) -> Any:
    """The scheduler that says with which noise the model of a directory learned.

    path: of a pipeline, or of a model in one. kinds: the classes whose noise is known. Raises UserError for a directory
    without one, and for one of another class.
    """
    found = [folder / _SCHEDULER for folder in (path, path.parent) if (folder / _SCHEDULER).is_file()]
    if not found:
        raise UserError(
            f"{where}.path: there is no {path / _SCHEDULER}, which says the noise that the model learned with; say it "
            f"in {where}.noise"
        )
    options = _stored(where, found[0], kinds)
    kind = getattr(check_diffusers(where), options["_class_name"])
    try:
        with _quiet(), torch.device("cpu"):  # Its few numbers are read, also where a model has shapes alone.
            return kind.from_config({key: value for key, value in options.items() if not key.startswith("_")})
    except Exception as error:
        raise UserError(f"{where}.path: no scheduler can be made of {found[0]} ({one_line(error)})") from error


def _folder(where: str, path: Path, *parts: str) -> Path:
    """Where the first of these parts of a pipeline lies, or a model alone."""
    files = [*(path / part / "config.json" for part in parts), path / "config.json"]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise UserError(
            f"{where}.path: there is neither {' nor '.join(map(str, reversed(files)))}; give a local directory that "
            "diffusers wrote"
        )
    return found.parent


def _stored(where: str, file: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The options in a file of diffusers, which must be of one of these classes."""
    options = read_json(file, infinite=True)
    named = options.get("_class_name") if isinstance(options, dict) else None
    if named not in kinds:
        raise UserError(f"{where}.path: {file} is of class {named!r}; it must be {' or '.join(kinds)}")
    if options.get(_UNBOUNDED) == -math.inf:
        del options[_UNBOUNDED]
    check_bounds(f"{file}: ", options)
    return options


def _first(error: Exception) -> str:
    """What torch says of the first of many weights."""
    return one_line(error).split(". ")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off diffusers' reports, such as of options of another version; errors are raised."""
    from diffusers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
