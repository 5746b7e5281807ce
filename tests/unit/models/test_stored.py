"""Weights that are read by the slice: what transformers would load, and what is refused as it is where it loads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.core.errors import UserError
from motet.models.build import EncoderConfig, ModelConfig, build_mllm, build_modality
from motet.models.export import export_hf
from motet.models.families.registry import BACKBONES, ENCODERS
from motet.models.load import on_meta
from motet.models.materialise import fill_parameters
from motet.models.stored import stored_tensors

CPU = torch.device("cpu")


def test_towers_of_larger_checkpoints_are_read_by_the_slice(tiny, larger_checkpoints, tmp_path):
    for family, (model, _) in larger_checkpoints.items():
        model.save_pretrained(tmp_path / family, max_shard_size="10KB")
        config = EncoderConfig(family=family, path=tmp_path / family)
        expected = build_modality("x", config, tiny.dim, torch.float64, 0)
        found = build_modality("x", config, tiny.dim, torch.float64, 0, deferred=True)
        assert all(each.is_meta for each in found.encoder.model.parameters())
        fill_parameters(found.encoder.model, "encoders.x", ENCODERS[family], config.path, 0, CPU)
        for (name, one), (other_name, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
            assert name == other_name and torch.equal(one, other) and one.requires_grad == other.requires_grad
        for (name, one), (other_name, other) in zip(expected.named_buffers(), found.named_buffers(), strict=True):
            assert name == other_name and torch.equal(one, other)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_lie_in_files_one_by_one_are_read_by_the_slice(tiny, tmp_path, family):
    """In several files, so that the matrices of an expert are apart."""
    options = tiny.options_of(family)
    model = build_mllm(ModelConfig(backbone={"family": family, "config": options}), tiny.vocab)
    export_hf(model, tmp_path / "export")
    folder = tmp_path / "export/backbone"
    weights = load_file(folder / "model.safetensors")
    names = [[name for name in weights if ("up_proj" in name or ".w3." in name) == is_up] for is_up in (False, True)]
    assert all(names), "experts one by one"
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, held in zip(files, names, strict=True):
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in zip(files, names, strict=True) for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = ModelConfig(backbone={"family": family, "path": folder})
    deferred = build_mllm(config, tiny.vocab, deferred=True).backbone.causal_lm
    assert all(each.is_meta for each in deferred.parameters())
    fill_parameters(deferred, "backbone", BACKBONES[family], folder, 0, CPU)
    expected = dict(model.backbone.causal_lm.named_parameters())
    for name, parameter in deferred.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    (source,) = (
        stored_tensors(on_meta(BACKBONES[family], deferred.config), BACKBONES[family], folder)[name]
        for name in ["model.layers.0.mlp.experts.gate_up_proj"]
    )
    whole = next(value for name, value in expected.items() if "0" in name and "gate_up_proj" in name)
    assert torch.equal(source[1:3, 5:9], whole[1:3, 5:9])
    held = {name: weights[name] for name in names[1][1:]}
    save_file(held, folder / files[1], {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.backbone\.path"):
        build_mllm(config, tiny.vocab, deferred=True)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_tower_of_a_quantised_model_is_read_if_it_is_not_quantised_itself(
    tiny, larger_checkpoints, tmp_path, deferred
):
    """transformers would read numbers without their scale: it applies the config of the tower alone."""
    model, _ = larger_checkpoints["clip"]
    model.save_pretrained(tmp_path)
    config, file = EncoderConfig(family="clip", path=tmp_path), tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"text_model.head.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    build_modality("x", config, tiny.dim, torch.float32, 0, deferred=deferred)
    name = next(name for name in weights if "vision" in name and "fc1.weight" in name)
    scale = weights[name].abs().max() / 127
    weights |= {name: (weights[name] / scale).to(torch.int8), f"{name}_scale": scale}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"model\.encoders\.x\.path: {name} in .* is quantised \(I8\)"):
        build_modality("x", config, tiny.dim, torch.float32, 0, deferred=deferred)


@pytest.fixture
def stored(tiny, tmp_path):
    """A backbone in a directory, its weights, and the config that reads it."""
    given = ModelConfig(backbone={"family": "qwen2", "config": tiny.backbone_options | {"tie_word_embeddings": True}})
    export_hf(build_mllm(given, tiny.vocab), tmp_path / "export")
    folder = tmp_path / "export/backbone"
    (folder / "generation_config.json").write_text('{"top_k": 7, "do_sample": true}')
    weights = load_file(folder / "model.safetensors")
    return folder, weights, ModelConfig(backbone={"family": "qwen2", "path": folder})


def test_what_generates_text_stays_as_it_was_stored(stored, tiny):
    models = [build_mllm(stored[2], tiny.vocab, deferred=deferred) for deferred in (False, True)]
    whole, deferred = (model.backbone.causal_lm.generation_config.to_dict() for model in models)
    assert deferred == whole and deferred["top_k"] == 7


@pytest.mark.parametrize("wrong", ["missing", "shape", "stray", "damaged", "quantised"])
def test_what_is_refused_is_refused_before_sharding(stored, tiny, wrong):
    folder, weights, config = stored
    file, norm = folder / "model.safetensors", "model.norm.weight"
    if wrong == "missing":
        del weights[norm]
    elif wrong == "shape":
        weights[norm] = weights[norm][:-1].clone()
    elif wrong == "stray":
        weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    elif wrong == "quantised":
        weights[norm] = weights[norm].to(torch.float8_e4m3fn)
    save_file(weights, file, {"format": "pt"})
    if wrong == "damaged":
        file.write_bytes(file.read_bytes()[:-8])
    refusals = []
    for deferred in (False, True):
        with pytest.raises(UserError) as refusal:
            build_mllm(config, tiny.vocab, deferred=deferred)
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1] and "model.backbone.path" in refusals[0]


def test_a_tied_weight_that_is_stored_twice_is_read_whole(stored, tiny):
    folder, weights, config = stored
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    whole, deferred = (build_mllm(config, tiny.vocab, deferred=each).backbone.causal_lm for each in (False, True))
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in (whole, deferred))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), deferred.parameters(), strict=True))
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for each in (False, True):
        with pytest.raises(UserError, match="an export would lose"):
            build_mllm(config, tiny.vocab, deferred=each)


def test_what_a_class_freezes_stays_frozen_in_a_directory(tiny, larger_checkpoints, tmp_path):
    larger_checkpoints["whisper"][0].save_pretrained(tmp_path)
    drawn, read = (
        build_modality("x", EncoderConfig(family="whisper", **source), tiny.dim, torch.float32, 0).encoder.model
        for source in ({"config": tiny.encoders["whisper"]}, {"path": tmp_path})
    )
    assert not drawn.embed_positions.weight.requires_grad and not read.embed_positions.weight.requires_grad
