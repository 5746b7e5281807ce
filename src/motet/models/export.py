"""A trained MLLM as directories that transformers reads: safetensors and config.json for each module.

directory/backbone/                   AutoModelForCausalLM.from_pretrained
directory/encoders/<name>/            the family's HF class; only model.safetensors for a user's own module; with
                                      preprocessor_config.json, if it is given
directory/adapters/backbone/, adapters/encoders/<name>/    peft.PeftModel.from_pretrained, on top of such a model
directory/projectors/<name>.safetensors
directory/generators/<name>/model.safetensors    with the output projector; generators/queries.safetensors
directory/generators/<name>/unet/, transformer/    of a model of diffusers: its class's from_pretrained; beside it
                                      scheduler/, vae/, and entrance.safetensors with the output projector; of Motet's
                                      own beside a vae/, denoiser.safetensors
directory/hooks/<name>.<callback>.safetensors    for callbacks with weights
directory/tokenizer/                  if one is given
directory/README.md                   a model card, if it is given

Everything is checked before anything is written. The directory gets its name when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.config_file import quiet_transformers
from motet.models.copied_files import copy_beside_weights
from motet.models.denoiser import Denoiser
from motet.models.diffusers_directory import write_model
from motet.models.families.shaped import ShapedCausalLM
from motet.models.generator import GeneratorModule
from motet.models.lora_saved import check_peft, merged, save_adapter, without_lora
from motet.models.mllm import MLLM
from motet.models.named_weights import is_lora
from motet.models.scheduler_noise import SchedulerNoise

_ADAPTERS = "adapters"
CARD, MADE_BY = "README.md", "Trained by Motet"
"""The file of a model card, and words in it by which an export is known."""

AdapterForm = Literal["saved", "merged"]


def export_hf(
    mllm: MLLM,
    directory: Path,
    state_dict: Mapping[str, Tensor] | None = None,
    tokenizer: Path | None = None,
    *,
    adapter: AdapterForm = "saved",
    bases: Mapping[str, Path] = MappingProxyType({}),
    processors: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    card: str = "",
) -> None:
    """Write every module of `mllm` to `directory` in the dtype of the weights, in place of an earlier export there.

    state_dict: whole tensors under the names of mllm.state_dict(); default: those of `mllm`, which then must not be
                sharded.
    tokenizer:  a directory to copy as well, without weights that lie in it.
    processors: encoder -> what preprocessor_config.json beside it is to say.
    adapter:    LoRA adapters are "saved" beside the weights that they change, or "merged" into them.
    bases:      part -> directory that has its weights without adapters. Those of a part whose adapters are saved are
                not written once more.
    card:       a paragraph for README.md, which says how each part is loaded; without it there is no such file.
    Call it on one rank. Raises KeyError if a weight is missing. Raises UserError for a module with other weights than a
    fresh model of its config (adapters of other packages), for a model of shapes, if `directory` exists and is no
    export, and for adapters that are saved without peft.
    """
    if isinstance(mllm.backbone.causal_lm, ShapedCausalLM):
        raise UserError("A model of shapes cannot be exported: transformers has no class that would read it.")
    directory = directory.absolute()
    state = mllm.state_dict() if state_dict is None else state_dict
    is_empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not is_empty and not any((directory / part / "backbone").is_dir() for part in (".", _ADAPTERS)):
        raise UserError(f"{directory} exists and is no export, which would be replaced; name another directory.")
    parts = [
        _Part(path, module, _weights(module, state, prefix), is_hf) for path, module, prefix, is_hf in _parts(mllm)
    ]
    adapted = [part for part in parts if part.has_lora and adapter == "saved"]
    if adapted:
        check_peft('export.adapter = "saved"')
    without = [part._replace(weights=_without_adapters(part, adapter)) for part in parts]
    fresh = {part.path: _fresh(part) for part in without if part.is_hf}
    with in_place_of(directory) as target:
        for part in adapted:
            base = bases.get(part.name, directory / part.path)
            save_adapter(part.module, part.weights, str(base), target / _ADAPTERS / part.path)
        left_out = {part.path for part in adapted if part.name in bases}
        for part in (part for part in without if part.path not in left_out):
            if part.is_hf:
                _write_model(part, fresh[part.path], target / part.path)
                if part.name in processors:
                    text = json.dumps(processors[part.name], indent=2)
                    (target / part.path / "preprocessor_config.json").write_text(text + "\n")
            elif part.weights:
                if part.is_diffusers:
                    write_model(part.module, part.weights, target / part.path)
                    continue
                file = target / f"{part.path}.safetensors"
                file.parent.mkdir(parents=True, exist_ok=True)
                # Clones, because safetensors refuses tensors that share memory, as tied weights do.
                save_file({name: tensor.clone() for name, tensor in part.weights.items()}, file)
        for name, generator in mllm.generators.items():
            if isinstance(noise := getattr(generator.generator, "noise", None), SchedulerNoise):
                noise.write(target / "generators" / name / "scheduler")
        if tokenizer is not None:
            copy_beside_weights(tokenizer, target / "tokenizer")
        if card:
            (target / CARD).write_text(_card(without, {part.path for part in adapted}, left_out, bases, card))


def model_card(title: str, base: str, paragraphs: Iterable[str]) -> str:
    """A README.md as the hub reads it. base: the name of the model that was trained further; "" for none."""
    of_base = f"base_model: {base}\n" if base else ""
    text = "\n\n".join(paragraphs)
    return f"---\nlibrary_name: transformers\n{of_base}---\n\n# {title}\n\n{text}\n"


def _card(parts: list[_Part], adapted: set[str], left_out: set[str], bases: Mapping[str, Path], trained: str) -> str:
    """What lies where, and what loads it. adapted, left_out: paths of parts with adapters, and without weights here."""
    lines = []
    for part in parts:
        if part.path in left_out:
            lines.append(f"- the weights of `{part.path}` are those of {bases[part.name].name}, beside adapters")
        elif part.is_hf:
            lines.append(f"- `{part.path}/`: transformers' `{type(part.module).__name__}.from_pretrained` loads it")
        elif part.is_diffusers:
            lines.append(f"- `{part.path}/`: diffusers' `{type(part.module).__name__}.from_pretrained` loads it")
        elif part.weights:
            lines.append(f"- `{part.path}.safetensors`: the weights of `{type(part.module).__name__}`")
        if part.path in adapted:
            lines.append(f"- `{_ADAPTERS}/{part.path}/`: `peft.PeftModel.from_pretrained` loads it on top of them")
    return model_card("A multimodal model in parts", "", (f"{MADE_BY}. {trained}", "\n".join(lines)))


class _Part(NamedTuple):
    """A module with its weights under their names without Blocks. path: its directory, or its file without suffix."""

    path: str
    module: nn.Module
    weights: dict[str, Tensor]
    is_hf: bool

    @property
    def name(self) -> str:
        """Of an encoder or the backbone."""
        return self.path.removeprefix("encoders/")

    @property
    def is_diffusers(self) -> bool:
        """Whether diffusers writes it."""
        return not self.is_hf and hasattr(self.module, "save_pretrained")

    @property
    def has_lora(self) -> bool:
        """Whether any of its layers has an adapter."""
        return any(is_lora(name) for name in self.weights)


def _parts(mllm: MLLM) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Path, module, prefix in the state dict, and whether transformers writes it, for all that may have weights."""
    yield "backbone", mllm.backbone.causal_lm, "backbone.causal_lm.", True
    hooks: list[tuple[str, Any, str]] = [("backbone.merge", mllm.backbone.merge, "backbone.merge.")]
    for name, module in mllm.encoders.items():
        encoder, prefix = module.encoder, f"encoders.{name}."
        model = getattr(encoder, "model", None)
        # A user's own class may hold an HF model and further weights, which HF would not write.
        if isinstance(model, PreTrainedModel) and all(key.startswith("model.") for key in encoder.state_dict()):
            yield f"encoders/{name}", model, f"{prefix}encoder.model.", True
        else:
            yield f"encoders/{name}/model", encoder, f"{prefix}encoder.", False
        yield f"projectors/{name}", module.projector, f"{prefix}projector.", False
        hooks += [
            (f"{name}.{hook}", getattr(module, hook), f"{prefix}{hook}.") for hook in ("before", "between", "after")
        ]
    for name, generator in mllm.generators.items():
        yield from _parts_of_generator(f"generators/{name}", generator, f"generators.{name}.")
    if len(mllm.backbone.queries):
        yield "generators/queries", mllm.backbone.queries, "backbone.queries.", False
    for name, hook, prefix in hooks:
        if isinstance(hook, nn.Module):
            yield f"hooks/{name}", hook, prefix, False


