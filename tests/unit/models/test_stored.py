"""Weights that are read by the slice: what transformers would load, and what is refused as it is where it loads."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.core.errors import UserError
from motet.models.build import EncoderConfig, ModelConfig, build_mllm, build_modality
from motet.models.export import export_hf
from motet.models.families.registry import ENCODERS
from motet.models.materialise import fill_parameters

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


@pytest.mark.parametrize("wrong", ["missing", "shape", "stray", "damaged"])
def test_what_is_refused_is_refused_before_sharding(stored, tiny, wrong):
    folder, weights, config = stored
    file, norm = folder / "model.safetensors", "model.norm.weight"
    if wrong == "missing":
        del weights[norm]
    elif wrong == "shape":
        weights[norm] = weights[norm][:-1].clone()
    elif wrong == "stray":
        weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    save_file(weights, file, {"format": "pt"})
    if wrong == "damaged":
        file.write_bytes(file.read_bytes()[:-8])
    refusals = []
    for deferred in (False, True):
        with pytest.raises(UserError) as refusal:
            build_mllm(config, tiny.vocab, deferred=deferred)
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1] and "model.backbone.path" in refusals[0]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_weight_that_is_stored_twice_is_read_whole(stored, tiny, is_same):
    folder, weights, config = stored
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0 if is_same else 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    whole, deferred = (build_mllm(config, tiny.vocab, deferred=each).backbone.causal_lm for each in (False, True))
    for model in (whole, deferred):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_same
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), deferred.parameters(), strict=True))


def test_what_a_class_freezes_stays_frozen_in_a_directory(tiny, larger_checkpoints, tmp_path):
    larger_checkpoints["whisper"][0].save_pretrained(tmp_path)
    drawn, read = (
        build_modality("x", EncoderConfig(family="whisper", **source), tiny.dim, torch.float32, 0).encoder.model
        for source in ({"config": tiny.encoders["whisper"]}, {"path": tmp_path})
    )
    assert not drawn.embed_positions.weight.requires_grad and not read.embed_positions.weight.requires_grad
