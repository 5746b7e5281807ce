"""Writes the trained modules as HF directories at the end of a run, with the tokenizer beside them."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.tensor import DTensor

from motet.models.export import export_hf
from motet.models.mllm import MLLM
from motet.train.world import World


class ExportConfig(BaseModel):
    """`[export]` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    at_end: bool = Field(
        False, description="write every module to export/ in the run's folder, as transformers reads it"
    )


def export(model: MLLM, tokenizer: Path, folder: Path, world: World) -> None:
    """Gather the sharded weights on rank 0, one tensor at a time, and write them to `folder`. A collective."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_first:
            state[name] = whole.cpu()
    with world.together():
        if world.is_first:
            export_hf(model, folder, state, tokenizer)
