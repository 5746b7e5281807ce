"""Packed documents equal HF one by one, nothing leaks, and having nothing to do keeps the graph whole."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig, MixtralForCausalLM

import motet
from motet.core.errors import UserError
from motet.models.backbone import Backbone
from motet.models.merge import merge_rows

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe"]
MIXTURES = ["mixtral", "qwen3_moe"]
WITHOUT_WINDOW = ["llama", "gemma", "olmo2"]
LENGTHS = [7, 1, 12, 5]


def hf_reference(backbone):
    """HF's own class with the same weights and HF's attention; in float64 but for its norms, which round to float32."""
    from motet.models.block import plain_names

    names = plain_names(backbone.causal_lm)
    config = type(backbone.causal_lm.config).from_dict(backbone.causal_lm.config.to_dict())
    config._experts_implementation = "eager"  # The others do not know float64.
    config._attn_implementation = "sdpa" if type(backbone.causal_lm)._supports_sdpa else "eager"
    model = type(backbone.causal_lm)(config)
    model.load_state_dict({names[k]: v for k, v in backbone.causal_lm.state_dict().items()})
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_equals_hf_on_each_document(tiny, family, tied):
    backbone = tiny.backbone(family, tie_word_embeddings=tied)
    packed = tiny.Packed.of(LENGTHS)
    loss, num_targets = backbone(packed, {})
    reference, expected, count = hf_reference(backbone), 0.0, 0
    for i in range(len(LENGTHS)):
        document = packed.document(i)
        logits = reference(document.tokens[None], use_cache=False).logits[0, :-1]
        rows = document.targets[1:]
        expected = expected + cross_entropy(logits[rows], document.tokens[1:][rows], reduction="sum")
        count += int(rows.sum())
    assert num_targets == count and loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_enter_again_are_added_before_their_block(tiny, family):
    """As by a hook of the HF layer."""
    packed = tiny.Packed.of(LENGTHS, image=[1, 2, 9, 21])
    rows = torch.randn(4, tiny.dim, dtype=torch.float64)
    plain = tiny.backbone(family)
    again = Backbone(tiny.backbone(family).causal_lm, again={"image": (1,)})
    again.load_state_dict(plain.state_dict())
    places = packed.feature_positions["image"]
    with torch.no_grad():
        before, _ = plain(packed, {"image": rows})
        hooked = plain.blocks[1].register_forward_pre_hook(
            lambda block, given: (given[0].index_add(1, places, rows[None]), *given[1:])
        )
        expected, _ = plain(packed, {"image": rows})
        hooked.remove()
        assert torch.equal(again(packed, {"image": rows})[0], expected) and expected != before
        assert torch.equal(again(packed, {})[0], plain(packed, {})[0])


@pytest.mark.parametrize("block", [0, 2, -1])
def test_a_block_that_rows_cannot_enter_again_is_named(tiny, block):
    with pytest.raises(UserError, match=f"again: 'image' enters before block {block}; it must be a block from 1 to 1"):
        Backbone(tiny.backbone().causal_lm, again={"image": (block,)})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [None, 4])
def test_packed_equals_one_by_one_with_gradients(tiny, family, window):
    if window and family in WITHOUT_WINDOW:
        pytest.skip(f"{family} has no sliding window")
    options = {"sliding_window": window} if family == "mistral" or window else {}
    if window and family in ("qwen2", "qwen3"):
        options |= {"use_sliding_window": True, "max_window_layers": 1}
    elif window and family == "qwen3_moe":
        options |= {"use_sliding_window": True}
    backbone = tiny.backbone(family, **options)
    packed = tiny.Packed.of(LENGTHS, image=[1, 2, 9, 21])
    features = torch.randn(4, tiny.dim, dtype=torch.float64, requires_grad=True)
    together, _ = backbone(packed, {"image": features})
    start, alone = 0, 0.0
    for i in range(len(LENGTHS)):
        document = packed.document(i)
        end = start + len(document.feature_positions["image"])
        alone = alone + backbone(document, {"image": features[start:end]})[0]
        start = end
    torch.testing.assert_close(together, alone, rtol=1e-13, atol=1e-13)
    wanted = [features, *backbone.parameters()]
    got, expected = (torch.autograd.grad(x, wanted) for x in (together, alone))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("window", [None, 4])
def test_sliding_window_is_hfs(tiny, window):
    backbone = tiny.backbone("mistral", sliding_window=window)
    packed = tiny.Packed.of([12])
    got = backbone.hidden_states(packed, {})
    expected = hf_reference(backbone).model(packed.tokens[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    if window:
        assert not torch.allclose(got, tiny.backbone("mistral", sliding_window=None).hidden_states(packed, {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_is_bit_identical_whatever_the_others_hold(tiny, family):
    backbone = tiny.backbone(family)
    packed = tiny.Packed.of(LENGTHS)
    before = backbone.hidden_states(packed, {})
    packed.tokens[8:20] = (packed.tokens[8:20] + 1) % tiny.vocab
    # An expert multiplies rows of all documents at once, whose number may change how the product rounds.
    smallest = 1e-13 if family in MIXTURES else 0
    changed = ((before - backbone.hidden_states(packed, {})).abs() > smallest).any(1)
    assert not changed[:8].any() and not changed[20:].any() and changed[8:20].all()


def test_features_replace_placeholders_whatever_token_stands_there(tiny):
    backbone = tiny.backbone()
    packed = tiny.Packed.of([8], image=[2, 3], audio=[5])
    features = {
        "image": torch.randn(2, tiny.dim, dtype=torch.float64),
        "audio": torch.randn(1, tiny.dim, dtype=torch.float64),
    }
    packed.targets[[2, 3, 5]] = False
    loss, _ = backbone(packed, features)
    packed.tokens[[2, 3, 5]] = (packed.tokens[[2, 3, 5]] + 7) % tiny.vocab
    assert torch.equal(loss, backbone(packed, features)[0])
    features["image"] = features["image"].flip(0)
    assert not torch.equal(loss, backbone(packed, features)[0])
    with pytest.raises(ValueError, match="1 feature rows of 'image' for 2 places"):
        backbone(packed, features | {"image": features["image"][:1]})


def test_the_first_token_of_a_document_is_never_a_target(tiny):
    packed = tiny.Packed.of(LENGTHS)
    packed.targets[:] = True
    assert tiny.backbone()(packed, {})[1] == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("lengths", [[], [6]])
@pytest.mark.parametrize("train", [True, False])
def test_nothing_to_predict_still_runs_backward(tiny, lengths, train):
    backbone = tiny.backbone(train=train)
    packed = tiny.Packed.of(lengths)
    packed.targets[:] = False
    features = torch.empty(0, tiny.dim, dtype=torch.float64, requires_grad=True)
    loss, num_targets = backbone(packed, {"image": features})
    assert (loss.item(), num_targets, loss.dtype) == (0.0, 0, torch.float64)
    loss.backward()
    assert features.grad is not None and features.grad.shape == (0, tiny.dim)
    assert all((p.grad is not None and not p.grad.any()) if train else p.grad is None for p in backbone.parameters())


def test_frozen_backbone_runs_backward_on_text_too(tiny):
    loss, _ = tiny.backbone(train=False)(tiny.Packed.of(LENGTHS), {})
    assert loss.requires_grad


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_changes_no_gradient(tiny, recompute):
    backbone = tiny.backbone()
    packed = tiny.Packed.of(LENGTHS)
    expected = torch.autograd.grad(backbone(packed, {})[0], list(backbone.parameters()))
    for block in backbone.blocks:
        block.recompute = recompute
    got = torch.autograd.grad(backbone(packed, {})[0], list(backbone.parameters()))
    assert all(torch.equal(g, e) for g, e in zip(got, expected))


def test_logits_in_parts_change_nothing(tiny, monkeypatch):
    backbone = tiny.backbone()
    packed = tiny.Packed.of(LENGTHS)
    whole, _ = backbone(packed, {})
    expected = torch.autograd.grad(whole, list(backbone.parameters()))
    monkeypatch.setattr("motet.models.backbone._MAX_LOGITS", 4 * tiny.vocab)
    parts, _ = backbone(packed, {})
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=0)
    got = torch.autograd.grad(parts, list(backbone.parameters()))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)


def test_next_tokens_equal_hfs_greedy_choice(tiny):
    backbone = tiny.backbone()
    packed = tiny.Packed.of(LENGTHS)
    reference = hf_reference(backbone)
    expected = [reference(packed.document(i).tokens[None]).logits[0, -1].argmax().item() for i in range(len(LENGTHS))]
    assert backbone.next_tokens(packed, {}).tolist() == expected
    assert backbone.next_tokens(tiny.Packed.of([]), {}).shape == (0,)


def test_hook_before_the_backbone_sees_merged_embeddings(tiny):
    backbone = tiny.backbone()
    packed = tiny.Packed.of([5], image=[1])
    features = torch.ones(1, tiny.dim, dtype=torch.float64)
    seen = []
    plain, _ = backbone(packed, {"image": features})

    def double(embeds, features, sequences):
        seen.append((features, sequences))
        return merge_rows(embeds, features, sequences) * 2

    backbone.merge = double
    doubled, _ = backbone(packed, {"image": features})
    assert seen[0][1] is packed and torch.equal(seen[0][0]["image"], features) and plain != doubled


def test_half_precision_loss_is_float32(tiny):
    loss, _ = tiny.backbone(dtype=torch.bfloat16)(tiny.Packed.of(LENGTHS), {})
    assert loss.dtype == torch.float32


def test_refuses_a_model_with_another_attention():
    from transformers import LlamaConfig, LlamaForCausalLM

    from motet.models.backbone import Backbone

    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=10)
    with pytest.raises(ValueError, match="motet_packed"):
        Backbone(LlamaForCausalLM(config))


def _composed(change):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    text = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).double()
    change(text.model.layers[1])
    return motet.compose(text, {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layer: layer.mlp.register_forward_hook(print), "The MixtralSparseMoeBlock of layer 1 has a hook or a"),
        (lambda layer: setattr(layer.mlp.gate, "forward", torch.tanh), "The MixtralTopKRouter of layer 1 has a hook"),
        (lambda layer: layer.mlp.experts.register_forward_hook(print), "The MixtralExperts of layer 1 has a hook or"),
        (lambda layer: setattr(layer.mlp, "gate", nn.Linear(32, 4)), "The experts of layer 1 have a Linear, and only"),
    ],
)
def test_what_is_set_on_experts_is_refused(change, said):
    """Motet computes them from their weights alone."""
    with pytest.raises(UserError, match=said):
        _composed(change)


def test_a_norm_with_a_hook_keeps_it_in_float64():
    def double(layer):
        layer.input_layernorm.register_forward_hook(lambda module, args, output: 2 * output)

    (first, second) = (block.inner.input_layernorm for block in _composed(double).backbone.blocks)
    rows = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(second(rows), 2 * first(rows), rtol=1e-6, atol=1e-6)
