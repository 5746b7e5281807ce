"""Every backbone family against transformers' own class: the loss and every gradient on packed documents, in float64.

The reference is HF's `...ForCausalLM.forward` on one document at a time, with HF's attention, masks, windows, rotary
positions and output layer. Its norms alone are replaced, the softmax of Gemma 2, and routers of mixtures, as they round
to float32 in any dtype: with them the two agree to 2e-6, without to 4e-15. Weights are as if trained: no norm is 1, no
bias is 0.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Gemma3TextConfig
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from motet.models.backbone import Backbone
from motet.models.block import plain_names
from motet.models.exact import keep_float64

LENGTHS = [9, 1, 14, 6]
PLACES = [1, 2, 12, 20, 26]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [2.0, 2.5, 4.0, 7.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "qwen2": {},
    "qwen2 windows": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen2 yarn": {"rope_parameters": YARN},
    "qwen2 dynamic": {"rope_parameters": DYNAMIC | {"type": "dynamic"}, "max_position_embeddings": 10},
    "qwen3": {"head_dim": 12, "attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
    "llama llama3": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4, "head_dim": 12},
    "gemma": {"head_dim": 12},
    "gemma untied": {"head_dim": 8, "tie_word_embeddings": False, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 12, "sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma2 uncapped": {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": {"head_dim": 12, "sliding_window": 4, "num_hidden_layers": 3, "query_pre_attn_scalar": 10},
    "gemma3 two bases": {
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "phi3": {"num_key_value_heads": 2},
    "phi3 window": {"sliding_window": 4, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "phi3 longrope": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 8,
        "max_position_embeddings": 32,
    },
    "olmo2": {"attention_bias": True},
    "olmo2 tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mixtral": {"head_dim": 12},
    "mixtral window": {"sliding_window": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    "qwen3_moe": {"attention_bias": True},
    "qwen3_moe dense layers": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
        "attention_bias": True,
    },
    "granite tied": {"tie_word_embeddings": True, "mlp_bias": True},
    "gpt2": {},
    "gpt2 scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    "opt": {},
    "opt gelu": {"activation_function": "gelu", "enable_bias": False, "tie_word_embeddings": False},
    "qwen3_moe weights that add up": {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 4},
}


def trained_like(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def hf_model(causal_lm: torch.nn.Module, exact: bool) -> torch.nn.Module:
    """HF's own class with the same weights, HF's attention, and HF's norms unless `exact`."""
    names = plain_names(causal_lm)
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config._experts_implementation = "eager"  # The others do not know float64.
    config._attn_implementation = "sdpa" if type(causal_lm)._supports_sdpa else "eager"
    model = type(causal_lm)(config).double() if exact else type(causal_lm)(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    # Frequencies are float32 in a model of any dtype.
    if hasattr(model.base_model, "rotary_emb"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict({names[name]: tensor for name, tensor in causal_lm.state_dict().items()})
    if exact:
        keep_float64(model)
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = partial(wide_router, module)
    return model.train(causal_lm.training)


def wide_router(router: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What HF's router computes, in float64."""
    logits = torch.nn.functional.linear(hidden, router.weight)
    weights, chosen = logits.softmax(-1).topk(router.top_k)
    return (
        logits,
        weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights,
        chosen,
    )


@contextmanager
def wide_softmax():
    """In the block, HF's own attention does not round its weights to float32."""
    softmax = torch.nn.functional.softmax

    def wide(scores, dim, dtype=None):
        return softmax(scores, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", wide)
        yield


def hf_loss(model: torch.nn.Module, packed, features: torch.Tensor, masks=None) -> torch.Tensor:
    """masks: gives HF's masks for a document; None: HF makes those of text."""
    total, start = 0.0, 0
    for i in range(len(packed.offsets) - 1):
        document = packed.document(i)
        places = document.feature_positions["image"]
        embeds = model.get_input_embeddings()(document.tokens)
        # As HF's multimodal models merge: embeddings of tokens as the model's table gives them, features as they are.
        embeds = embeds.index_copy(0, places, features[start : start + len(places)])
        start += len(places)
        mask = None if masks is None else masks(embeds, document)
        logits = model(inputs_embeds=embeds[None], attention_mask=mask, use_cache=False).logits[0, :-1]
        rows = document.targets[1:]
        total = total + cross_entropy(logits[rows], document.tokens[1:][rows], reduction="sum")
    return total


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_images_see_themselves_in_both_directions_as_in_gemma_3(tiny, family):
    """Layers with and without a window, against HF's Gemma 3 masks for images."""
    lengths = [14, 3, 30, 9]
    places = [0, 1, 2, *range(5, 12), *range(18, 30), 31, 32, 33, 34, *range(47, 56)]
    options = {"sliding_window": 5, "num_hidden_layers": 3} if family == "gemma3" else {}
    causal_lm = tiny.backbone(family, **options).causal_lm
    trained_like(causal_lm)
    backbone = Backbone(causal_lm, bidirectional=("image",))
    packed = tiny.Packed.of(lengths, image=places)
    features = torch.randn(len(places), tiny.dim, dtype=torch.float64, requires_grad=True)
    model = hf_model(causal_lm, exact=True)

    def masks(embeds, document):
        is_image = torch.zeros(1, len(document.tokens), dtype=torch.int64)
        is_image[0, document.feature_positions["image"]] = 1
        config = Gemma3TextConfig(**tiny.backbone_options, sliding_window=5)
        config._attn_implementation = "sdpa"
        positions = torch.arange(is_image.shape[1])[None]
        blocks = get_block_sequence_ids_for_mask(is_image)
        made = create_masks_for_vision_model(config, embeds[None], None, None, positions, blocks)
        return made if family == "gemma3" else made["full_attention"]

    got, wanted = backbone(packed, {"image": features})[0], hf_loss(model, packed, features, masks)
    assert relative(got, wanted) < 1e-12
    assert relative(Backbone(causal_lm)(packed, {"image": features})[0], wanted) > 1e-6
    names = plain_names(causal_lm)
    mine = {names[name]: parameter for name, parameter in causal_lm.named_parameters()}
    got = torch.autograd.grad(got, [features, *mine.values()])
    wanted = torch.autograd.grad(wanted, [features, *(dict(model.named_parameters())[name] for name in mine)])
    assert max(map(relative, got, wanted)) < 1e-12


@pytest.mark.parametrize("family", ["gemma", "qwen2", "gemma2"])
def test_a_prefix_sees_itself_in_both_directions_as_in_paligemma(tiny, family):
    """Rows before the first target, against HF's own class with a mask; text behind it is causal, targets or not.

    Layers of Gemma 2 have a window, which hides nothing of a prefix.
    """
    causal_lm = tiny.backbone(family, **CASES[family]).causal_lm
    trained_like(causal_lm)
    model = hf_model(causal_lm, exact=True)
    packed = tiny.Packed.of([14, 1, 9, 6], image=[0, 1, 2, 3, 16, 17, 25, 29])
    packed.targets[[4, 5, 6, *range(15, 20), *range(24, 30)]] = False  # prefixes of 7 rows, 5 at least, and all 6

    def masks(embeds, document):
        rows = torch.arange(len(document.tokens))
        first = int(document.targets[1:].nonzero()[0]) + 1 if document.targets[1:].any() else len(rows)
        sees = (rows[None] <= rows[:, None]) | ((rows[None] < first) & (rows[:, None] < first))
        made = torch.where(sees, 0.0, float("-inf")).to(embeds.dtype)[None, None]
        if family != "gemma2":
            return made
        blocks = {"block_sequence_ids": torch.where(rows < first, 0, -1)[None]}
        windowed = create_sliding_window_causal_mask(model.config, embeds[None], None, None, rows[None], **blocks)
        return {"full_attention": made, "sliding_attention": windowed}

    features = torch.randn(8, tiny.dim, dtype=torch.float64, requires_grad=True)
    got = Backbone(causal_lm, prefix=True)(packed, {"image": features})[0]
    with wide_softmax():
        wanted = hf_loss(model, packed, features, masks)
    assert relative(got, wanted) < 1e-12
    assert relative(Backbone(causal_lm)(packed, {"image": features})[0], wanted) > 1e-6
    assert relative(*(torch.autograd.grad(loss, features)[0] for loss in (got, wanted))) < 1e-12


def relative(got: torch.Tensor, wanted: torch.Tensor, least: float = 1e-12) -> float:
    return ((got - wanted).norm() / wanted.norm().clamp(min=least)).item()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exact", [True, False])
def test_loss_and_gradients_are_transformers_own(tiny, case, exact):
    backbone = tiny.backbone(case.split()[0], **CASES[case])
    trained_like(backbone)
    packed = tiny.Packed.of(LENGTHS, image=PLACES)
    features = torch.randn(len(PLACES), tiny.dim, dtype=torch.float64, requires_grad=True)
    model = hf_model(backbone.causal_lm, exact)
    got = backbone(packed, {"image": features})[0]
    with wide_softmax() if exact else nullcontext():
        wanted = hf_loss(model, packed, features)
    tolerance = 1e-12 if exact else 1e-5
    assert relative(got, wanted) < tolerance
    names = plain_names(backbone.causal_lm)
    mine = {names[name]: parameter for name, parameter in backbone.causal_lm.named_parameters()}
    theirs = dict(model.named_parameters())
    assert mine.keys() == theirs.keys()
    got = torch.autograd.grad(got, [features, *mine.values()])
    wanted = torch.autograd.grad(wanted, [features, *(theirs[name] for name in mine)])
    # The bias of keys that nothing turns has no gradient but for rounding; it is measured by the others.
    least = 1e-3 * max(float(each.norm()) for each in wanted)
    worst = max(zip((relative(*each, least) for each in zip(got, wanted)), ["features", *mine]))
    assert worst[0] < tolerance, worst
