"""Tiny random models of every family, in float64, and packed documents to run them on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_backbone, build_mllm, build_modality

VOCAB = 50
DIM = 32

BACKBONE = {
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8},
}
"""Options of mixtures of experts, whose own numbers are those of large models."""
OTHER_NAMES = {
    "gpt2": {"n_embd": DIM, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
    | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    "opt": {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "dropout": 0.0}
    | {"max_position_embeddings": 64},
}
"""Options of families that name them otherwise, and whose positions are learned."""
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}

ENCODERS = {
    "siglip": VISION,
    "clip": VISION,
    "eva_clip": VISION | {"k_bias": False, "use_rms_norm": True},
    "dinov2": {k: v for k, v in VISION.items() if k != "intermediate_size"} | {"mlp_ratio": 2},
    "internvl": VISION,
    "qwen2_vl": {"depth": 2, "embed_dim": 24, "hidden_size": 20, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    "siglip2": {k: v for k, v in VISION.items() if k != "image_size"} | {"num_patches": 16},
    "pixtral": VISION,
    "dinov3": VISION | {"num_register_tokens": 3, "pos_embed_rescale": 1.0, "key_bias": True},
    "qwen2_5_vl": {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4}
    | {"out_hidden_size": 20, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4}
    | {"out_hidden_size": 20, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
    "whisper": AUDIO,
    "qwen2_audio": AUDIO,
    "qwen2_5_omni_audio": AUDIO | {"n_window": 8, "output_dim": 12},
}
IMAGE_SIZES = [[2, 4], [4, 4], [6, 2], [2, 2]]
CLIP_SIZES = [[7], [40], [13], [4]]


@dataclass
class Packed:
    """As dispatch.PackedSequences."""

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    feature_positions: dict[str, Tensor]

    @classmethod
    def of(cls, lengths: list[int], seed: int = 0, **positions: list[int]) -> Packed:
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        return cls(
            torch.randint(0, VOCAB, (total,), generator=generator),
            torch.rand(total, generator=generator) > 0.4,
            torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32),
            {name: torch.tensor(places, dtype=torch.int64) for name, places in positions.items()},
        )

    def document(self, i: int) -> Packed:
        start, end = self.offsets[i : i + 2].tolist()
        inside = {name: p[(p >= start) & (p < end)] - start for name, p in self.feature_positions.items()}
        return Packed(self.tokens[start:end], self.targets[start:end], torch.tensor([0, end - start]), inside)


class Tiny:
    """Factories, and the sizes and rows to feed the models with."""

    Packed = Packed
    vocab, dim = VOCAB, DIM
    encoders, backbone_options = ENCODERS, BACKBONE

    def encoder(self, family: str, dtype: torch.dtype = torch.float64, **options):
        config = EncoderConfig(family=family, config=ENCODERS[family], **options)
        return build_modality(family, config, DIM, dtype, 0)

    def backbone(self, family: str = "qwen2", train: bool = True, dtype: torch.dtype = torch.float64, **options):
        config = BackboneConfig(family=family, config=self.options_of(family) | options, train=train)
        return build_backbone(config, VOCAB, dtype, 0)

    def options_of(self, family: str) -> dict[str, object]:
        return BACKBONE | EXPERTS.get(family, {}) if family not in OTHER_NAMES else OTHER_NAMES[family]

    def mllm(self, dtype: torch.dtype = torch.float64, train: bool = True, **frozen):
        encoders = {
            "image": {"family": "qwen2_vl", "config": ENCODERS["qwen2_vl"]} | frozen,
            "audio": {"family": "whisper", "config": ENCODERS["whisper"], "projector": {"downsample": 2}} | frozen,
        }
        backbone = {"family": "qwen2", "config": BACKBONE, "train": train}
        return build_mllm(ModelConfig(backbone=backbone, encoders=encoders), VOCAB, dtype)

    def sizes(self, family: str) -> Tensor:
        return torch.tensor(CLIP_SIZES if "audio" in family or family == "whisper" else IMAGE_SIZES)

    def values(self, family: str, sizes: Tensor, seed: int = 0) -> Tensor:
        row_dim = 8 if sizes.shape[1] == 1 else 3 * 16 * (2 if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") else 1)
        return torch.randn(int(sizes.prod(1).sum()), row_dim, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture
def larger_checkpoints(tiny):
    """For each encoder family a larger HF model that holds such a tower: (model, its tower)."""
    text = {
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 30,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    language = text | special | {"num_key_value_heads": 2}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 4]}}
    options = tiny.encoders
    siglip = transformers.SiglipModel(transformers.SiglipConfig(vision_config=options["siglip"], text_config=text))
    clip = transformers.CLIPModel(transformers.CLIPConfig(vision_config=options["clip"], text_config=text))
    dinov2 = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**options["dinov2"]))
    vision = options["qwen2_vl"] | {"hidden_size": 24}
    qwen2_vl = transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(vision_config=vision, text_config=language | rotary)
    )
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 20}
    whisper = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**options["whisper"] | decoder | special, decoder_start_token_id=3)
    )
    qwen2_audio = transformers.Qwen2AudioForConditionalGeneration(
        transformers.Qwen2AudioConfig(
            audio_config=options["qwen2_audio"], text_config=language | {"model_type": "qwen2"}
        )
    )
    return {
        "siglip": (siglip, siglip.vision_model),
        "clip": (clip, clip.vision_model),
        "dinov2": (dinov2, dinov2.dinov2),
        "qwen2_vl": (qwen2_vl, qwen2_vl.model.visual),
        "whisper": (whisper, whisper.model.encoder),
        "qwen2_audio": (qwen2_audio, qwen2_audio.model.audio_tower),
    }
