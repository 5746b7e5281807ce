"""What is exported is what transformers loads: the same weights, and the same outputs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.models.build import ModelConfig, build_mllm
from motet.models.export import export_hf


def test_a_model_built_from_its_export_gives_the_same_loss(tiny, tmp_path):
    families = list(tiny.encoders)
    encoders = {f: {"family": f, "config": tiny.encoders[f], "projector": {"downsample": 4}} for f in families}
    config = {"backbone": {"family": "qwen3", "config": tiny.backbone_options}, "encoders": encoders}
    mllm = build_mllm(ModelConfig(**config), tiny.vocab, torch.float64, seed=1)
    export_hf(mllm, tmp_path)
    config = {
        "backbone": {"family": "qwen3", "path": tmp_path / "backbone"},
        "encoders": {
            f: {"family": f, "path": tmp_path / "encoders" / f, "projector": {"downsample": 4}} for f in families
        },
    }
    loaded = build_mllm(ModelConfig(**config), tiny.vocab, torch.float64, seed=2)
    for name, module in loaded.encoders.items():
        module.projector.load_state_dict(load_file(tmp_path / "projectors" / f"{name}.safetensors"))
    expected = mllm.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    sizes = tiny.sizes("clip")
    media = {"clip": (tiny.values("clip", sizes), sizes)}
    packed = tiny.Packed.of([30], clip=list(range(int(mllm.encoders["clip"].num_tokens(sizes.numpy()).sum()))))
    assert torch.equal(mllm(packed, media)[0], loaded(packed, media)[0])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3", "phi3", "olmo2"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_backbone(tiny, tmp_path, family, tied):
    encoders = {"audio": {"family": "whisper", "config": tiny.encoders["whisper"]}}
    backbone = {"family": family, "config": tiny.backbone_options | {"tie_word_embeddings": tied}}
    mllm = build_mllm(ModelConfig(backbone=backbone, encoders=encoders), tiny.vocab)
    state = {name: tensor + 0.01 for name, tensor in mllm.state_dict().items()}
    export_hf(mllm, tmp_path, state)
    mllm.load_state_dict(state)
    packed = tiny.Packed.of([9])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone", dtype=torch.float32)
    assert model.config._attn_implementation != "motet_packed"
    logits = model(packed.tokens[None]).logits[0]
    expected = mllm.backbone.causal_lm.lm_head(mllm.backbone._hidden(packed, {}))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    encoder = WhisperEncoder.from_pretrained(tmp_path / "encoders" / "audio")
    clip = tiny.values("whisper", torch.tensor([[40]]))
    expected = mllm.encoders["audio"].encoder(clip, torch.tensor([[40]]))
    torch.testing.assert_close(encoder(clip.T[None]).last_hidden_state[0], expected, rtol=1e-5, atol=1e-5)
    assert "motet" not in (tmp_path / "backbone" / "config.json").read_text()
    assert isinstance(encoder.config, WhisperConfig)


def test_export_keeps_the_dtype_of_the_weights(tiny, tmp_path):
    mllm = build_mllm(
        ModelConfig(backbone={"family": "llama", "config": tiny.backbone_options}), tiny.vocab, torch.bfloat16
    )
    export_hf(mllm, tmp_path)
    assert json.loads((tmp_path / "backbone" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "backbone" / "model.safetensors").values()} == {torch.bfloat16}
