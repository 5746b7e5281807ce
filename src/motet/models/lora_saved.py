"""LoRA adapters out of a model: as a directory that peft reads, or merged into the weights beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.lora import lora_layers
from motet.models.lora_read import ADAPTER_WEIGHTS, PREFIX
from motet.models.named_weights import is_lora


def check_peft(where: str) -> ModuleType:
    """The package peft. where: the key of the recipe that needs it. Raises UserError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"{where} needs the package peft, which is not installed; run pip install 'motet[lora]', or set "
            'export.adapter = "merged"'
        ) from error
    return peft


def without_lora(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an HF model, without those of adapters."""
    return {name: weight for name, weight in weights.items() if not is_lora(name)}


def merged(root: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an HF model with what its adapters add to them: W + scale * B A, computed in at least float32.

    weights: by names without Blocks, adapters included.
    """
    sums = without_lora(weights)
    for name, layer in lora_layers(root):
        key = f"{name}.weight"
        wide = torch.promote_types(weights[key].dtype, torch.float32)
        up, down = (weights[f"{name}.lora_{letter}.weight"].to(wide) for letter in "BA")
        added = layer.scale * (up @ down)
        added = added.t() if layer.is_transposed else added
        sums[key] = (weights[key].to(wide) + added).to(weights[key].dtype)
    return sums


def save_adapter(root: nn.Module, weights: Mapping[str, Tensor], base: str, target: Path) -> None:
    """Write the adapters of an HF model as a directory that `peft.PeftModel.from_pretrained` loads on top of it.

    base: the directory of the weights beside them. weights: as of `merged`. Raises UserError without peft.
    """
    layers = dict(lora_layers(root))
    config = next(iter(layers.values())).config
    saved = check_peft('export.adapter = "saved"').LoraConfig(
        r=config.rank,
        lora_alpha=config.full_alpha,
        lora_dropout=config.dropout,
        fan_in_fan_out=all(layer.is_transposed for layer in layers.values()),
        use_rslora=config.rank_stabilized,
        target_modules=ends_of(root, layers),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM" if root.can_generate() else None,
        inference_mode=True,
    )
    target.mkdir(parents=True)
    saved.save_pretrained(str(target))
    tensors = {f"{PREFIX}{name}": weight.clone() for name, weight in weights.items() if is_lora(name)}
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def ends_of(root: nn.Module, layers: Mapping[str, object]) -> list[str]:
    """The last names of these layers, by which peft finds them; their whole names if others end as well."""
    ends = {name.rpartition(".")[2] for name in layers}
    num_ended = sum(name.rpartition(".")[2] in ends for name, _ in root.named_modules())
    return sorted(ends if num_ended == len(layers) else layers)
