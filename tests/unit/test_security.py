"""Recipes are code; checkpoints, weights, tokenizers, media and Plans are data, and reading them runs nothing of them.

Of checkpoints, the tests are in unit/train/checkpoint; of images, in unit/data/test_headers.py.
"""

import json
import pickle

import pytest
import torch
from transformers import Qwen2Config

from motet.core.errors import UserError
from motet.core.plan_file import read_plan
from motet.data.text import ChatTokenizer
from motet.models.build import ModelConfig, build_mllm

TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def weights_bin(folder, bomb):
    (folder / "pytorch_model.bin").write_bytes(bomb.pickle)


def weights_bin_of_an_index(folder, bomb):
    weights_bin(folder, bomb)
    names = {"model.embed_tokens.weight": "pytorch_model.bin", "lm_head.weight": "pytorch_model.bin"}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def weights_called_safetensors(folder, bomb):
    (folder / "model.safetensors").write_bytes(bomb.pickle)


@pytest.mark.parametrize("write", [weights_bin, weights_bin_of_an_index, weights_called_safetensors])
def test_weights_that_are_a_pickle_are_refused(tmp_path, bomb, write):
    Qwen2Config(**TINY).save_pretrained(tmp_path)
    write(tmp_path, bomb)
    with pytest.raises((UserError, pickle.UnpicklingError)):
        build_mllm(ModelConfig(backbone={"family": "qwen2", "path": tmp_path}), 16, torch.float32)
    assert not bomb.has_gone_off()


def test_code_beside_a_tokenizer_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    auto_map = {"AutoTokenizer": ["own.Own", "own.Own"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(UserError, match="cannot be opened"):
        ChatTokenizer.from_directory(tmp_path)
    assert not ran.exists()


def test_a_plan_that_is_a_pickle_is_refused(tmp_path, bomb):
    path = tmp_path / "plan.json"
    path.write_bytes(bomb.pickle)
    with pytest.raises(UserError):
        read_plan(path)
    assert not bomb.has_gone_off()
