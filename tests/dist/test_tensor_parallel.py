"""Layers whose products tensor-parallel ranks share equal whole ones: loss, gradients, next tokens, dropout."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from benchmark import benchmark
from motet.core.shape_tables import ModelShapes
from motet.core.workload import BACKBONE
from motet.dispatch.batch import PackedSequences
from motet.dropout import drawing
from motet.expert_ranks import ExpertRanks
from motet.models.build import ModelConfig, build_mllm
from motet.models.divided import cuts_of, divide, split_fused, why_undivided
from motet.models.families.registry import ENCODERS, TOWERS
from motet.models.fused import NamedSlice, stored_names
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.materialise import materialise
from motet.models.projector import Projector, ProjectorConfig
from motet.models.shaped_config import config_of_shapes
from motet.runtime.deferred import DeferredWeights
from motet.tensor_parallel import TensorRanks, likeliest_entry, part_of, vocabulary_cross_entropy
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe
from peer_memory import copies
from ranks import run_ranks

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    pass
VOCABULARY = 51  # No multiple of the ranks: the last one has fewer entries.
BACKBONE_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 49,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 49, "n_positions": 64}
"""With its dropout, of which transformers' config has 0.1 everywhere."""
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}
DINOV2 = {key: value for key, value in VISION.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
TURNED = {key: size for key, size in VISION.items() if key != "image_size"} | {"hidden_size": 32}
DINOV3 = TURNED | {"pos_embed_rescale": None, "num_register_tokens": 2}
INTERNVL = VISION | {"image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.5}
PIXTRAL = TURNED | {"image_size": 64}
QWEN3_VL = {key: TURNED[key] for key in ("hidden_size", "intermediate_size", "patch_size")} | {"depth": 2}
QWEN3_VL |= {"num_heads": 4, "deepstack_visual_indexes": [], "out_hidden_size": 32, "num_position_embeddings": 16}
QWEN2_VL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": 24, "mlp_ratio": 2, "patch_size": 4}
FAMILIES = {
    "dinov2": (DINOV2, [[2, 4], [3, 5]]),
    "gated dinov2": (DINOV2 | {"use_swiglu_ffn": True}, [[2, 4], [3, 5]]),
    "qwen2_vl": (QWEN2_VL, [[2, 4], [4, 6]]),
    "narrow qwen2_vl": (QWEN2_VL | {"num_heads": 4}, [[2, 4], [4, 6]]),
    "dinov3": (DINOV3, [[2, 4], [3, 5]]),
    "gated dinov3": (DINOV3 | {"use_gated_mlp": True, "key_bias": True}, [[2, 4], [3, 5]]),
    "internvl": (INTERNVL, [[2, 4], [3, 5]]),
    "pixtral": (PIXTRAL, [[2, 4], [3, 5]]),
    "qwen3_vl": (QWEN3_VL, [[2, 4], [4, 6]]),
    "siglip": (VISION | {"vision_use_head": False}, [[2, 4], [3, 5]]),
    "clip": (VISION, [[2, 4], [3, 5]]),
    "eva_clip": (VISION | {"k_bias": False, "post_layernorm": True}, [[2, 4], [3, 5]]),
    "rms eva_clip": (VISION | {"q_bias": False, "use_rms_norm": True}, [[2, 4], [3, 5]]),
    "whisper": (AUDIO, [[7], [20]]),
    "qwen2_audio": (AUDIO, [[8], [20]]),
}
CASES = [
    ("qwen2", {"tie_word_embeddings": True}, "siglip"),
    ("qwen2", {"pad_token_id": 40, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, "clip"),
    ("qwen3", {"head_dim": 12, "attention_bias": True}, "whisper"),
    ("llama", {"attention_bias": True, "mlp_bias": True}, "qwen2_audio"),
    ("gemma", {"head_dim": 12}, "siglip"),
    ("gemma2", {"head_dim": 12, "sliding_window": 4}, "siglip"),
    ("gemma3", {"head_dim": 12, "sliding_window": 4}, "whisper"),
    ("mistral", {"sliding_window": 4}, "siglip"),
    ("phi3", {"sliding_window": 5, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}, "qwen2_vl"),
    ("phi3", {"pad_token_id": 0, "num_key_value_heads": 4}, "dinov2"),
    ("olmo2", {"attention_bias": True}, "gated dinov2"),
    ("olmo2", {"num_key_value_heads": 4}, "qwen2_vl"),
    ("qwen3", {"head_dim": 12}, "eva_clip"),
    ("llama", {}, "rms eva_clip"),
    ("qwen3", {"head_dim": 12}, "qwen3_vl"),
    ("mistral", {}, "pixtral"),
    ("llama", {}, "dinov3"),
    ("llama", {}, "gated dinov3"),
    ("qwen2", {}, "internvl"),
    ("gpt2", {"tie_word_embeddings": True}, "siglip"),
]


def build(family, options, encoder):
    """A model in float64 whose norms and biases are as if trained; the same in every call."""
    sizes, _ = FAMILIES[encoder]
    dropout = {"attention_dropout": 0.2} if family in ("qwen2", "qwen3") else {}
    of_encoder = {} if encoder.split()[-1] in ("qwen2_vl", "qwen3_vl", "dinov2") else {"attention_dropout": 0.1}
    of_encoder |= {"dropout": 0.1, "activation_dropout": 0.2} if encoder == "whisper" else {}
    own = GPT2 if family == "gpt2" else BACKBONE_SIZES | dropout
    config = ModelConfig(
        backbone={"family": family, "config": own | options},
        encoders={"item": {"reads": "image", "family": encoder.split()[-1], "config": sizes | of_encoder}},
    )
    model = build_mllm(config, VOCABULARY, torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model.train()


def examples(model, encoder):
    """Two documents with an item each, whose rows follow two tokens: (sequences, media, keys of items)."""
    sizes = np.array(FAMILIES[encoder][1])
    rows = model.encoders["item"].num_tokens(sizes)
    generator = torch.Generator().manual_seed(1)
    lengths = [int(count) + 9 for count in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.concatenate([start + 2 + np.arange(count) for start, count in zip(offsets, rows)])
    sequences = PackedSequences(
        torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator),
        torch.rand(sum(lengths), generator=generator) > 0.4,
        torch.tensor(offsets, dtype=torch.int32),
        {"item": torch.from_numpy(places)},
    )
    width = 8 if sizes.shape[1] == 1 else 3 * 4 * 4 * (2 if encoder.split()[-1] in ("qwen2_vl", "qwen3_vl") else 1)
    values = torch.randn(int(sizes.prod(1).sum()), width, generator=generator, dtype=torch.float64)
    return sequences, {"item": (values, torch.from_numpy(sizes))}


def run(model, encoder, deferred=None, recomputes=True):
    """(loss, gradients by name, next tokens). recomputes: backward runs some layers again."""
    sequences, media = examples(model, encoder)
    keys = np.arange(7, 9)
    for module in (model.encoders["item"], model.backbone):
        for block in module.blocks:
            block.recompute = recomputes and block.number == 1
    with drawing("item", {"item": keys}):
        features = {"item": model.encoders["item"](*media["item"])}
    products = []
    with drawing(BACKBONE, {BACKBONE: keys}):
        loss, _ = model.backbone(sequences, features)
    if deferred is None:
        loss.backward()
    else:
        with deferred.into(products):
            loss.backward()
        for product in products:
            product.add()
    tokens = model.eval().backbone.next_tokens(sequences, {"item": features["item"].detach()})
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}, tokens.tolist()


def divided(model, ranks):
    """The model, in place, with this rank's part of what is cut. Returns name -> dimension."""
    modules = [*model.encoders, BACKBONE]
    split_fused(model, modules)
    cuts = {name: cut for module in modules for name, cut in cuts_of(model, module).items()}
    named, own = dict(model.named_parameters()), {}
    for name, dimension in cuts.items():
        first, stop = ranks.part(named[name].shape[dimension])
        part = named[name].detach().narrow(dimension, first, stop - first).clone()
        own[id(named[name])] = nn.Parameter(part, requires_grad=named[name].requires_grad)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in own:
                module._parameters[key] = own[id(parameter)]
    divide(model, dict.fromkeys(modules, ranks))
    return cuts


def _whole(key):
    """The name of the whole parameter."""
    return key if (part := NamedSlice.of(key)) is None else part.name


def compare(rank, num_ranks, cases, chunks=1, delays=None):
    """delays: of copies in place of collectives, as of `SharedMemory`; None: there are none."""
    by_copies = None if delays is None else copies(dist.group.WORLD, delays)
    ranks = TensorRanks(dist.group.WORLD, rank, num_ranks, chunks=chunks, copies=by_copies)
    for family, options, encoder in cases:
        loss, gradients, tokens = run(build(family, options, encoder), encoder)
        for is_deferred, recomputes in ((False, True), (True, False)):
            model = build(family, options, encoder)
            cuts = divided(model, ranks)
            deferred = DeferredWeights([model]) if is_deferred else None
            own_loss, own, own_tokens = run(model, encoder, deferred, recomputes)
            case = f"{family}, {encoder}, deferred {is_deferred}"
            assert abs(own_loss - loss) < 1e-10 * abs(loss), case
            assert own_tokens == tokens, case
            keys = {name: key for name, key in stored_names(model).items() if name in own}
            assert keys.keys() == own.keys()
            assert {_whole(key) for key in keys.values()} == gradients.keys(), case
            for name, key in keys.items():
                expected, part = gradients[_whole(key)], NamedSlice.of(key)
                if part is not None and expected is not None:
                    expected = part.within(expected)
                if expected is None:  # It is frozen.
                    assert own[name] is None, f"{case}: {name}"
                    continue
                if name in cuts:
                    first, stop = ranks.part(expected.shape[cuts[name]])
                    expected = expected.narrow(cuts[name], first, stop - first)
                # The gradient of a key's bias is rounding alone.
                error = (own[name] - expected).abs().max() / max(expected.abs().max(), 1e-3)
                assert error < 1e-10, f"{case}: {name} is off by {error}"


LATER = {1, 2, 3, 7, 9, 11, 15, 16, 17, 18}
"""Numbers of those whose families of backbones others have, too."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case[0]} {case[2]}", marks=pytest.mark.slow if number in LATER else ())
        for number, case in enumerate(CASES)
    ],
)
def test_divided_models_equal_whole_ones(case):
    run_ranks(compare, 2, [case])


OF_FOUR = [
    ("qwen3", {}, "siglip"),
    ("qwen2", {}, "narrow qwen2_vl"),
    ("llama", {}, "whisper"),
    ("gemma3", {"head_dim": 12, "sliding_window": 4}, "qwen3_vl"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_FOUR, ids=[f"{family} {encoder}" for family, _, encoder in OF_FOUR])
def test_four_ranks_have_a_head_of_keys_each(case):
    family, options, encoder = case
    run_ranks(compare, 4, [(family, options | {"num_key_value_heads": 4}, encoder)])


LORA = ['model.lora.backbone={ rank = 3, targets = ["cross_attn.*", "up_proj"] }', "model.lora.image={ rank = 2 }"]


def _with_keys(rank, num_ranks, folder):
    """Layers that attend to rows of images, and a tower: whole, in parts, in chunks, recomputed, deferred, adapted."""

    def model_of(overrides):
        recipe = load_recipe(Path(folder) / "recipe.toml", ["run.dtype=float64", *overrides])
        vocabulary = recipe.vocabulary()
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size, torch.float64, deferred=True)
        materialise(model, recipe.modules, 0, torch.device("cpu"))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if "lora_B" in name:
                    parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        return model, open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)

    def gradients_of(model, dataset, deferred=None):
        loss, _ = against._loss_of(model, dataset, range(dataset.num_examples))
        products = []
        with nullcontext() if deferred is None else deferred.into(products):
            loss.backward()
        for product in products:
            product.add()
        return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}

    for overrides in ([], LORA):
        loss, gradients = gradients_of(*model_of(overrides))
        for chunks, recomputes, defers in ((1, False, False), (1, True, False), (1, False, True), (2, False, True)):
            case = f"{overrides}, {chunks}, {recomputes}, {defers}"
            model, dataset = model_of(overrides)
            ranks = TensorRanks(dist.group.WORLD, rank, num_ranks, chunks=chunks)
            cuts = divided(model, ranks)
            for block in (*model.backbone.blocks, *model.encoders["image"].blocks):
                block.recompute = recomputes
            own_loss, own = gradients_of(model, dataset, DeferredWeights([model]) if defers else None)
            assert abs(own_loss - loss) < 1e-10 * abs(loss), case
            assert own.keys() == gradients.keys()
            for name, gradient in gradients.items():
                if gradient is None:
                    assert own[name] is None, f"{case}: {name}"
                    continue
                if name in cuts:
                    first, stop = ranks.part(gradient.shape[cuts[name]])
                    gradient = gradient.narrow(cuts[name], first, stop - first)
                error = (own[name] - gradient).abs().max() / max(gradient.abs().max(), 1e-3)
                assert error < 1e-10, f"{case}: {name} is off by {error}"


@pytest.mark.slow
def test_layers_that_attend_to_rows_of_images_are_divided(tmp_path):
    whole_models.write_job(tmp_path, "mllama")
    run_ranks(_with_keys, 2, str(tmp_path))


def _rows_of_norms(rank, num_ranks):
    model = build("llama", {}, "siglip")
    divided(model, TensorRanks(dist.group.WORLD, rank, num_ranks))
    sequences, media = examples(model, "siglip")
    seen = []
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(model.backbone.blocks[1], name).register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model.backbone(sequences, {"item": model.encoders["item"](*media["item"])})
    return seen, len(sequences.tokens)


def test_each_rank_normalises_a_part_of_the_rows():
    for seen, num_rows in run_ranks(_rows_of_norms, 2):
        assert seen == [-(-num_rows // 2)] * 2


ROW_NORMS = {
    "siglip": ("layer_norm1", "layer_norm2"),
    "eva_clip": ("layer_norm1", "layer_norm2"),
    "dinov2": ("norm1", "norm2"),
    "qwen2_vl": ("norm1", "norm2"),
    "whisper": ("self_attn_layer_norm", "final_layer_norm"),
}
"""Families of encoders, with norms before branches or behind them, fused products, class rows or padding."""


def _rows_of_encoders(rank, num_ranks):
    found = {}
    for family, names in ROW_NORMS.items():
        model, seen = build("llama", {}, family).eval(), found.setdefault(family, [])
        divided(model, TensorRanks(dist.group.WORLD, rank, num_ranks))
        encoder = model.encoders["item"]
        for name in names:
            norm = getattr(encoder.blocks[1], name)
            norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[:-1].numel()))
        encoder(*examples(model, family)[1]["item"])
    return found


def test_each_rank_normalises_a_part_of_the_rows_of_encoders():
    num_rows = {"siglip": 8 + 15, "eva_clip": 9 + 16, "dinov2": 9 + 16, "qwen2_vl": 8 + 24, "whisper": 2 * 10}
    for found in run_ranks(_rows_of_encoders, 2):
        assert found == {family: [-(-count // 2)] * 2 for family, count in num_rows.items()}


def _few_rows(rank, num_ranks):
    """Of an image of two patches and one of three, on more ranks than some have rows."""

    def gradients_of(model, sizes):
        values = torch.randn(sum(map(np.prod, sizes)), 48, generator=torch.Generator().manual_seed(3)).double()
        rows = model.encoders["item"](values, torch.tensor(sizes))
        (rows * torch.arange(1, 1 + len(rows))[:, None]).square().mean().backward()
        return rows.detach(), {name: each.grad for name, each in model.encoders.named_parameters()}

    for sizes in ([[1, 2]], [[1, 3]], [[1, 2], [1, 3]]):
        rows, gradients = gradients_of(build("llama", {}, "siglip").eval(), sizes)
        model = build("llama", {}, "siglip").eval()
        ranks = TensorRanks(dist.group.WORLD, rank, num_ranks)
        cuts = divided(model, ranks)
        own_rows, own = gradients_of(model, sizes)
        torch.testing.assert_close(own_rows, rows, rtol=1e-10, atol=1e-12)
        for name, gradient in gradients.items():
            if (dimension := cuts.get(f"encoders.{name}")) is not None:
                first, stop = ranks.part(gradient.shape[dimension])
                gradient = gradient.narrow(dimension, first, stop - first)
            error = (own[name] - gradient).abs().max() / max(gradient.abs().max(), 1e-3)
            assert error < 1e-10, f"{sizes}: {name} is off by {error}"


def test_ranks_of_an_encoder_may_have_fewer_rows_than_others_or_none():
    run_ranks(_few_rows, 4)


def _vocabulary(rank, num_ranks):
    ranks = TensorRanks(dist.group.WORLD, rank, num_ranks)
    logits = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 1] = logits[0, 5] = 9.0  # Equal largest ones, on different ranks.
    logits[1] += 1e4
    tokens = torch.tensor([0, 1, 6, 5, 3, 4])
    whole = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(whole, tokens, reduction="sum")
    (3 * expected).backward()
    first, stop = ranks.part(7)
    own = logits[:, first:stop].clone().requires_grad_()
    loss = vocabulary_cross_entropy(own, tokens, ranks, 7)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, whole.grad[:, first:stop], rtol=1e-10, atol=1e-12)
    assert likeliest_entry(own.detach(), ranks, 7).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_loss_over_a_divided_vocabulary_is_cross_entropy(num_ranks):
    run_ranks(_vocabulary, num_ranks)


@pytest.mark.parametrize(("num", "size"), [(7, 2), (7, 3), (8, 4), (5, 4), (2, 4)])
def test_parts_are_those_of_torch_chunk(num, size):
    parts = [list(range(*part_of(num, index, size))) for index in range(size)]
    chunks = [chunk.tolist() for chunk in torch.arange(num).chunk(size)]
    assert parts == chunks + [[]] * (size - len(chunks))


def test_all_families_of_encoders_can_be_divided():
    assert all(family.branches for family in (*ENCODERS.values(), *TOWERS.values()))


def test_what_centres_rows_over_all_heads_cannot_be_divided():
    shape = {"num_layers": 2, "hidden": 32, "mlp": 48, "num_heads": 4, "vocab_size": 50, "qk_norm_rows": True}
    for norm, says in (("layer", "ShapedCausalLM centres queries and keys over all heads"), ("rms", "")):
        shapes = ModelShapes.model_validate({"backbone": shape | {"norm": norm}, "encoders": {}})
        assert why_undivided(build_mllm(config_of_shapes(shapes), 50), BACKBONE) == says


def test_what_another_package_puts_in_the_place_of_products_cannot_be_divided():
    """Ranks would share the weight of peft's layer, and leave its adapter out."""
    mllm = build_mllm(ModelConfig(backbone={"family": "qwen2", "config": BACKBONE_SIZES}), VOCABULARY)
    assert why_undivided(mllm, BACKBONE) == ""
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["o_proj"]), mllm.backbone.causal_lm)
    assert (
        why_undivided(mllm, BACKBONE)
        == "self_attn.o_proj is a Linear, as another package puts it there, and not torch's"
    )


@pytest.mark.parametrize("kind", [TensorRanks, ExpertRanks])
def test_a_copy_of_a_model_has_the_same_ranks(kind):
    """As `AveragedModel` of torch copies a part; no group of processes can be copied."""
    ranks = kind(Lock(), 0, 2)
    assert deepcopy({"of": ranks})["of"] is ranks


def _copied_rows(rank, num_ranks):
    model = build("llama", {}, "siglip").eval()
    divided(model, TensorRanks(dist.group.WORLD, rank, num_ranks))
    sequences, media = examples(model, "siglip")
    each = model, deepcopy(model)
    return [float(one.backbone(sequences, {"item": one.encoders["item"](*media["item"])})[0]) for one in each]


def test_a_copy_of_a_divided_model_computes_the_same():
    for own, of_copy in run_ranks(_copied_rows, 2):
        assert own == of_copy


@pytest.mark.parametrize("path", ["self_attn.o_proj", "mlp.up_proj"])
def test_products_with_hooks_or_another_forward_cannot_be_divided(path):
    """Layers of ranks take the place of the last ones, and would leave out what was set on them."""
    for change in (
        lambda product: product.register_forward_hook(lambda module, args, output: output * 2),
        lambda product: setattr(product, "forward", partial(torch.mul, 2.0)),
        lambda product: register_parametrization(product, "weight", nn.Tanh()),
    ):
        mllm = build_mllm(ModelConfig(backbone={"family": "qwen2", "config": BACKBONE_SIZES}), VOCABULARY)
        change(mllm.backbone.blocks[1].inner.get_submodule(path))
        says = f"{path} has a hook, a forward or a parametrization of its own, and each rank has a part of"
        assert why_undivided(mllm, BACKBONE).startswith(says)


class Doubled(nn.Linear):
    """A layer whose product is another one."""

    def forward(self, x):
        return 2 * super().forward(x)


class OwnTable(nn.Embedding):
    """An embedding that reads more of a token than its row."""

    def forward(self, tokens):
        return super().forward(tokens) + tokens[..., None]


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        ("lm_head", lambda head: head.register_forward_hook(print), "the output layer has a hook, a forward or a para"),
        ("lm_head", lambda head: setattr(head, "forward", torch.tanh), "the output layer has a hook, a forward or a "),
        ("lm_head", lambda head: register_parametrization(head, "weight", nn.Tanh()), "the output layer has a hook, "),
        ("lm_head", lambda head: Doubled(32, VOCABULARY), "the output layer is a Doubled with another forward than "),
        (
            "model.layers.1.mlp.up_proj",
            lambda up: Doubled(32, 49),
            "mlp.up_proj is a Doubled with another forward than",
        ),
        (
            "model.layers.1.mlp.act_fn",
            lambda act: act.register_forward_hook(print),
            "mlp.act_fn has a hook, a forward ",
        ),
        (
            "model.layers.1.self_attn.q_norm",
            lambda norm: norm.register_forward_hook(print),
            "self_attn.q_norm has a ho",
        ),
        ("model.layers.1.mlp", lambda mlp: mlp.compile(), "model.layers.1.inner.mlp is compiled, and ranks meet in it"),
        ("model.embed_tokens", lambda table: setattr(table, "forward", torch.tanh), "the embedding of tokens has a "),
        (
            "model.embed_tokens",
            lambda table: register_parametrization(table, "weight", nn.Tanh()),
            "the embedding of tokens has",
        ),
        ("model.embed_tokens", lambda table: OwnTable(VOCABULARY, 32), "the embedding of tokens is a OwnTable, and ea"),
        ("model.embed_tokens", lambda table: table.register_forward_hook(print), ""),
        ("model.norm", lambda norm: register_parametrization(norm, "weight", nn.Tanh()), "the last norm has a hook, "),
        ("model.norm", lambda norm: norm.register_forward_hook(print), ""),
    ],
)
def test_what_ranks_have_a_part_of_is_the_familys_own(path, change, says):
    """A hook would see the logits of some tokens; gradients of what is computed of whole weights would not be sums."""
    mllm = build_mllm(ModelConfig(backbone={"family": "qwen3", "config": BACKBONE_SIZES}), VOCABULARY)
    owner, _, name = path.rpartition(".")
    owner = mllm.backbone.causal_lm.get_submodule(owner)
    if isinstance(changed := change(getattr(owner, name)), Doubled | OwnTable):
        setattr(owner, name, changed)
    why = why_undivided(mllm, BACKBONE)
    assert why.startswith(says) and bool(why) == bool(says)


