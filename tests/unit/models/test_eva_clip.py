"""EVA-CLIP's tower from a directory as published, beside a plain computation; and the directory that comes back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.autograd import grad
from torch.nn.functional import conv2d, gelu, layer_norm, linear

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.build import EncoderConfig, ModelConfig, build_mllm, build_modality
from motet.models.export import export_hf
from motet.models.materialise import materialise
from motet.models.spec import spec_of_directory

WIDTH, INNER, LAYERS, HEADS, SIDE, GRID, EPS = 24, 40, 3, 2, 4, 4, 1e-6
VISION = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": None,
    "attention_dropout": 0.0,
    "bad_words_ids": None,
    "dropout": 0.0,
    "finetuning_task": None,
    "hidden_act": "gelu",
    "hidden_size": WIDTH,
    "image_size": GRID * SIDE,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": EPS,
    "max_length": 20,
    "model_type": "clip_vision_model",
    "num_attention_heads": HEADS,
    "num_channels": 3,
    "num_hidden_layers": LAYERS,
    "patch_size": SIDE,
    "projection_dim": 16,
    "pruned_heads": {},
    "tf_legacy_loss": False,
    "top_k": 50,
    "torch_dtype": None,
    "use_bfloat16": False,
}
KINDS = {
    "EVA02-CLIP-E+": {"q_bias": True, "k_bias": False, "v_bias": True, "post_layernorm": True},
    "EVA-CLIP-8B": dict.fromkeys(("q_bias", "k_bias", "v_bias", "post_layernorm"), False) | {"use_rms_norm": True},
    "of CLIP's options": dict.fromkeys(("q_bias", "k_bias", "v_bias"), True) | {"post_layernorm": None},
}
"""The options of published directories, and all biases."""


def written(folder, kind, **options):
    """The directory of a whole EVA-CLIP; the weights of its tower without their prefix, in float64."""
    vision = VISION | KINDS[kind] | options
    config = {
        "architectures": ["EvaCLIPModel"],
        "auto_map": {"AutoConfig": "configuration_evaclip.EvaCLIPConfig", "AutoModel": "modeling_evaclip.EvaCLIPModel"},
        "model_type": "clip",
        "projection_dim": 16,
        "text_config": {"hidden_size": 16, "model_type": "clip_text_model"},
        "vision_config": vision,
    }
    norm = {"weight": (WIDTH,)} if vision.get("use_rms_norm") else {"weight": (WIDTH,), "bias": (WIDTH,)}
    shapes = {"embeddings.class_embedding": (WIDTH,), "embeddings.position_embedding.weight": (GRID**2 + 1, WIDTH)}
    shapes |= {"embeddings.patch_embedding.weight": (WIDTH, 3, SIDE, SIDE), "embeddings.patch_embedding.bias": (WIDTH,)}
    shapes |= {f"post_layernorm.{name}": shape for name, shape in norm.items()}
    for layer in range(LAYERS):
        own = {f"layer_norm{number}.{name}": shape for number in (1, 2) for name, shape in norm.items()}
        for name in ("q", "k", "v", "out"):
            own[f"self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
            if vision.get(f"{name}_bias", True):
                own[f"self_attn.{name}_proj.bias"] = (WIDTH,)
        own |= {"mlp.fc1.weight": (INNER, WIDTH), "mlp.fc1.bias": (INNER,)}
        own |= {"mlp.fc2.weight": (WIDTH, INNER), "mlp.fc2.bias": (WIDTH,)}
        shapes |= {f"encoder.layers.{layer}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(3)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    others = {"text_model.final_layer_norm.weight": torch.ones(16), "logit_scale": torch.tensor(2.7)}
    stored = {f"vision_model.{name}": weight for name, weight in weights.items()}
    save_file(stored | others, folder / "model.safetensors", {"format": "pt"})
    return folder, {name: weight.double().requires_grad_() for name, weight in weights.items()}


def plain_rows(weights, kind, pixels):
    """The rows of one image's patches, [GRID * GRID, WIDTH], as EVA-CLIP's code computes them, in float64."""
    norms_outputs, is_rms = KINDS[kind]["post_layernorm"], KINDS[kind].get("use_rms_norm")

    def normed(rows, name):
        if is_rms:
            return weights[f"{name}.weight"] * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
        return layer_norm(rows, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)

    def times(rows, name):
        return linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def attended(rows, name):
        query, key, value = (
            times(rows, f"{name}.{each}_proj").view(len(rows), HEADS, -1).transpose(0, 1) for each in "qkv"
        )
        scores = (query * (WIDTH // HEADS) ** -0.5) @ key.transpose(1, 2)
        return times((scores.softmax(-1) @ value).transpose(0, 1).flatten(1), f"{name}.out_proj")

    convolution = weights["embeddings.patch_embedding.weight"], weights["embeddings.patch_embedding.bias"]
    patches = conv2d(pixels[None], *convolution, stride=SIDE)[0].flatten(1).T
    hidden = torch.cat([weights["embeddings.class_embedding"][None], patches])
    hidden = hidden + weights["embeddings.position_embedding.weight"]
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}"
        first, second = f"{name}.layer_norm1", f"{name}.layer_norm2"
        if norms_outputs:
            hidden = hidden + normed(attended(hidden, f"{name}.self_attn"), first)
            hidden = hidden + normed(times(gelu(times(hidden, f"{name}.mlp.fc1")), f"{name}.mlp.fc2"), second)
        else:
            hidden = hidden + attended(normed(hidden, first), f"{name}.self_attn")
            hidden = hidden + times(gelu(times(normed(hidden, second), f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
    return hidden[1:]


def patches_of(pixels):
    """Images [n, 3, height, width] as rows of patches, one image after the other."""
    return pixels.unflatten(2, (GRID, SIDE)).unflatten(4, (GRID, SIDE)).permute(0, 2, 4, 1, 3, 5).reshape(-1, 48)


def encoder_of(folder, dtype=torch.float64, **options):
    config = EncoderConfig(family="eva_clip", path=folder, **options)
    return build_modality("image", config, 8, dtype, 0).encoder


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_gradients_are_those_of_a_plain_computation(tmp_path, kind):
    folder, weights = written(tmp_path / "model", kind)
    encoder = encoder_of(folder)
    pixels = torch.randn(2, 3, GRID * SIDE, GRID * SIDE, dtype=torch.float64)
    got = encoder(patches_of(pixels), torch.full((2, 2), GRID))
    wanted = torch.cat([plain_rows(weights, kind, image) for image in pixels])
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    factors, names = torch.randn_like(got), plain_names(encoder.model)
    mine = {names[name]: each for name, each in encoder.model.named_parameters() if each.requires_grad}
    assert {name for name in weights if name not in mine} == {name for name in weights if "post_layernorm" in name}
    found = grad((got * factors).sum(), list(mine.values()))
    expected = grad((wanted * factors).sum(), [weights[name] for name in mine])
    # The bias of keys has no gradient but for rounding; it is measured by the others.
    least = 1e-6 * max(float(each.norm()) for each in expected)
    for one, other in zip(found, expected):
        assert float((one - other).norm()) < 1e-8 * max(float(other.norm()), least)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_comes_back_bit_for_bit(tmp_path, kind):
    folder, weights = written(tmp_path / "model", kind)
    parts = {"backbone": {"family": "qwen2", "config": {"hidden_size": 8, "num_hidden_layers": 1}}}
    parts["backbone"]["config"] |= {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = ModelConfig(**parts, encoders={"image": {"family": "eva_clip", "path": folder}})
    model = build_mllm(config, 20, torch.float32, deferred=True)
    assert all(each.is_meta for each in model.encoders["image"].encoder.parameters()), "read by the slice"
    materialise(model, config, 0, torch.device("cpu"))
    export_hf(model, tmp_path / "out")
    out = tmp_path / "out/encoders/image"
    after = load_file(out / "model.safetensors")
    assert after.keys() == {f"vision_model.{name}" for name in weights}
    before = load_file(folder / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in after)
    stored = json.loads((out / "config.json").read_text())
    assert (stored["architectures"], stored["model_type"]) == (["EvaCLIPVisionModel"], "clip_vision_model")
    read = (
        "q_bias",
        "k_bias",
        "v_bias",
        "post_layernorm",
        "use_rms_norm",
        "hidden_size",
        "layer_norm_eps",
        "hidden_act",
    )
    of_kind = {"use_rms_norm": False} | VISION | KINDS[kind]
    assert {name: stored[name] for name in read} == {name: of_kind[name] for name in read}
    values, sizes = torch.randn(16, 48), torch.tensor([[4, 4]])
    assert torch.equal(encoder_of(out, torch.float32)(values, sizes), encoder_of(folder, torch.float32)(values, sizes))


def test_what_is_not_known_of_a_tower_is_refused(tmp_path):
    folder, _ = written(tmp_path / "drops", "EVA-CLIP-8B", drop_path_rate=0.1)
    with pytest.raises(UserError, match="drop_path_rate is no option of EVA-CLIP's tower that Motet knows; remove it"):
        encoder_of(folder)
    # Without the key norms have a bias, which these weights lack.
    folder, _ = written(tmp_path / "unsaid", "EVA-CLIP-8B")
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["use_rms_norm"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lacks 7 weights of EvaCLIPVisionModel, .*layer_norm1.bias for one"):
        encoder_of(folder)
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="it is EvaCLIPModel's, and has no table vision_config"):
        encoder_of(folder)


def test_it_is_told_from_clip(tmp_path):
    folder, _ = written(tmp_path / "model", "EVA02-CLIP-E+")
    with pytest.raises(UserError, match="a model of type 'eva_clip_vision_model', where 'clip_vision_model' is needed"):
        build_modality("image", EncoderConfig(family="clip", path=folder), 8, torch.float32, 0)
    assert spec_of_directory(folder).num_parameters == sum(each.numel() for each in encoder_of(folder).parameters())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["CLIPModel"]}))
    with pytest.raises(UserError, match="a model of type 'clip', where 'eva_clip_vision_model' is needed"):
        encoder_of(folder)
    with pytest.raises(UserError, match="k_bias is False, which Motet does not compute; it must be absent or True"):
        build_modality("image", EncoderConfig(family="clip", path=folder), 8, torch.float32, 0)


def test_a_recipe_overrides_a_directory_and_has_its_options(tmp_path):
    folder, _ = written(tmp_path / "model", "EVA02-CLIP-E+")
    assert encoder_of(folder, config={"attention_dropout": 0.1}).model.config.attention_dropout == 0.1
    assert len(encoder_of(folder, feature_layer=-2).blocks) == LAYERS - 1
    with pytest.raises(UserError, match="has no option drop_path"):
        encoder_of(folder, config={"drop_path": 0.1})
