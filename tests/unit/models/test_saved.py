"""The widths that a spec says are kept for backward, against the tensors that torch keeps.

In bfloat16, as one trains. Counted are storages that no parameter owns, each once. A tenth at most is left out: a copy
of keys and values for each query head where no kernel groups queries, rotary tables, a copy of attention's output.
"""

import numpy as np
import pytest
import torch

from motet.cost.flops import work_of
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_backbone, build_mllm, build_modality

VISION = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 4,
}
AUDIO = {
    "d_model": 128,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "num_mel_bins": 80,
    "max_source_positions": 200,
}
ENCODERS = {
    "siglip": VISION,
    "clip": VISION,
    "eva_clip": VISION | {"use_rms_norm": True},
    "eva_clip with norms behind": VISION | {"post_layernorm": True},
    "dinov2": {name: value for name, value in VISION.items() if name != "intermediate_size"},
    "qwen2_vl": {"depth": 3, "embed_dim": 128, "hidden_size": 160, "num_heads": 4, "patch_size": 4},
    "whisper": AUDIO,
    "qwen2_audio": AUDIO,
}
BACKBONE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
}
OTHER_NAMES = {
    "gpt2": {
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 352,
        "n_positions": 300,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "opt": {
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 352,
        "max_position_embeddings": 300,
        "dropout": 0.0,
    },
}
UNROTATED = 2 * 128
"""Queries and keys before rotation, of Qwen2-VL and Phi3, which have one product for queries, keys and values: they
share a storage with the values, which attention keeps as they are.
Where the kernel for packed segments runs, on a GPU, it is given a copy of the values.
"""


def kept(model: torch.nn.Module, run) -> float:
    """Elements of the model's dtype."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # Held, so that no other tensor gets its place.
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    size_bytes = sum(storage.nbytes() for storage in storages.values())
    return size_bytes / next(model.parameters()).element_size()


def kept_by_a_block(model, blocks, run) -> float:
    """Elements that the second block keeps, called by itself on what it is given within the model."""
    calls = []
    hook = blocks[1].inner.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    run()
    hook.remove()
    ((hidden, *args), kwargs) = calls[0]
    return kept(model, lambda: blocks[1].inner(hidden.detach().requires_grad_(), *args, **kwargs))


def expected(layers, lengths, more: int) -> float:
    """more: elements of a row that attention layers keep besides."""
    return sum(
        (layer.activation_width + (more if layer.attention else 0)) * work_of(layer, lengths).rows[0]
        for layer in layers
    )


def check(model, run, lengths, more: int = 0) -> None:
    layers = [each.layer for each in model.layers()]
    one = next(layer for layer in layers if layer.attention)
    assert expected([one], lengths, more) == pytest.approx(kept_by_a_block(model, model.blocks, run), rel=0.1)
    assert expected(layers, lengths, more) == pytest.approx(kept(model, run), rel=0.1)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoder(family):
    config = EncoderConfig(family=family.split()[0], config=ENCODERS[family])
    module = build_modality("it", config, 160, torch.bfloat16, 0)
    audio = ENCODERS[family] is AUDIO
    sizes = torch.tensor([[400]] if audio else [[16, 16]])
    row_dim = 80 if audio else 48 * (2 if family == "qwen2_vl" else 1)
    values = torch.randn(int(sizes.prod()), row_dim)
    more = UNROTATED if family == "qwen2_vl" else 0
    check(module, lambda: module(values, sizes), module.lengths(sizes.numpy()), more)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe"),
        *("granite", "gpt2", "opt"),
    ],
)
def test_backbone(tiny, family):
    wide = {"head_dim": 32}
    options = {"qwen3": wide, "gemma": wide, "gemma2": wide, "gemma3": wide, "phi3": {"num_key_value_heads": 4}}
    config = OTHER_NAMES.get(family, BACKBONE) | options.get(family, {})
    backbone = build_backbone(BackboneConfig(family=family, config=config), 50, torch.bfloat16, 0)
    packed = tiny.Packed.of([300])
    packed.targets[:] = True
    check(backbone, lambda: backbone(packed, {}), np.array([300]), UNROTATED if family == "phi3" else 0)


GPT2_NAMES = {"q_proj": "c_attn", "v_proj": "attn.c_proj", "down_proj": "mlp.c_proj"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gpt2"])
@pytest.mark.parametrize(
    "learns", [{"train": False}, ["q_proj", "v_proj"], ["down_proj"], ["mlp.*"], "all-linear", {"freeze": ["*.mlp.*"]}]
)
def test_what_gradients_of_frozen_weights_would_need_is_not_kept(tiny, family, learns):
    """As much less than where all learns as predicted, to the element: what a CPU copies beside it is in both."""
    if family == "gpt2" and isinstance(learns, list):
        learns = [GPT2_NAMES.get(name, name) for name in learns]
    config = {
        "family": family,
        "config": OTHER_NAMES.get(family, BACKBONE) | ({"head_dim": 32} if family == "qwen3" else {}),
    }
    lora = {} if isinstance(learns, dict) else {"backbone": {"rank": 4, "targets": learns}}
    train = {"train": learns.get("train", True)} if isinstance(learns, dict) else {}
    freeze = learns.get("freeze", []) if isinstance(learns, dict) else []
    packed, counted, described = tiny.Packed.of([30]), [], []
    for parts in ({"backbone": config}, {"backbone": config | train, "lora": lora, "freeze": freeze}):
        backbone = build_mllm(ModelConfig(**parts), 50, torch.bfloat16).backbone
        counted.append(kept_by_a_block(backbone, backbone.blocks, lambda model=backbone: model(packed, {})))
        described.append([each.layer for each in backbone.layers() if each.layer.attention][1].kept_width)
    assert counted[0] - counted[1] == 30 * (described[0] - described[1])
    # A LayerNorm keeps its input even where it is frozen, and adapters of all products keep all that these read.
    assert described[1] < described[0] or (family, learns) == ("gpt2", "all-linear")
