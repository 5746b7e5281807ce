"""Operations against torch's counter, tiny on the CPU and full size on `meta`, forward and backward.

They are equal to the last one. The counter knows of no mask, so it counts all pairs of causal attention, and it sees
attention only where that is plain products.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from motet.core.item_segments import ItemSegments
from motet.core.shapes import final_norm, multimodal
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.flops import batch_flops, step_flops
from motet.cost.operations import Operations
from motet.models.attention import PackedItems
from motet.models.build import (
    BackboneConfig,
    EncoderConfig,
    ModelConfig,
    build_backbone,
    build_mllm,
    build_modality,
)
from unit.cost.forward_flops import forward_flops
from unit.models.test_module import tile, untile

ENCODERS = ["siglip", "clip", "dinov2", "qwen2_vl", "whisper", "qwen2_audio"]
BACKBONES = [
    "qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe",
    "granite", "gpt2", "opt",
]  # fmt: skip
MIXTURES = ["mixtral", "qwen3_moe"]


UNCAPPED = {"attn_logit_softcapping": None}
"""On a CPU, capped scores are those of tiles, and are computed again in backward."""


def counted(function) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def counted_step(forward) -> tuple[int, int]:
    """Operations of the forward pass, and of forward and backward."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = forward().sum()
        once = counter.get_total_flops()
        result.backward()
    return once, counter.get_total_flops()


def all_pairs(module: Module) -> Module:
    """The module as the counter sees it."""
    stacks = []
    for stack in module.stacks:
        attention = stack.layer.attention
        if attention:
            stack = replace(stack, layer=replace(stack.layer, attention=replace(attention, causal=False, window=0)))
        stacks.append(stack)
    return replace(module, stacks=tuple(stacks))


def is_audio(family: str) -> bool:
    return family in ("whisper", "qwen2_audio")


@pytest.mark.parametrize("family", [*ENCODERS, "eva_clip", "siglip2", "pixtral", "dinov3"])
@pytest.mark.parametrize("train", [True, False])
def test_encoder(tiny, family, train):
    module = tiny.encoder(family, torch.float32, train_encoder=train, projector={"kind": "linear", "downsample": 4})
    # Sides that are whole blocks of what is merged and joined: lengths alone say of how many rows the cost is.
    sizes = torch.tensor([[40]]) if is_audio(family) else torch.tensor([[8, 4]])
    values = tiny.values(family, sizes)
    lengths, spec = module.lengths(sizes.numpy()), module.spec_module("it")
    forward, step = counted_step(lambda: module(values, sizes))
    assert forward_flops(spec, lengths) == forward
    assert step_flops(spec, lengths) == step


@pytest.mark.parametrize("family", ["clip", "siglip", "dinov2", "qwen2_5_vl"])
def test_tiles_take_the_operations_of_segments(tiny, family):
    module = tiny.encoder(family, torch.float32)
    sizes = torch.tensor([[4, 4], [4, 4]])
    values = tiny.values(family, sizes)
    whole = step_flops(module.spec_module("it"), module.lengths(sizes.numpy()))
    module.before, module.after = tile, untile
    if (
        family != "qwen2_5_vl"
    ):  # It says its own windows, of which the layers that see whole images see those of a tile.
        module.cut = lambda sizes: ItemSegments.of([[4] * 4] * len(sizes))
    items = module.segments(sizes.numpy())
    lengths = ItemLengths(np.zeros(2, int), module.lengths(sizes.numpy()), module.num_tokens(sizes.numpy()), items)
    spec = multimodal("it", Module.of(BACKBONE, [final_norm(32)]), [module.spec_module("image")])
    batch = BatchLengths(np.array([99]), np.array([0]), np.zeros(1, np.int32), {"image": lengths})
    _, step = counted_step(lambda: module(values, sizes))
    assert int(Operations(spec)(batch)["image"].sum()) == step
    assert step_flops(spec.module("image"), lengths.length, segments=items) == step
    assert whole != step


def of_items(module, sizes) -> ItemLengths:
    on_host = sizes.numpy()
    columns = module.lengths(on_host), module.num_tokens(on_host), module.segments(on_host)
    return ItemLengths(np.zeros(len(sizes), np.int64), *columns)


