"""What is exported is what transformers loads: the same weights, and the same outputs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoImageProcessor, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.core.errors import UserError
from motet.models.build import ModelConfig, build_mllm
from motet.models.export import export_hf
from motet.models.module import ModalityModule
from motet.models.projector import Projector, ProjectorConfig


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe"],
)
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_transformers_loads_the_backbone(tiny, tmp_path, family, tied):
    encoders = {"audio": {"family": "whisper", "config": tiny.encoders["whisper"]}}
    backbone = {"family": family, "config": tiny.options_of(family) | {"tie_word_embeddings": tied}}
    mllm = build_mllm(ModelConfig(backbone=backbone, encoders=encoders), tiny.vocab)
    state = {name: tensor + 0.01 for name, tensor in mllm.state_dict().items()}
    export_hf(mllm, tmp_path, state)
    written = load_file(tmp_path / "backbone" / "model.safetensors")
    assert ("lm_head.weight" in written) != tied, "tied weights are written once, also where each name has a tensor"
    mllm.load_state_dict(state)
    packed = tiny.Packed.of([9])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone", dtype=torch.float32)
    assert model.config._attn_implementation != "motet_packed"
    logits = model(packed.tokens[None]).logits[0]
    expected = mllm.backbone.logits(mllm.backbone.hidden_states(packed, {}))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    encoder = WhisperEncoder.from_pretrained(tmp_path / "encoders" / "audio")
    clip = tiny.values("whisper", torch.tensor([[40]]))
    expected = mllm.encoders["audio"].encoder(clip, torch.tensor([[40]]))
    torch.testing.assert_close(encoder(clip.T[None]).last_hidden_state[0], expected, rtol=1e-5, atol=1e-5)
    assert "motet" not in (tmp_path / "backbone" / "config.json").read_text()
    assert isinstance(encoder.config, WhisperConfig)


def test_an_output_layer_that_the_config_ties_and_the_files_do_not_is_refused(tiny, tmp_path):
    """transformers does not tie it, and an export by the config would have the embedding in its place."""
    options = tiny.backbone_options | {"vocab_size": tiny.vocab, "pad_token_id": None}
    stored = Qwen2ForCausalLM(Qwen2Config(**options, tie_word_embeddings=False))
    stored.config.tie_word_embeddings = True
    stored.save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    for deferred in (False, True):
        with pytest.raises(UserError, match="says tie_word_embeddings, but its output layer has weights of its own"):
            build_mllm(ModelConfig(backbone={"family": "qwen2", "path": tmp_path}), tiny.vocab, deferred=deferred)
    backbone = {"family": "qwen2", "path": tmp_path, "config": {"tie_word_embeddings": False}}
    head = build_mllm(ModelConfig(backbone=backbone), tiny.vocab).backbone.causal_lm.lm_head
    assert torch.equal(head.weight, stored.lm_head.weight)


def test_export_keeps_the_dtype_of_the_weights(tiny, tmp_path):
    mllm = build_mllm(
        ModelConfig(backbone={"family": "llama", "config": tiny.backbone_options}), tiny.vocab, torch.bfloat16
    )
    export_hf(mllm, tmp_path)
    assert json.loads((tmp_path / "backbone" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "backbone" / "model.safetensors").values()} == {torch.bfloat16}


class Adapted(nn.Module):
    """What peft puts in the place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def a_model(tiny, **encoders):
    backbone = {"family": "llama", "config": tiny.backbone_options}
    return build_mllm(ModelConfig(backbone=backbone, encoders=encoders), tiny.vocab)