def _parts_of_generator(path: str, module: GeneratorModule, prefix: str) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """As `_parts`, of a generator: one file, or beside a folder of each model of diffusers one of the rest."""
    denoiser, vae = (getattr(module.generator, part, None) for part in ("denoiser", "vae"))
    if not isinstance(denoiser, Denoiser) and vae is None:
        yield f"{path}/model", module, prefix, False
        return
    if isinstance(denoiser, Denoiser):
        yield f"{path}/{denoiser.part}", denoiser.model, f"{prefix}generator.denoiser.{denoiser.part}.", False
    else:
        yield f"{path}/denoiser", denoiser, f"{prefix}generator.denoiser.", False
    if vae is not None:
        yield f"{path}/vae", vae.vae, f"{prefix}generator.vae.vae.", False
    yield f"{path}/entrance", module.entrance, f"{prefix}entrance.", False


def _weights(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {plain: state[prefix + name].detach().cpu().contiguous() for name, plain in plain_names(module).items()}


def _without_adapters(part: _Part, adapter: AdapterForm) -> dict[str, Tensor]:
    """The weights as transformers knows them."""
    if not part.has_lora:
        return part.weights
    return merged(part.module, part.weights) if adapter == "merged" else without_lora(part.weights)


def _fresh(part: _Part) -> PreTrainedModel:
    """A model of the same config without storage; it has the names that transformers will look for.

    (The trained model has Blocks and may be sharded.) Raises UserError if its weights differ in names or shapes.
    """
    kind = type(part.module)
    with quiet_transformers(), torch.device("meta"):
        fresh = kind(deepcopy(part.module.config)).to(next(iter(part.weights.values())).dtype)
    actual, expected = (
        {name: tensor.shape for name, tensor in weights.items()} for weights in (part.weights, fresh.state_dict())
    )
    different = next((name for name in actual | expected if actual.get(name) != expected.get(name)), None)
    if different is not None:
        raise UserError(
            f"{part.path} cannot be exported: {different} is not as in a {kind.__name__} of its config, and "
            "transformers could not load it; merge adapters into the weights that they change, and remove them "
            "(nothing is written)."
        )
    return fresh


def _write_model(part: _Part, fresh: PreTrainedModel, target: Path) -> None:
    with quiet_transformers():
        fresh.save_pretrained(target, state_dict=_tied(part.weights, fresh))
    if part.module.can_generate():
        # Written as it was read, also where transformers would refuse to save it.
        part.module.generation_config.to_json_file(target / "generation_config.json")


def _tied(weights: Mapping[str, Tensor], fresh: PreTrainedModel) -> dict[str, Tensor]:
    """The weights, with one tensor for those that the model ties: transformers writes it once.

    What is gathered from ranks is a tensor for each name.
    """
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(each, name) for name, each in fresh.named_parameters(remove_duplicate=False)}
    return {name: weights[names.get(name, name)] for name in weights}


@contextmanager
def in_place_of(directory: Path) -> Iterator[Path]:
    """A directory to write to, beside `directory`, whose place it takes at the end."""
    writing, old = (directory.parent / f".{directory.name}.{state}" for state in ("writing", "old"))
    for left in (writing, old):
        shutil.rmtree(left, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        yield writing
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if directory.exists():
        directory.rename(old)
    writing.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
