"""LoRA adapters of a whole model as one directory of peft, which is loaded on top of transformers' own class.

peft knows adapters of one dropout and one way of scaling, with a rank and an alpha by layer; and modules that are saved
whole beside them (`modules_to_save`), which here are those with weights that have changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.lora import LoraConfig, lora_layers
from motet.models.lora_read import ADAPTER_WEIGHTS, PREFIX
from motet.models.lora_saved import check_peft, ends_of
from motet.models.mllm import MLLM
from motet.models.named_weights import is_lora
from motet.models.whole.directory import WholeDirectory

ADAPTER = "adapter"
"""The folder of adapters in an export."""
_OWN_END = re.compile(r"\.lora_[AB]\.weight$")


def beside(name: str) -> str:
    """The weight beside an adapter; of any other weight its own name."""
    return _OWN_END.sub(".weight", name)


@dataclass(frozen=True)
class WholeAdapter:
    """The adapters of a whole model, by the names of transformers' class.

    model:   transformers' class, without storage.
    configs: by layer. weights: of adapters.
    """

    model: nn.Module
    configs: dict[str, LoraConfig]
    weights: dict[str, Tensor]

    @staticmethod
    def of(
        directory: WholeDirectory, mllm: MLLM, held: Mapping[str, Tensor], theirs: Mapping[str, str]
    ) -> WholeAdapter:
        """The adapters of an MLLM. held: its weights by plain names. theirs: plain name -> name in the class.

        Raises UserError without peft.
        """
        check_peft('export.adapter = "saved"')
        configs = {theirs[f"{name}.weight"].removesuffix(".weight"): layer.config for name, layer in lora_layers(mllm)}
        weights = {theirs[name]: weight for name, weight in held.items() if is_lora(name)}
        return WholeAdapter(directory.shapes, configs, weights)

    def fits_beside(self, changed: Collection[str]) -> bool:
        """Whether peft can save what has changed beside the adapters: it saves a module whole, or adapters in it.

        Nor can it save a weight that several modules share: a copy of the module would share it no longer.
        """
        tied = getattr(self.model, "all_tied_weights_keys", {})
        if not {*tied, *tied.values()}.isdisjoint(changed):
            return False
        modules = _modules_of(self.model, changed)
        return not any(layer == each or layer.startswith(f"{each}.") for each in modules for layer in self.configs)

    def save(self, base: Path, weights: Mapping[str, Tensor], changed: Collection[str], target: Path) -> None:
        """Write them to `target`. base: the directory that they stand on. changed: those of the model's own `weights`
        that it has otherwise."""
        first, modules = next(iter(self.configs.values())), _modules_of(self.model, changed)

        def differing(key: str) -> dict[str, float]:
            values = {re.escape(layer): getattr(each, key) for layer, each in self.configs.items()}
            return {layer: value for layer, value in values.items() if value != getattr(first, key)}

        saved = check_peft('export.adapter = "saved"').LoraConfig(
            r=first.rank,
            lora_alpha=first.full_alpha,
            lora_dropout=first.dropout,
            use_rslora=first.rank_stabilized,
            rank_pattern=differing("rank"),
            alpha_pattern=differing("full_alpha"),
            target_modules=ends_of(self.model, self.configs),
            modules_to_save=modules or None,
            base_model_name_or_path=str(base),
            inference_mode=True,
        )
        target.mkdir(parents=True)
        saved.save_pretrained(str(target))
        of_modules = {name: each for name, each in weights.items() if name.startswith(tuple(f"{m}." for m in modules))}
        tensors = {f"{PREFIX}{name}": each.cpu().clone() for name, each in {**self.weights, **of_modules}.items()}
        save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def check_one_adapter(configs: Mapping[str, LoraConfig]) -> None:
    """Raise UserError for parts whose adapters cannot be in one adapter of peft. configs: by part."""
    first, config = next(iter(configs.items()))
    for key in ("dropout", "rank_stabilized"):
        for name, each in configs.items():
            if getattr(each, key) != getattr(config, key):
                raise UserError(
                    f"model.lora.{name}.{key} is {getattr(each, key)}, and that of model.lora.{first} is "
                    f"{getattr(config, key)}: an adapter of peft has one for all its layers; make them equal, or set "
                    'export.adapter = "merged"'
                )


def _modules_of(model: nn.Module, names: Collection[str]) -> list[str]:
    """The fewest modules that have all these weights, each with as few others as can be.

    peft saves no list of modules, which nothing calls, so those in it are named.
    """
    chosen = []

    def look(path: str, module: nn.Module) -> None:
        inside = {f"{path}.{name}" for name, _ in module.named_parameters()}
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        is_whole = bool(inside) and inside.issubset(names) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_whole or not own.isdisjoint(names):
            chosen.append(path)
        elif not inside.isdisjoint(names):
            for name, child in module.named_children():
                look(f"{path}.{name}", child)

    for name, child in model.named_children():
        look(name, child)
    return chosen
