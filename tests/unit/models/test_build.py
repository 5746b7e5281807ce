"""From a config to a model: seeds, directories of every kind, classes of the user's own, and one sentence for what is
wrong.
"""

import json
import os

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from motet.core.errors import UserError
from motet.models.build import EncoderConfig, ModelConfig, build_mllm, build_modality


class OwnEncoder(nn.Module):
    def __init__(self, row_dim: int, dim: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(row_dim, dim)
        self.output_dim = dim

    def num_outputs(self, sizes):
        return np.prod(sizes, axis=1)

    def forward(self, values, sizes):
        return self.layer(values)


class NoEncoder(nn.Module):
    output_dim = 3


def config(tiny, backbone=None, **encoders) -> ModelConfig:
    return ModelConfig(backbone=backbone or {"family": "qwen2", "config": tiny.backbone_options}, encoders=encoders)


def test_weights_depend_on_the_seed_and_the_name_alone(tiny):
    image = {"family": "siglip", "config": tiny.encoders["siglip"]}
    audio = {"family": "whisper", "config": tiny.encoders["whisper"]}
    alone = build_mllm(config(tiny, image=image), tiny.vocab).state_dict()
    generator = torch.random.get_rng_state()
    both = build_mllm(config(tiny, audio=audio, image=image), tiny.vocab).state_dict()
    other = build_mllm(config(tiny, image=image), tiny.vocab, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(torch.equal(tensor, both[name]) for name, tensor in alone.items())
    random = [name for name, tensor in alone.items() if tensor.std() > 0]
    assert len(random) > 20 and not any(torch.equal(alone[name], other[name]) for name in random)


def test_weights_are_the_same_in_every_dtype_and_rotary_frequencies_stay_float32(tiny):
    single, double, half = (
        build_mllm(config(tiny), tiny.vocab, d) for d in (torch.float32, torch.float64, torch.bfloat16)
    )
    for name, tensor in single.state_dict().items():
        assert torch.equal(double.state_dict()[name], tensor.double())
        assert torch.equal(half.state_dict()[name], tensor.bfloat16())
    assert half.backbone.causal_lm.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_class_of_the_users_own(tiny):
    own = {"module": f"{__name__}:OwnEncoder", "args": {"row_dim": 5}, "projector": {"kind": "linear"}}
    module = build_modality("depth", EncoderConfig(**own), tiny.dim, torch.float64, 0)
    out = module(torch.randn(6, 5), torch.tensor([[6]]))
    assert out.shape == (6, tiny.dim) and out.dtype == torch.float64


def test_a_tower_is_read_from_a_larger_checkpoint(tiny, larger_checkpoints, tmp_path, capfd):
    from motet.models.block import plain_names

    for family, (model, tower) in larger_checkpoints.items():
        model.save_pretrained(tmp_path / family)
        capfd.readouterr()
        module = build_modality("x", EncoderConfig(family=family, path=tmp_path / family), tiny.dim, torch.float32, 0)
        assert capfd.readouterr() == ("", "")
        names, loaded = plain_names(module.encoder.model), module.encoder.model.state_dict()
        expected = tower.state_dict()
        assert {names[name] for name in loaded} == expected.keys()
        assert all(torch.equal(loaded[name], expected[names[name]]) for name in loaded)


def test_options_override_those_of_a_directory(tiny, tmp_path):
    model = Qwen2VisionTransformerPretrainedModel(
        Qwen2VisionTransformerPretrainedModel.config_class(**tiny.encoders["qwen2_vl"])
    )
    model.save_pretrained(tmp_path)
    shorter = EncoderConfig(family="qwen2_vl", path=tmp_path, config={"depth": 1})
    assert len(build_modality("image", shorter, tiny.dim, torch.float32, 0).blocks) == 1


def test_wrong_shape_of_config_is_refused():
    wrong = [
        {"family": "siglip", "module": "a:B"},
        {"family": "siglip", "args": {"a": 1}},
        {},
        {"family": "resnet"},
        {"family": "siglip", "pth": "x"},
        {"family": "siglip", "projector": {"downsample": 0}},
    ]
    for encoder in wrong:
        with pytest.raises(ValidationError):
            EncoderConfig(**encoder)


@pytest.mark.parametrize("name", ["backbone", "a.b", "", "my image"])
def test_an_encoder_cannot_have_any_name(tiny, name):
    with pytest.raises(ValidationError, match="cannot name an encoder"):
        ModelConfig(backbone={"family": "qwen2"}, encoders={name: {"family": "siglip"}})


def check(message, tiny, backbone=None, vocab=None, **encoders):
    with pytest.raises(UserError, match=message) as error:
        build_mllm(config(tiny, backbone, **encoders), vocab or tiny.vocab)
    assert "\n" not in str(error.value)


def test_wrong_options_are_named(tiny):
    check(
        "backbone.config: Qwen2Config has no option hiden_size", tiny, {"family": "qwen2", "config": {"hiden_size": 8}}
    )
    check("encoders.image.config: .* has no option depht", tiny, image={"family": "qwen2_vl", "config": {"depht": 1}})
    check(
        "backbone.config: no qwen2 model can be made of it .*hidden_size",
        tiny,
        {"family": "qwen2", "config": {"hidden_size": "wide"}},
    )
    layerdrop = tiny.encoders["whisper"] | {"encoder_layerdrop": 0.1}
    check("encoder_layerdrop must be 0", tiny, a={"family": "whisper", "config": layerdrop})
    drop_path = tiny.encoders["dinov2"] | {"drop_path_rate": 0.1}
    check("drop_path_rate must be 0", tiny, a={"family": "dinov2", "config": drop_path})
    large = tiny.encoders["internvl"] | {"norm_type": "rms_norm", "use_qk_norm": True}
    check("norm_type is 'rms_norm', which Motet does not compute", tiny, a={"family": "internvl", "config": large})
    small = {"family": "qwen2", "config": tiny.backbone_options | {"vocab_size": 10}}
    check("vocabulary has 10 entries, but the tokenizer needs 50", tiny, small)


def test_wrong_directories_are_named(tiny, tmp_path):
    check("there is no .*config.json", tiny, {"family": "qwen2", "path": tmp_path / "absent"})
    build = {"family": "llama", "config": tiny.backbone_options}
    llama = build_mllm(config(tiny, build), tiny.vocab).backbone.causal_lm.config
    model = transformers.LlamaForCausalLM(llama)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    check("holds a model of type 'llama', where 'qwen2' is needed", tiny, {"family": "qwen2", "path": tmp_path})
    check(
        "has shape .*, where the config asks for",
        tiny,
        {"family": "llama", "path": tmp_path, "config": {"hidden_size": 16}},
    )
    check("vocabulary has 50 entries", tiny, {"family": "llama", "path": tmp_path}, vocab=60)
    check("lacks .* weights", tiny, {"family": "llama", "path": tmp_path, "config": {"num_hidden_layers": 3}})
    check("holds a model of type 'llama'", tiny, x={"family": "siglip", "path": tmp_path})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    check("cannot be loaded", tiny, {"family": "llama", "path": tmp_path})
    weights.unlink()
    check("cannot be loaded", tiny, {"family": "llama", "path": tmp_path})
    (tmp_path / "config.json").write_text("{")
    check("is no JSON", tiny, {"family": "llama", "path": tmp_path})
    (tmp_path / "config.json").write_text(json.dumps({}))
    check("type None", tiny, {"family": "llama", "path": tmp_path})


@pytest.mark.parametrize("named", ["../elsewhere.safetensors", "/etc/passwd", 7])
def test_weights_are_files_of_their_directory(tiny, tmp_path, named):
    llama = build_mllm(config(tiny, {"family": "llama", "config": tiny.backbone_options}), tiny.vocab)
    (tmp_path / "config.json").write_text(llama.backbone.causal_lm.config.to_json_string())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": named}}))
    check("which is no file beside it", tiny, {"family": "llama", "path": tmp_path})
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "a.safetensors"}}))
    os.mkfifo(tmp_path / "a.safetensors")
    check("a.safetensors is a pipe, not a regular file", tiny, {"family": "llama", "path": tmp_path})


def test_wrong_classes_are_named(tiny):
    check("cannot be imported", tiny, x={"module": "no.such.package:Class"})
    check("cannot be imported", tiny, x={"module": f"{__name__}:Absent"})
    check("cannot be imported", tiny, x={"module": "no_colon"})
    check("does not take the given args", tiny, x={"module": f"{__name__}:OwnEncoder", "args": {"a": 1}})
    check("lacks num_outputs", tiny, x={"module": f"{__name__}:NoEncoder"})
    check("lacks output_dim and num_outputs", tiny, x={"module": "builtins:dict"})
