"""The spec of a model: exact parameter counts, from a built model, a recipe and an HF directory alike."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from motet.core import shapes
from motet.core.errors import UserError
from motet.core.shapes import Transformer
from motet.core.spec import Module
from motet.core.workload import BACKBONE
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm, build_modality
from motet.models.module import ModalityModule
from motet.models.projector import Projector, ProjectorConfig
from motet.models.spec import model_spec, spec_of_config, spec_of_directory

ENCODERS = [
    "siglip", "siglip2", "clip", "eva_clip", "dinov2", "dinov3", "pixtral", "internvl", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl", "whisper", "qwen2_audio", "qwen2_5_omni_audio",
]  # fmt: skip
BACKBONES = [
    "qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe",
    "granite", "gpt2", "opt", "internlm2",
]  # fmt: skip
VARIANTS = {
    "qwen3_moe": [{"num_hidden_layers": 3, "mlp_only_layers": [1]}],
    "dinov2": [{"use_swiglu_ffn": True}, {"qkv_bias": False}],
    "siglip": [{"vision_use_head": False}],
    "eva_clip": [{"use_rms_norm": False, "post_layernorm": True}, {"q_bias": False, "k_bias": True, "v_bias": False}],
    "dinov3": [{"use_gated_mlp": True}, {"key_bias": False, "mlp_bias": False, "num_register_tokens": 0}],
    "internvl": [{"attention_bias": True}],
    "opt": [{"enable_bias": False}],
    "llama": [{"attention_bias": True, "mlp_bias": True}],
    "qwen3": [{"attention_bias": True, "head_dim": 16}],
}


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def check_layers(module: nn.Module, layers) -> None:
    """Between them they hold every parameter, each once but for what is tied."""
    held = [id(p) for each in layers for part in each.modules for p in part.parameters()]
    assert set(held) == {id(p) for p in module.parameters()}
    for layer, modules, _ in layers:
        if layer.parameters:
            assert layer.parameters == sum(num_parameters(part) for part in modules), layer.kind
        assert layer.trainable == any(p.requires_grad for part in modules for p in part.parameters())


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize("train", [True, False])
def test_an_encoders_layers_hold_its_parameters(tiny, family, variant, train):
    options = [{}, *VARIANTS.get(family, [])]
    if variant >= len(options):
        return
    config = EncoderConfig(family=family, config=tiny.encoders[family] | options[variant], train_encoder=train)
    module = build_mllm(
        ModelConfig(backbone={"family": "qwen2", "config": tiny.backbone_options}, encoders={"it": config}), 50
    ).encoders["it"]
    check_layers(module, module.layers())
    spec = module.spec_module("it")
    assert spec.num_parameters == num_parameters(module)
    assert spec.padded == (module.cost == "padded")
    assert spec.layers[-1].output_width == tiny.dim


@pytest.mark.parametrize("family", BACKBONES)
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_a_backbones_layers_hold_its_parameters(tiny, family, variant, tied):
    options = [{}, *VARIANTS.get(family, [])]
    if variant >= len(options):
        return
    backbone = tiny.backbone(family, tie_word_embeddings=tied, **options[variant])
    check_layers(backbone, backbone.layers())
    assert backbone.spec_module().num_parameters == num_parameters(backbone)
    assert backbone.spec_module().layers[-1].weights == tiny.vocab * tiny.dim


def test_windows_are_of_the_layers_that_have_them(tiny):
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    stacks = tiny.backbone("qwen2", **options).spec_module().stacks
    assert [stack.layer.attention.window for stack in stacks if stack.layer.attention] == [0, 8]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("freeze", [["*.mlp.experts.gate_up_proj"], ["*.self_attn.*"], ["*.experts.*"], ["*.gate.*"]])
def test_which_experts_learn_is_read_off_them(tiny, family, freeze):
    """Not off how much is frozen: attention may have more weights than small experts, and experts learn in part."""
    wide = {"num_attention_heads": 16, "head_dim": 32}
    backbone = {"family": family, "config": tiny.options_of(family) | wide}
    built = build_mllm(ModelConfig(backbone=backbone, freeze=freeze), tiny.vocab).backbone
    for ep in (1, 2):
        layer = next(each for each in built.spec_module().layers if each.num_experts).with_experts_of(ep)
        experts = list(built.blocks[0].mlp.experts.parameters())
        assert layer.learning_experts == sum(p.numel() for p in experts if p.requires_grad) // ep
        learns = sum(
            p.numel() // (ep if any(p is e for e in experts) else 1)
            for p in built.blocks[0].parameters()
            if p.requires_grad
        )
        assert layer.updated_parameters == learns


def test_a_module_of_the_users_own_is_its_products():
    class Own(nn.Module):
        output_dim = 6

        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 6), nn.Parameter(torch.ones(6))

        def num_outputs(self, sizes):
            return sizes.prod(1)

    projector = Projector(6, 8, ProjectorConfig(downsample=3))

    class After(nn.Linear):
        def forward(self, rows, sizes):
            return super().forward(rows)

    module = ModalityModule(Own(), projector, after=After(8, 8))
    check_layers(module, module.layers())
    first, second, third = (each.layer for each in module.layers())
    assert (first.kind, first.weights, first.parameters) == ("products", 24, 36)
    assert (second.kind, second.divisor, third.divisor) == ("projector", 3, 3)


def test_a_recipe_is_described_without_building_it(tiny):
    encoders = {
        "image": EncoderConfig(family="clip", config=tiny.encoders["clip"], train_encoder=False),
        "audio": EncoderConfig(family="whisper", config=tiny.encoders["whisper"], projector={"downsample": 2}),
    }
    backbone = BackboneConfig(family="llama", config=tiny.backbone_options)
    config = ModelConfig(backbone=backbone, encoders=encoders)
    mllm = build_mllm(config, 50)
    spec = spec_of_config(config, 50)
    assert spec == model_spec(mllm)
    assert spec.num_parameters == num_parameters(mllm)
    assert spec.edges == (("image", BACKBONE), ("audio", BACKBONE))


def test_84_billion_parameters_take_no_memory():
    """OrchMLLM's MLLM-84B, section 8, Table 1."""
    audio = {"d_model": 3072, "encoder_layers": 48, "encoder_attention_heads": 24, "encoder_ffn_dim": 12288}
    image = {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25}
    backbone = {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    encoders = {
        "image": {"family": "siglip", "config": image, "projector": {"downsample": 4}},
        "audio": {"family": "whisper", "config": audio, "projector": {"downsample": 4}},
    }
    config = ModelConfig(backbone={"family": "qwen2", "config": backbone}, encoders=encoders)
    assert spec_of_config(config, 152_064).num_parameters == pytest.approx(84e9, rel=0.015)


def saved(directory, config):
    config.save_pretrained(directory)
    return directory


def on_meta(model, config) -> nn.Module:
    with torch.device("meta"):
        return model(config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_with_qwen2_vl(tiny, tmp_path, tied):
    config = transformers.Qwen2VLConfig(
        text_config=tiny.backbone_options | {"tie_word_embeddings": tied, "vocab_size": 50},
        vision_config=tiny.encoders["qwen2_vl"] | {"hidden_size": tiny.dim},
        tie_word_embeddings=tied,
    )
    spec = spec_of_directory(saved(tmp_path, config))
    assert [module.name for module in spec.modules] == ["image", BACKBONE]
    assert spec.num_parameters == num_parameters(on_meta(transformers.Qwen2VLForConditionalGeneration, config))


@pytest.mark.parametrize("layers", [-2, [-2, -1]])
def test_a_directory_with_llava(tiny, tmp_path, layers):
    config = transformers.LlavaConfig(
        text_config=tiny.backbone_options | {"model_type": "llama", "vocab_size": 50},
        vision_config=tiny.encoders["clip"] | {"model_type": "clip_vision_model"},
        vision_feature_layer=layers,
    )
    spec = spec_of_directory(saved(tmp_path, config) / "config.json")
    model = on_meta(transformers.LlavaForConditionalGeneration, config)
    assert spec.num_parameters == num_parameters(model)
    assert spec.edges == (("image", BACKBONE),)


def test_a_directory_with_qwen2_audio(tiny, tmp_path):
    config = transformers.Qwen2AudioConfig(
        text_config=tiny.backbone_options | {"model_type": "qwen2", "vocab_size": 50},
        audio_config=tiny.encoders["qwen2_audio"] | {"model_type": "qwen2_audio_encoder"},
    )
    spec = spec_of_directory(saved(tmp_path, config))
    assert spec.module("audio").padded
    model = on_meta(transformers.Qwen2AudioForConditionalGeneration, config)
    assert spec.num_parameters == num_parameters(model)


QWEN2_VL = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584},
}
SMALLER = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "vision_config": QWEN2_VL["vision_config"] | {"hidden_size": 1536},
}
CLIP_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 156032,
}


