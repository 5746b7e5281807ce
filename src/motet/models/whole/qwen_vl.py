"""Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): images and videos of their own size on positions of a
grid.

Their merger is the model's projector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger

from motet.models.whole.family import (
    TowerConfig,
    WholeBackboneConfig,
    WholeFamily,
    WholeParts,
    check_option,
    one_tower,
)
from motet.models.whole.merger import MergerProjectorConfig
from motet.models.whole.video_processor import VideoAreas

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_MERGER = "model.visual.merger."
_MLP = ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias")


def _parts(
    family: str,
    width: str,
    merger: type[nn.Module],
    norm: Sequence[str],
    config: PreTrainedConfig,
    directory: WholeDirectory,
) -> WholeParts:
    """family: of tower and text. width: the tower's option that is the text's width. norm: the merger's own weights."""
    where, tower, text = str(directory.file), config.vision_config, config.text_config
    check_option(where, f"vision_config.{width}", getattr(tower, width), text.hidden_size)
    tensors = directory.tensors_at({f"merger.{name}": _MERGER + name for name in (*norm, *_MLP)})
    encoder = TowerConfig(
        family=family,
        path=directory.path,
        projector=MergerProjectorConfig(tensors=tensors, merger=merger, merge=tower.spatial_merge_size),
    )
    return one_tower(
        WholeBackboneConfig(
            family=family, path=directory.path, config={"tie_word_embeddings": config.tie_word_embeddings}
        ),
        "image",
        encoder,
        VideoAreas(
            tower.patch_size,
            tower.spatial_merge_size,
            tower.temporal_patch_size,
            # Qwen2.5-VL's frames stand at their time (section 2.1.3), Qwen2-VL's are counted.
            tokens_per_second=getattr(tower, "tokens_per_second", None),
        ),
        "model.visual.",
        {"merger.": _MERGER},
    )


def _qwen2_vl(config: PreTrainedConfig, directory: WholeDirectory) -> WholeParts:
    return _parts("qwen2_vl", "hidden_size", PatchMerger, ("ln_q.weight", "ln_q.bias"), config, directory)


def _qwen2_5_vl(config: PreTrainedConfig, directory: WholeDirectory) -> WholeParts:
    return _parts("qwen2_5_vl", "out_hidden_size", Qwen2_5_VLPatchMerger, ("ln_q.weight",), config, directory)


QWEN2_VL = WholeFamily(Qwen2VLForConditionalGeneration, _qwen2_vl)
QWEN2_5_VL = WholeFamily(Qwen2_5_VLForConditionalGeneration, _qwen2_5_vl)