def names(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_injected_adapters_are_refused_before_anything_is_written(tiny, tmp_path):
    target = tmp_path / "export"
    mllm = a_model(tiny, image={"family": "clip", "config": tiny.encoders["clip"]})
    export_hf(mllm, target)
    before = names(tmp_path)
    attention = mllm.encoders["image"].encoder.model.encoder.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    with pytest.raises(UserError, match=r"encoders/image cannot be exported: .*q_proj.base_layer.weight is not as in"):
        export_hf(mllm, target)
    assert names(tmp_path) == before
    mllm = a_model(tiny)
    layer = mllm.backbone.causal_lm.model.layers[0]
    layer.inner.mlp.down_proj = Adapted(layer.inner.mlp.down_proj)
    with pytest.raises(UserError, match=r"backbone cannot be exported: .*Merge|merge adapters into the weights"):
        export_hf(mllm, tmp_path / "other")
    assert names(tmp_path) == before


def test_weights_of_another_shape_are_refused(tiny, tmp_path):
    mllm = a_model(tiny)
    state = mllm.state_dict()
    name = next(name for name in state if name.endswith("embed_tokens.weight"))
    with pytest.raises(UserError, match=r"model.embed_tokens.weight is not as in a LlamaForCausalLM"):
        export_hf(mllm, tmp_path, state | {name: torch.zeros(51, tiny.dim)})
    assert names(tmp_path) == []


def test_a_crash_leaves_the_earlier_export_and_nothing_that_looks_whole(tiny, tmp_path, monkeypatch):
    mllm, target = a_model(tiny, image={"family": "clip", "config": tiny.encoders["clip"]}), tmp_path / "export"
    export_hf(mllm, target)
    before = load_file(target / "backbone" / "model.safetensors")
    monkeypatch.setattr("motet.models.export.save_file", lambda *_: 1 / 0)
    for parameter in mllm.parameters():
        parameter.data += 1
    for where in (target, tmp_path / "first"):
        with pytest.raises(ZeroDivisionError):
            export_hf(mllm, where)
    assert not (tmp_path / "first").exists()
    kept = load_file(target / "backbone" / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
    monkeypatch.undo()
    export_hf(mllm, target)
    assert not torch.equal(
        load_file(target / "backbone" / "model.safetensors")["lm_head.weight"], before["lm_head.weight"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_what_is_no_export_is_never_replaced(tiny, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UserError, match="exists and is no export"):
            export_hf(a_model(tiny), target)
    assert names(tmp_path) == ["thesis.txt"]


class Beside(nn.Module):
    """An HF model, and weights beside it: a second norm, tied to the first."""

    output_dim = 24

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model
        self.norm = nn.LayerNorm(24)
        self.tied = nn.LayerNorm(24)
        self.tied.weight = self.norm.weight

    def num_outputs(self, sizes):
        return sizes.prod(1)


class Hook(nn.Module):
    """A callback with weights, of so many arguments."""

    def __init__(self, num_arguments, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        if num_arguments == 3:
            self.forward = lambda embeds, features, sequences: embeds

    def forward(self, rows, sizes):
        return rows


def test_nothing_that_has_weights_is_left_out(tiny, tmp_path):
    mllm = a_model(tiny)
    tower = tiny.encoder("siglip", torch.float32).encoder.model
    hooks = {"before": Hook(2, 2), "between": Hook(2, 5), "after": Hook(2, 3)}
    projector = Projector(24, tiny.dim, ProjectorConfig())
    mllm.encoders["image"] = ModalityModule(Beside(tower), projector, **hooks)
    mllm.backbone.merge = Hook(3, 4)
    export_hf(mllm, tmp_path)
    stored = {}
    for path in (
        "encoders/image/model",
        "projectors/image",
        "hooks/image.before",
        "hooks/image.between",
        "hooks/image.after",
    ):
        stored |= {f"{path} {name}": tensor for name, tensor in load_file(tmp_path / f"{path}.safetensors").items()}
    stored |= load_file(tmp_path / "hooks/backbone.merge.safetensors")
    assert len(stored) == len([name for name in mllm.state_dict() if "causal_lm" not in name])
    assert torch.equal(stored["encoders/image/model tied.weight"], mllm.encoders["image"].encoder.norm.weight)


def test_what_makes_rows_of_images_goes_along(tiny, tmp_path):
    mllm = a_model(tiny, image={"family": "siglip", "config": tiny.encoders["siglip"]})
    said = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}}
    export_hf(mllm, tmp_path / "export", processors={"image": said})
    processor = AutoImageProcessor.from_pretrained(tmp_path / "export" / "encoders" / "image")
    assert (processor.size["height"], processor.size["width"]) == (32, 32)


def test_how_to_generate_and_the_tokenizer_go_along(tiny, tmp_path):
    mllm = a_model(tiny)
    # As in Llama 2's own directory, which transformers reads and would not write.
    mllm.backbone.causal_lm.generation_config.temperature = 0.9
    mllm.backbone.causal_lm.generation_config.eos_token_id = [2, 7]
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    # As a rule it is the directory of a model: its weights are those from before.
    weights = (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "original/consolidated.00.pth",
        "w.npz",
    )
    for name in weights:
        (tmp_path / "words" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "words" / name).write_text("old")
    export_hf(mllm, tmp_path / "export", tokenizer=tmp_path / "words")
    stored = json.loads((tmp_path / "export" / "backbone" / "generation_config.json").read_text())
    assert (stored["temperature"], stored["eos_token_id"]) == (0.9, [2, 7])
    assert (tmp_path / "export" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    copied = [file for file in (tmp_path / "export" / "tokenizer").rglob("*") if file.is_file()]
    assert [file.name for file in copied] == ["tokenizer.json"]
