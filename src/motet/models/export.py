"""A trained MLLM back to directories that transformers reads: safetensors and config.json a module.

directory/backbone/             AutoModelForCausalLM.from_pretrained
directory/encoders/<name>/      the family's HF class; of a module of the user's own, model.safetensors alone
directory/projectors/<name>.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.models.block import plain_names
from motet.models.load import quiet_transformers
from motet.models.module import MLLM


def export_hf(mllm: MLLM, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write every module of `mllm` under `directory`, in the dtype of the weights.

    state_dict: whole tensors under the names of mllm.state_dict(); default: those of `mllm` itself, which must not be
    sharded then. Call it on one rank. Raises KeyError if a weight is missing.
    """
    state = mllm.state_dict() if state_dict is None else state_dict
    _export(
        mllm.backbone.causal_lm, _part(mllm.backbone.causal_lm, state, "backbone.causal_lm."), directory / "backbone"
    )
    for name, module in mllm.encoders.items():
        prefix, target = f"encoders.{name}.", directory / "encoders" / name
        model = getattr(module.encoder, "model", None)
        if isinstance(model, PreTrainedModel):
            _export(model, _part(model, state, f"{prefix}encoder.model."), target)
        else:
            target.mkdir(parents=True, exist_ok=True)
            save_file(_part(module.encoder, state, f"{prefix}encoder."), target / "model.safetensors")
        projectors = directory / "projectors"
        projectors.mkdir(parents=True, exist_ok=True)
        save_file(_part(module.projector, state, f"{prefix}projector."), projectors / f"{name}.safetensors")


def _part(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights of `module` under the names that it has without Blocks."""
    return {plain: state[prefix + name].detach().cpu().contiguous() for name, plain in plain_names(module).items()}


def _export(model: PreTrainedModel, state: dict[str, Tensor], target: Path) -> None:
    # Saved through a fresh model without storage: the one that trains has Blocks, and may be sharded.
    with quiet_transformers():
        with torch.device("meta"):
            fresh = type(model)(deepcopy(model.config)).to(next(iter(state.values())).dtype)
        fresh.save_pretrained(target, state_dict=state)
