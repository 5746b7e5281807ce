"""The balancing loss of routers against transformers' own, and the same however documents are packed and recomputed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.models.test_backbone_parity import hf_model, relative, trained_like
from torch.nn.functional import cross_entropy, one_hot
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from motet.core.errors import UserError
from motet.models.backbone import Backbone
from motet.models.block import plain_names
from motet.models.build import BackboneConfig, build_backbone
from motet.models.families.supported import check_backbone

LENGTHS = [9, 1, 14, 6]
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
CASES = {
    "mixtral": {},
    "qwen3_moe": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "qwen3_moe one mixture": {"mlp_only_layers": [0]},
}


def balanced(tiny, case, **options):
    backbone = tiny.backbone(case.split()[0], **(CASES[case] | BALANCED | options))
    trained_like(backbone)
    return backbone


def losses_of_layers(logits, top_k):
    """Of each layer of one document, from equations 4 to 6 of Switch Transformers, with several experts a row."""
    for of_layer in logits:
        probabilities = of_layer.softmax(-1)
        num_experts = of_layer.shape[-1]
        shares = one_hot(probabilities.topk(top_k).indices, num_experts).double().sum(1).mean(0)
        yield num_experts * (shares * probabilities.mean(0)).sum()


def hf_loss(model, packed):
    """Loss of transformers' logits, and of its routers by document, a document counting as often as it has targets."""
    total = 0.0
    for number in range(len(packed.offsets) - 1):
        document = packed.document(number)
        out = model(document.tokens[None], use_cache=False, output_router_logits=True)
        rows = document.targets[1:]
        total = total + cross_entropy(out.logits[0, :-1][rows], document.tokens[1:][rows], reduction="sum")
        losses = list(losses_of_layers(out.router_logits, model.num_experts_per_tok))
        theirs = [
            load_balancing_loss_func((of_layer,), model.num_experts, model.num_experts_per_tok)
            for of_layer in out.router_logits
        ]
        torch.testing.assert_close(torch.stack(losses), torch.stack(theirs).double(), rtol=1e-6, atol=1e-6)
        if len(losses) == 1:
            torch.testing.assert_close(losses[0], out.aux_loss.double(), rtol=1e-6, atol=1e-6)
        total = total + model.router_aux_loss_coef * int(rows.sum()) * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("case", CASES)
def test_it_is_transformers_own_of_each_layer_and_document(tiny, case):
    backbone, packed = balanced(tiny, case), tiny.Packed.of(LENGTHS)
    model = hf_model(backbone.causal_lm, exact=True)
    got, wanted = backbone(packed, {})[0], hf_loss(model, packed)
    assert relative(got, wanted) < 1e-12
    names = plain_names(backbone.causal_lm)
    mine = {names[name]: parameter for name, parameter in backbone.causal_lm.named_parameters()}
    theirs = dict(model.named_parameters())
    got = torch.autograd.grad(got, list(mine.values()))
    wanted = torch.autograd.grad(wanted, [theirs[name] for name in mine])
    worst = max(zip(map(relative, got, wanted), mine))
    assert worst[0] < 1e-11, worst
    unbalanced = torch.autograd.grad(Backbone(plain(backbone))(packed, {})[0], list(mine.values()))
    assert max(map(relative, unbalanced, got)) > 1e-2


def plain(backbone):
    """The same model without the loss."""
    backbone.causal_lm.config.output_router_logits = False
    return backbone.causal_lm


@pytest.mark.parametrize("recompute", [False, True])
def test_the_scale_and_recomputation_of_a_loss_reach_the_routers(tiny, recompute):
    """Two microbatches in flight, with scales of their own, against one by one."""
    backbone = balanced(tiny, "mixtral")
    packs = [tiny.Packed.of(LENGTHS), tiny.Packed.of([5, 11], seed=3)]
    parameters, expected = list(backbone.parameters()), []
    for scale, packed in zip((3.0, 0.25), packs):
        alone = [backbone(packed.document(number), {})[0] for number in range(len(packed.offsets) - 1)]
        expected.append(torch.autograd.grad(scale * sum(alone), parameters))
    for block in backbone.blocks:
        block.recompute = recompute
    losses = [backbone(packed, {})[0] for packed in packs]
    got = torch.autograd.grad(3 * losses[0] + 0.25 * losses[1], parameters)
    wanted = [first + second for first, second in zip(*expected)]
    assert max(map(relative, got, wanted)) < 1e-12


