"""A model that is laid out on meta, sharded and only then filled in is the model that one process builds whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from motet.core.shape_tables import ModelShapes
from motet.models.build import ModelConfig, build_mllm
from motet.models.export import export_hf
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.shaped_config import config_of_shapes
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from ranks import run_ranks

CPU = torch.device("cpu")
BACKBONE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 27,
    "num_key_value_heads": 1,
}
VISION = {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "patch_size": 2,
    "image_size": 10,
    "num_channels": 1,
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 4,
    "max_source_positions": 16,
}
VOCABULARY = 50


def config_of(family: str, **backbone: object) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "backbone": {"family": family, "config": BACKBONE | backbone},
            "encoders": {
                "image": {"family": "siglip", "config": VISION, "train_encoder": False, "feature_layer": -2},
                "audio": {"family": "whisper", "config": AUDIO, "projector": {"kind": "linear"}},
                "depth": {"module": "parity.tiny:ToyEncoder", "args": {"row_dim": 4, "cost": "packed"}},
            },
        }
    )


def start(config: ModelConfig, dtype: torch.dtype, shard_size: int | None) -> MLLM:
    model = build_mllm(config, VOCABULARY, dtype, seed=3, deferred=True)
    shard(model, build_mesh(CPU, shard_size=shard_size), FSDPConfig(shard_size=shard_size))
    materialise(model, config, 3, CPU)
    return model


def whole_of(model: MLLM) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach() for name, each in tensors.items()
    }


Case = tuple[ModelConfig, torch.dtype, int | None]
"""A model, the dtype of its weights, and the ranks that hold one copy."""


def described(model: MLLM) -> dict:
    causal_lm = model.backbone.causal_lm
    return {
        "tied": causal_lm.lm_head.weight is causal_lm.model.embed_tokens.weight,
        "trained": {name for name, each in model.named_parameters() if each.requires_grad},
    }


def started(rank: int, num_ranks: int, cases: list[Case]) -> list[tuple[dict, dict[str, Tensor]]]:
    models = [start(*case) for case in cases]
    return [(described(model), whole_of(model)) for model in models]


def check(num_ranks: int, cases: list[Case]) -> None:
    by_rank = run_ranks(started, num_ranks, cases)
    for place, (config, dtype, _) in enumerate(cases):
        reference = build_mllm(config, VOCABULARY, dtype, seed=3)
        expected = whole_of(reference)
        for description, tensors in (results[place] for results in by_rank):
            assert description == described(reference)
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def shaped_config() -> ModelConfig:
    """A model of shapes with all that its layers may have besides matrices."""
    layers = {"num_layers": 2, "hidden": 16, "mlp": 27, "num_heads": 2, "layer_scale": True, "qk_norm": True}
    vision = layers | {"kind": "vit", "row_dim": 4, "class_row": True, "num_positions": 9, "train": False}
    audio = layers | {"kind": "audio", "num_mel_bins": 4, "num_positions": 16}
    backbone = layers | {"norm": "rms", "gated": True, "vocab_size": VOCABULARY, "tied": True}
    tables = {"backbone": backbone, "encoders": {"image": vision, "audio": audio}}
    return config_of_shapes(ModelShapes.model_validate(tables))


def drawn_cases(shard_size: int | None) -> list[Case]:
    return [(shaped_config(), torch.float64, shard_size)] + [
        (config_of(family, tie_word_embeddings=family == "gemma"), dtype, shard_size)
        for family in ("qwen2", "gemma")
        for dtype in (torch.float32, torch.float64)
    ]


def read_cases(folder: Path) -> list[Case]:
    """Models in directories, whose weights are all read by the slice; of the first, head and embedding are tied."""
    cases: list[Case] = []
    for tied in (True, False):
        target = folder / str(tied)
        export_hf(build_mllm(config_of("qwen2", tie_word_embeddings=tied), VOCABULARY, torch.float64, 8), target)
        read = ModelConfig.model_validate(
            {
                "backbone": {"family": "qwen2", "path": target / "backbone"},
                "encoders": {
                    name: {"family": family, "path": target / f"encoders/{name}"}
                    for name, family in (("image", "siglip"), ("audio", "whisper"))
                },
            }
        )
        deferred = build_mllm(read, VOCABULARY, torch.float32, deferred=True)
        assert all(each.is_meta for each in deferred.backbone.parameters())
        assert all(each.is_meta for module in deferred.encoders.values() for each in module.encoder.parameters())
        cases.append((read, torch.float32, None))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_are_those_of_the_whole_model(tmp_path, num_ranks):
    check(num_ranks, [*drawn_cases(None), *read_cases(tmp_path)])


@pytest.mark.parametrize(("num_ranks", "shard_size"), [(2, 1), (4, 2)])
def test_weights_are_the_same_where_several_groups_hold_a_copy(num_ranks, shard_size):
    check(num_ranks, drawn_cases(shard_size)[:1])


LARGE = {"num_hidden_layers": 8, "num_attention_heads": 2, "hidden_size": 128, "intermediate_size": 512}


def peak_of_start(rank: int, num_ranks: int, path: Path | None) -> tuple[int, int, int]:
    """Bytes at the most, of the rank's share, and of the largest part."""
    given = {"family": "llama", "path": path} if path else {"family": "llama", "config": LARGE}
    config = ModelConfig.model_validate({"backbone": given})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = start(config, torch.float32, None)
    changes = [each.nbytes() for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for change in changes:
        held += change
        most = max(most, held)
    share = sum(each.to_local().nbytes for each in model.parameters())
    return most, share, max(sum(each.nbytes for each in block.parameters()) for block in model.backbone.blocks)


@pytest.mark.parametrize("source", ["drawn", "read"])
def test_a_rank_allocates_its_share_and_one_layer(tmp_path, source):
    path = None
    if source == "read":
        path = tmp_path
        config = ModelConfig.model_validate({"backbone": {"family": "llama", "config": LARGE}})
        causal_lm = build_mllm(config, VOCABULARY).backbone.causal_lm
        # A file that is open counts as a whole.
        type(causal_lm)(causal_lm.config).save_pretrained(path, max_shard_size="300KB")
    for most, share, layer in run_ranks(peak_of_start, 4, path):
        assert share <= most <= 1.3 * share + layer
        assert 1.3 * share + layer < 0.7 * 4 * share