GEMMA_2B = {
    "model_type": "gemma",
    "hidden_act": "gelu",
    "hidden_activation": None,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
PHI_3_MINI_128K = {
    "model_type": "phi3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_scaling": {"long_factor": [1.08 + i for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "vocab_size": 32064,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 32000,
}
QWEN_3_30B_A3B = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
    "vocab_size": 151936,
}
OLMO_2_1B = {
    "model_type": "olmo2",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rope_scaling": None,
    "rope_theta": 500000,
    "vocab_size": 100352,
}
LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        pytest.param(GEMMA_2B, 2_506_172_416, id="gemma-2b"),
        pytest.param(GEMMA_3_1B, 999_885_952, id="gemma-3-1b-it"),
        pytest.param(PHI_3_MINI_128K, 3_821_079_552, id="Phi-3-mini-128k"),
        pytest.param(OLMO_2_1B, 1_484_916_736, id="OLMo-2-0425-1B"),
        pytest.param(MIXTRAL_8X7B, 46_702_792_704, id="Mixtral-8x7B-v0.1"),
        pytest.param(QWEN_3_30B_A3B, 30_532_122_624, id="Qwen3-30B-A3B"),
        pytest.param(LLAMA_3_1_8B, 8_030_261_248, id="Llama-3.1-8B"),
        pytest.param(QWEN2_VL, 8_291_375_616, id="Qwen2-VL-7B"),
        pytest.param(QWEN2_VL | SMALLER, 2_208_985_600, id="Qwen2-VL-2B"),
        pytest.param(
            {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
            | {"vision_config": CLIP_LARGE},
            7_063_427_072,
            id="LLaVA-1.5-7B",
        ),
        pytest.param(
            {"model_type": "qwen2_audio", "audio_config": {"model_type": "qwen2_audio_encoder"}}
            | {"text_config": QWEN_7B},
            8_397_094_912,
            id="Qwen2-Audio-7B",
        ),
    ],
)
def test_files_as_published_have_the_published_number_of_parameters(tmp_path, config, published):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert spec_of_directory(file).num_parameters == published


@pytest.mark.parametrize("family", [*ENCODERS, *BACKBONES])
def test_a_directory_with_one_module(tiny, tmp_path, family):
    if family in BACKBONES:
        module = tiny.backbone(family)
        module.causal_lm.config.save_pretrained(tmp_path)
        assert spec_of_directory(tmp_path).modules == (module.spec_module(),)
    else:
        module = tiny.encoder(family)
        module.encoder.model.config.save_pretrained(tmp_path)
        spec = spec_of_directory(tmp_path)
        assert spec.modules[0].name == ("audio" if "audio" in family or family == "whisper" else "image")
        assert spec.num_parameters == num_parameters(module.encoder)


def test_what_a_directory_holds_and_no_family_stands_for_is_named(tiny, tmp_path):
    with pytest.raises(UserError, match=r"There is no .*config\.json"):
        spec_of_directory(tmp_path)
    file = tmp_path / "config.json"
    for text, said in (
        ("{", "is no JSON"),
        ("[" * 100_000, "nests lists and tables"),
        ('{"model_type": [1]}', r"model_type is \[1\]; it must be a name"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=said):
            spec_of_directory(tmp_path)
    file.write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UserError, match="no family stands for a model of type 'bloom'"):
        spec_of_directory(tmp_path)
    file.write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(UserError, match=r"planned by the recipe that trains it: one with \[model\] path = '.*, and \["):
        spec_of_directory(tmp_path)
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(UserError, match="is no config of llama"):
        spec_of_directory(tmp_path)
    config = transformers.LlavaConfig(text_config={"model_type": "bloom"}, vision_config={"model_type": "vit"})
    with pytest.raises(UserError, match="text_config is of type 'bloom'"):
        spec_of_directory(saved(tmp_path, config))
    config = transformers.LlavaConfig(text_config={"model_type": "llama"}, vision_config={"model_type": "vit"})
    with pytest.raises(UserError, match="vision_config is of type 'vit'"):
        spec_of_directory(saved(tmp_path, config))


def test_shapes_alone_describe_the_same_modules(tiny):
    """What has no model yet is described by the functions that describe models."""
    options = tiny.encoders["siglip"]
    shape = Transformer(24, 40, 2, activation="gelu_pytorch_tanh")
    image = shapes.vit("image", shape, 2, row_dim=48, num_positions=16)
    encoder = EncoderConfig(family="siglip", config=options | {"vision_use_head": False})
    assert shapes.connect(image, tiny.dim) == build_modality("image", encoder, tiny.dim, torch.float32, 0).spec_module(
        "image"
    )
    shape = Transformer(16, 24, 2, biases=("query", "value", "output", "mlp"))
    for family, pooled in (("whisper", 1), ("qwen2_audio", 2)):
        audio = shapes.audio_encoder("audio", shape, 2, num_mel_bins=8, num_positions=20, pooled=pooled)
        connected = shapes.connect(audio, tiny.dim, "linear", 2)
        built = tiny.encoder(family, projector={"kind": "linear", "downsample": 2}).spec_module("audio")
        # HF's classes freeze the table of positions, which shapes alone let learn.
        assert [layer.frozen_parameters for layer in built.layers] == [0, 20 * 16, *[0] * (len(built.layers) - 2)]
        layers = (replace(layer, frozen_parameters=0) for layer in built.layers)
        learns = Module.of("audio", layers, padded=True, shareable=True)
        assert connected == learns
    shape = Transformer(
        32, 48, 4, num_kv_heads=2, gated=True, activation="silu", norm="rms", biases=(), causal=True, qk_norm=True
    )
    backbone = tiny.backbone("qwen3", head_dim=8, tie_word_embeddings=True)
    shape = replace(shape, head_dim=8)
    assert shapes.language_model(shape, 2, tiny.vocab, tied=True) == backbone.spec_module()