def test_without_a_graph_the_loss_is_the_same(tiny):
    backbone, packed = balanced(tiny, "qwen3_moe"), tiny.Packed.of(LENGTHS)
    with torch.no_grad():
        held_out, num_targets = backbone(packed, {})
    loss, expected = backbone(packed, {})
    assert torch.equal(held_out, loss) and num_targets == expected
    assert not torch.equal(loss, Backbone(plain(backbone))(packed, {})[0])


def test_a_document_without_targets_has_no_loss(tiny):
    backbone, packed = balanced(tiny, "mixtral"), tiny.Packed.of([6, 8])
    packed.targets[:6] = False
    assert relative(backbone(packed, {})[0], backbone(packed.document(1), {})[0]) < 1e-14
    packed.targets[:] = False
    loss, num_targets = backbone(packed, {})
    loss.backward()
    assert (loss.item(), num_targets) == (0, 0)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in backbone.parameters())


def test_a_coefficient_that_has_no_effect_is_refused(tiny, tmp_path):
    """What a directory says is read as transformers reads it: the coefficient stands in every config.json."""
    for family in ("mixtral", "qwen3_moe"):
        with pytest.raises(UserError, match="router_aux_loss_coef has no effect without output_router_logits = true"):
            tiny.backbone(family, router_aux_loss_coef=0.01)
        silent = tiny.backbone(family, dtype=torch.float32)
        assert silent.causal_lm.config.router_aux_loss_coef > 0
        assert silent.router_loss(tiny.Packed.of(LENGTHS)) is None
    save(silent, tmp_path)
    read = build_backbone(BackboneConfig(family="qwen3_moe", path=tmp_path), tiny.vocab, torch.float32, 0)
    assert read.router_loss(tiny.Packed.of(LENGTHS)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, which Motet does not compute"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most the number of experts, 4"),
        ({"num_local_experts": -1}, "num_local_experts is -1; it must be a whole number"),
    ],
)
def test_options_of_routers_that_are_not_computed(tiny, options, said):
    with pytest.raises(UserError, match=said):
        tiny.backbone("mixtral", **options)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_family_without_mixtures_has_no_experts(tiny, family):
    config = tiny.backbone(family).causal_lm.config
    config.num_local_experts = 4
    with pytest.raises(UserError, match="num_local_experts is 4, which Motet does not compute"):
        check_backbone(config)


def save(backbone, directory):
    """As transformers does."""
    names, model = plain_names(backbone.causal_lm), type(backbone.causal_lm)(backbone.causal_lm.config)
    model.load_state_dict({names[name]: tensor for name, tensor in backbone.causal_lm.state_dict().items()})
    model.save_pretrained(directory)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_directory_may_have_experts_one_by_one_or_as_one(tiny, tmp_path, family, fused):
    """transformers writes experts one by one; checkpoints of its own tensors have all of a layer in one."""
    backbone = tiny.backbone(family, dtype=torch.float32)
    save(backbone, tmp_path)
    file = tmp_path / "model.safetensors"
    assert not any("gate_up_proj" in name for name in load_file(file))
    expected = {plain_names(backbone)[name]: tensor for name, tensor in backbone.state_dict().items()}
    if fused:
        prefix = "causal_lm."
        save_file({name.removeprefix(prefix): tensor.clone() for name, tensor in expected.items()}, file)
    read = build_backbone(BackboneConfig(family=family, path=tmp_path), tiny.vocab, torch.float32, 0)
    got = {plain_names(read)[name]: tensor for name, tensor in read.state_dict().items()}
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