QUERIES = {
    "qformer": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2},
    "resampler": {"resampler_depth": 2, "resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("family", "projector", "sizes"),
    [
        # Behind a frozen encoder gradients pass inside of a projector; and rasters are no whole number of squares.
        ("siglip", {"kind": "mlp", "downsample": 4}, [[3, 5]]),
        ("siglip", {"kind": "linear", "pool": 9, "norm": "rms"}, [[4, 5]]),
        ("clip", {"kind": "mlp", "norm": "layer"}, [[3, 5]]),
        ("whisper", {"kind": "mlp", "downsample": 3}, [[40]]),
        # Frames are segments of a video, which has as many queries as any item.
        *(("qwen2_5_vl", {"kind": kind, "queries": 4, "config": QUERIES[kind]}, [[3, 4, 4]]) for kind in QUERIES),
        ("siglip", {"kind": "qformer", "queries": 4, "config": QUERIES["qformer"]}, [[3, 5]]),
    ],
)
def test_a_projectors_rows_and_its_inner_gradients(tiny, family, projector, sizes, train):
    module, sizes = tiny.encoder(family, torch.float32, projector=projector, train_encoder=train), torch.tensor(sizes)
    if sizes.shape[1] == 3:
        values = torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 16)
    else:
        values = tiny.values(family, sizes)
    items = of_items(module, sizes)
    spec = multimodal("it", Module.of(BACKBONE, [final_norm(32)]), [module.spec_module("image")])
    batch = BatchLengths(np.array([99]), np.array([0]), np.zeros(1, np.int32), {"image": items})
    _, step = counted_step(lambda: module(values, sizes))
    assert batch_flops(spec, batch)["image"] == step
    assert int(Operations(spec)(batch)["image"].sum()) * Operations(spec).unit_flops == step


def test_padding_is_computed_on(tiny):
    module = tiny.encoder("whisper", torch.float32)
    sizes = torch.tensor([[40], [12], [26]])
    values, lengths = tiny.values("whisper", sizes), np.array([40, 12, 26])
    spec, together = module.spec_module("it"), np.zeros(3, dtype=np.int64)
    expected = counted(lambda: module(values, sizes))
    # The projector is given real rows only.
    encoder = replace(spec, stacks=spec.stacks[:-1])
    projector = replace(spec, stacks=spec.stacks[-1:])
    padded = forward_flops(encoder, lengths, microbatch=together) + forward_flops(projector, lengths)
    assert padded == expected


@pytest.mark.parametrize("family", BACKBONES)
@pytest.mark.parametrize("train", [True, False])
def test_backbone(tiny, family, train):
    backbone = tiny.backbone(family, train, torch.float32, **(UNCAPPED if family == "gemma2" else {}))
    packed = tiny.Packed.of([64])
    num_targets = backbone(packed, {})[1]
    lengths, spec = np.array([64]), all_pairs(backbone.spec_module())
    forward, step = counted_step(lambda: backbone(packed, {})[0])
    assert forward_flops(spec, lengths, num_targets) == forward
    # A frozen backbone is run backward for the encoders before it.
    assert step_flops(spec, lengths, num_targets, reached=not train) == step


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("beside", ["adapters", "frozen experts", "frozen gates"])
def test_experts_that_do_not_learn(tiny, family, beside):
    """Beside adapters of attention, and where `model.freeze` names them or one of their matrices."""
    freeze = {"frozen experts": ["*.mlp.*"], "frozen gates": ["*.gate_up_proj"]}.get(beside, [])
    lora = {"backbone": {"rank": 2}} if beside == "adapters" else {}
    parts = {"backbone": {"family": family, "config": tiny.options_of(family)}, "lora": lora, "freeze": freeze}
    backbone = build_mllm(ModelConfig(**parts), tiny.vocab).backbone
    packed = tiny.Packed.of([64])
    num_targets = backbone(packed, {})[1]
    forward, step = counted_step(lambda: backbone(packed, {})[0])
    lengths, spec = np.array([64]), all_pairs(backbone.spec_module())
    assert forward_flops(spec, lengths, num_targets) == forward
    assert step_flops(spec, lengths, num_targets) == step


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_nothing_runs_backward_through_frozen_blocks_before_which_nothing_learns(tiny, family):
    parts = {"backbone": {"family": family, "config": tiny.options_of(family)}}
    backbone = build_mllm(ModelConfig(**parts, freeze=["*.embed_tokens.*", "*.layers.0.*"]), tiny.vocab).backbone
    packed = tiny.Packed.of([64])
    num_targets = backbone(packed, {})[1]
    _, step = counted_step(lambda: backbone(packed, {})[0])
    assert step_flops(all_pairs(backbone.spec_module()), np.array([64]), num_targets) == step