def test_norms_of_all_heads_with_hooks_or_another_forward_cannot_be_divided():
    """Ranks give such a norm another forward, and would leave out what was set on it."""
    for change, says in (
        (lambda attention: None, ""),
        (lambda attention: attention.k_norm.register_forward_hook(print), "self_attn.k_norm has a hook, a forward o"),
        (lambda attention: setattr(attention.q_norm, "forward", torch.tanh), "self_attn.q_norm has a hook, a for"),
        (lambda attention: setattr(attention, "q_norm", nn.Tanh()), "self_attn.q_norm is a Tanh of all heads, and"),
    ):
        mllm = build_mllm(ModelConfig(backbone={"family": "olmo2", "config": BACKBONE_SIZES}), VOCABULARY)
        change(mllm.backbone.blocks[1].inner.self_attn)
        why = why_undivided(mllm, BACKBONE)
        assert why.startswith(says) and bool(why) == bool(says)


def test_a_generator_of_another_class_is_named():
    generator = nn.Identity()
    generator.condition_dim, generator.row_dim = 8, 4
    entrance = OutputProjector(Projector(16, 8, ProjectorConfig()), 1, drop=0.0)
    made = SimpleNamespace(generators={"draw": GeneratorModule(generator, entrance, num_queries=1)})
    assert why_undivided(made, "draw") == "Motet knows no way to divide the layers of Identity"