@pytest.mark.parametrize("family", ["clip", "qwen2_vl", "whisper"])
def test_recomputation_runs_forward_again(tiny, family):
    module = tiny.encoder(family, torch.float32, projector={"kind": "linear"})
    for block in module.blocks:
        block.recompute = True
    sizes = torch.tensor([[40]]) if is_audio(family) else torch.tensor([[8, 6]])
    values = tiny.values(family, sizes)
    # By default torch stops recomputing before a layer's last product, whose output nothing needs.
    with set_checkpoint_early_stop(False):
        expected = counted(lambda: module(values, sizes).sum().backward())
    lengths = module.lengths(sizes.numpy())
    assert step_flops(module.spec_module("it"), lengths, recomputed=True) == expected


FULL_SIZE = {
    "granite": {  # ibm-granite/granite-3.1-2b-base
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49155,
    },
    "gpt2": {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 4096},  # openai-community/gpt2-xl, but long
    "opt": {  # facebook/opt-6.7b
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "siglip": {  # google/siglip-so400m-patch14-384
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
    "clip": {  # openai/clip-vit-large-patch14-336
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
    "dinov2": {  # facebook/dinov2-giant
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 24,
        "image_size": 518,
        "patch_size": 14,
        "use_swiglu_ffn": True,
    },
    "qwen2_vl": {  # Qwen/Qwen2-VL-7B-Instruct
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "num_heads": 16,
        "mlp_ratio": 4,
    },
    "whisper": {  # openai/whisper-large-v3
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
    },
    "qwen2_audio": {  # Qwen/Qwen2-Audio-7B
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
    },
    "qwen2": {  # Qwen/Qwen2-7B
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3": {  # Qwen/Qwen3-8B
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama": {  # meta-llama/Llama-3.1-8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "mistral": {  # mistralai/Mistral-7B-v0.1
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
    },
    "gemma": {  # google/gemma-7b
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {  # google/gemma-2-9b
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 4096,
        **UNCAPPED,
    },
    "gemma3": {  # google/gemma-3-4b-it, its text model
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "phi3": {  # microsoft/Phi-3-mini-4k-instruct
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
    },
    "olmo2": {  # allenai/OLMo-2-1124-7B
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
"""The published configurations."""
DEPTH = 8
"""Layers of them that are counted, with one of each kind among them: tiny models have shown that layers add up."""


def published(family):
    """The published configuration, of DEPTH layers."""
    depths = {"num_hidden_layers", "n_layer", "depth", "encoder_layers"}
    return {key: min(value, DEPTH) if key in depths else value for key, value in FULL_SIZE[family].items()}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if n else ()) for n, name in enumerate(ENCODERS)]
)
def test_full_size_encoder(family):
    config = EncoderConfig(family=family, config=published(family))
    with torch.device("meta"):
        module = build_modality("it", config, 3584, torch.float32, 0)
    # Two images on the position table's own grid, two clips of 30 s.
    side = {"siglip": 27, "clip": 24, "dinov2": 37, "qwen2_vl": 32}.get(family)
    sizes = torch.tensor([[3000]] * 2 if is_audio(family) else [[side, side]] * 2)
    stem = module.layers()[0].layer
    row_dim = 128 if is_audio(family) else stem.activation_width if family != "clip" else 3 * 14 * 14
    values = torch.empty(int(sizes.prod(1).sum()), row_dim, device="meta")
    lengths, spec = module.lengths(sizes.numpy()), module.spec_module("it")
    forward, step = counted_step(lambda: module(values, sizes))
    assert forward_flops(spec, lengths) == forward
    assert step_flops(spec, lengths) == step


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "qwen2" else pytest.mark.slow)
        for name in BACKBONES
        if name not in MIXTURES
    ],
)
def test_full_size_backbone(family):
    config = BackboneConfig(family=family, config=published(family))
    with torch.device("meta"):
        backbone = build_backbone(config, 10, torch.float32, 0)
    lengths, spec = np.array([4096]), all_pairs(backbone.spec_module(BACKBONE))

    def run():
        # What Backbone.forward does, but for the places of targets, which `meta` does not know.
        positions = torch.arange(4096, device="meta")[None]
        hidden = backbone.text.through(
            torch.empty(1, 4096, backbone.dim, device="meta"),
            position_ids=positions,
            segments=PackedItems(np.array([0, 4096]), causal=True),
        )
        return backbone.causal_lm.lm_head(hidden[0])

    forward, step = counted_step(run)
    assert forward_flops(spec, lengths) == forward
    assert step_flops(spec, lengths) == step
