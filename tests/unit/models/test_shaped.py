"""Models of shapes: what is built has the parameters, operations and saved tensors that its shapes say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.whisper.configuration_whisper import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.core.errors import UserError
from motet.core.shape_tables import ModelShapes
from motet.core.text_files import parse_toml
from motet.cost.flops import step_flops
from motet.models.attention import ATTENTION
from motet.models.block import plain_names
from motet.models.build import build_mllm
from motet.models.exact import keep_float64
from motet.models.export import export_hf
from motet.models.shaped_config import config_of_shapes
from motet.models.spec import model_spec
from unit.models.conftest import Packed
from unit.models.test_flops import all_pairs, counted_step
from unit.models.test_saved import check
from unit.models.test_spec import check_layers, num_parameters

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
DECODER = {"num_layers": 3, "hidden": 32, "mlp": 48, "num_heads": 4, "vocab_size": 50}
VISION = {"kind": "vit", "num_layers": 3, "hidden": 24, "mlp": 40, "num_heads": 2, "row_dim": 12}
AUDIO = {"kind": "audio", "num_layers": 3, "hidden": 16, "mlp": 24, "num_heads": 2, "num_mel_bins": 8}
GATED = {"gated": True, "activation": "silu", "norm": "rms", "biases": []}
VARIANTS = {
    "plain": {},
    "llama": GATED | {"num_kv_heads": 2},
    "qwen2": GATED | {"biases": ["query", "key", "value"]},
    "qwen3": GATED | {"qk_norm": True, "head_dim": 12},
    "olmo2": GATED | {"qk_norm_rows": True, "norm": "rms_float32", "num_kv_heads": 2},
    "gemma": GATED | {"num_norms": 4, "activation": "gelu_pytorch_tanh"},
    "scaled": {"layer_scale": True, "qk_norm": True, "activation": "quick_gelu"},
}
PICTURE = {"kind": "vit", "num_layers": 3, "hidden": 24, "mlp": 40, "num_heads": 2, "row_dim": 12, "num_queries": 3}
SIZES = torch.tensor([[7], [40], [13], [4]])


def tables_of(recipe: Path) -> dict:
    return parse_toml(recipe.read_text(), str(recipe))


def model_of(backbone=None, dtype=torch.float64, generators=None, **encoders):
    tables = {"backbone": DECODER | (backbone or {}), "encoders": encoders, "generators": generators or {}}
    shapes = ModelShapes.model_validate(tables)
    return shapes, build_mllm(config_of_shapes(shapes), shapes.backbone.vocab_size, dtype)


@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if "workload" in tables_of(each)], ids=lambda each: each.stem
)
def test_the_model_of_every_recipe_is_what_its_shapes_say(recipe):
    shapes = ModelShapes.model_validate(tables_of(recipe)["model"])
    with torch.device("meta"):
        model = build_mllm(config_of_shapes(shapes), shapes.backbone.vocab_size)
    spec = shapes.spec("it")
    assert model_spec(model, "it") == spec
    assert num_parameters(model) == spec.num_parameters


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "more",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"class_row": True}, {"num_positions": 64})),
        {"class_row": True, "num_positions": 64},
    ],
)
def test_layers_hold_the_parameters_that_shapes_say(variant, more):
    options = VARIANTS[variant]
    shapes, model = model_of(options, image=VISION | options | more, audio=AUDIO | options)
    assert model_spec(model, "it") == shapes.spec("it")
    for module in (model.backbone, *model.encoders.values()):
        check_layers(module, module.layers())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_positions": 64, "train": False},
        {"condition": "turn", "max_turn": 9, "num_positions": 64},
        pytest.param({"projector": {"kind": "linear", "train": False}}, marks=pytest.mark.slow),
    ],
)
def test_a_generator_is_what_its_shapes_say(variant, more):
    """Beside another one, whose query tokens learn in any case."""
    made = PICTURE | VARIANTS[variant] | more
    if "max_turn" in made:
        made = {key: value for key, value in made.items() if key != "num_queries"}
    shapes, model = model_of(generators={"made": made, "other": PICTURE})
    assert model_spec(model, "it") == shapes.spec("it")
    assert shapes.spec("it").num_parameters == num_parameters(model)
    check_layers(model.generators["made"], model.generators["made"].layers())
    check_layers(model.backbone, model.backbone.layers())


def drawn_to_make(row_dim=12, sizes=SIZES, dtype=torch.float64):
    """What a generator is given of items, three queries of each, and keys."""
    values = torch.randn(int(sizes.sum()), row_dim, dtype=dtype)
    rows = torch.randn(3 * len(sizes), DECODER["hidden"], dtype=dtype, requires_grad=True)
    return values, sizes, rows, np.arange(len(sizes))


def test_operations_of_a_generator():
    _, model = model_of(dtype=torch.float32, generators={"made": PICTURE | VARIANTS["qwen3"]})
    sizes = torch.tensor([[40]])
    module, given = model.generators["made"], drawn_to_make(sizes=sizes, dtype=torch.float32)
    _, step = counted_step(lambda: module(*given))
    lengths = module.lengths(sizes.numpy())
    assert step_flops(module.spec_module("made"), lengths, reached=True) == step


@pytest.mark.parametrize("options", [{}, {"num_positions": 300}, GATED | {"qk_norm": True}])
def test_saved_tensors_of_a_generator(options):
    wide = {"hidden": 128, "mlp": 512, "num_heads": 4, "row_dim": 48}
    _, model = model_of(dtype=torch.bfloat16, generators={"made": PICTURE | wide | options})
    module, given = model.generators["made"], drawn_to_make(48, torch.tensor([[256]]), torch.bfloat16)
    check(module, lambda: module(*given), module.lengths(given[1].numpy()))


@pytest.mark.parametrize("more", [{}, {"num_positions": 64}])
def test_items_that_are_made_do_not_depend_on_each_other(more):
    """Nor on where a pipeline cuts the layers; the order of their rows matters, and so does their condition."""
    _, model = model_of(generators={"made": PICTURE | more})
    module, (values, sizes, rows, keys) = model.generators["made"], drawn_to_make()
    whole = module(values, sizes, rows, keys)
    parts = zip(values.split(sizes[:, 0].tolist()), sizes[:, None], rows.split(3), keys[:, None])
    torch.testing.assert_close(whole, sum(module(*part) for part in parts), rtol=1e-12, atol=1e-12)
    hidden = module.enter(values, sizes, rows, keys)
    assert hidden.shape == (int(sizes.sum()) + 4 * len(sizes), 24)
    for first, stop in ((0, 1), (1, 3)):
        hidden = module.through(hidden, sizes, None, first, stop)
    # Products may round otherwise where their rows begin elsewhere in memory.
    torch.testing.assert_close(module.leave(hidden, values, sizes, keys), whole, rtol=1e-12, atol=0)
    assert not module.uncuttable
    assert not torch.isclose(whole, module(values.flip(0), sizes, rows, keys))
    assert torch.autograd.grad(whole, rows)[0].abs().min() > 0


@pytest.mark.parametrize("more", [{}, {"num_positions": 64}])
def test_turns_of_other_lengths_are_read_one_by_one(more):
    """As the only generator: the backbone has no query tokens then."""
    turned = {key: value for key, value in PICTURE.items() if key != "num_queries"}
    shapes, model = model_of(generators={"made": turned | {"condition": "turn", "max_turn": 6} | more})
    assert model_spec(model, "it") == shapes.spec("it")
    module, counts = model.generators["made"], np.array([1, 6, 3, 2])
    values, sizes, _, keys = drawn_to_make()
    rows = torch.randn(counts.sum(), DECODER["hidden"], dtype=torch.float64, requires_grad=True)
    whole = module(values, sizes, rows, keys, counts)
    parts = zip(
        values.split(sizes[:, 0].tolist()), sizes[:, None], rows.split(counts.tolist()), keys[:, None], counts[:, None]
    )
    torch.testing.assert_close(whole, sum(module(*part) for part in parts), rtol=1e-12, atol=1e-12)
    assert torch.autograd.grad(whole, rows)[0].abs().min() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_operations_and_saved_tensors_are_what_shapes_say(variant):
    _, model = model_of(VARIANTS[variant], dtype=torch.float32)
    packed, spec = Packed.of([64]), all_pairs(model.backbone.spec_module())
    num_targets = model.backbone(packed, {})[1]
    _, step = counted_step(lambda: model.backbone(packed, {})[0])
    assert step_flops(spec, np.array([64]), np.array([num_targets])) == step


@pytest.mark.parametrize(
    "options", [{}, {"class_row": True, "num_positions": 300, "activation": "gelu_new"}, GATED | {"qk_norm": True}]
)
def test_saved_tensors_of_an_image(options):
    wide = {"hidden": 128, "mlp": 512, "num_heads": 4, "row_dim": 48}
    _, model = model_of({"hidden": 160, "num_heads": 5}, torch.bfloat16, image=VISION | wide | options)
    module, sizes = model.encoders["image"], torch.tensor([[256]])
    values = torch.randn(256, 48)
    check(module, lambda: module(values, sizes), module.lengths(sizes.numpy()))


@pytest.mark.parametrize("kind", ["image", "audio"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "more", [{}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"class_row": True}, {"num_positions": 64}))]
)
def test_an_items_rows_do_not_depend_on_other_items(kind, variant, more):
    if kind == "audio" and "class_row" in more:
        return
    table = (VISION if kind == "image" else AUDIO) | VARIANTS[variant] | more
    _, model = model_of(item=table)
    module = model.encoders["item"]
    values = torch.randn(int(SIZES.sum()), 12 if kind == "image" else 8, dtype=torch.float64)
    together = module(values, SIZES)
    alone = [module(part, size[None]) for part, size in zip(values.split(SIZES[:, 0].tolist()), SIZES)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    assert len(together) == module.num_tokens(SIZES.numpy()).sum()


@pytest.mark.parametrize("more", [{}, {"num_positions": 64}])
def test_the_order_of_an_images_rows_matters(more):
    _, model = model_of(image=VISION | more)
    values = torch.randn(9, 12, dtype=torch.float64)
    rows, turned = (model.encoders["image"](each, torch.tensor([[9]])) for each in (values, values.flip(0)))
    assert not torch.allclose(rows, turned.flip(0))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_do_not_see_each_other(variant, window):
    _, model = model_of(VARIANTS[variant] | {"window": window})
    packed = Packed.of([11, 3, 20])
    losses = [model.backbone(packed.document(i), {})[0] for i in range(3)]
    torch.testing.assert_close(model.backbone(packed, {})[0], sum(losses), rtol=1e-12, atol=1e-12)


OF_HF = {
    "self_attn.": "",
    "mlp.": "",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


@pytest.mark.parametrize(
    ("options", "config_class", "model_class"),
    [(VARIANTS["llama"], LlamaConfig, LlamaForCausalLM), (VARIANTS["qwen3"], Qwen3Config, Qwen3ForCausalLM)],
)
def test_a_decoder_equals_that_of_transformers(options, config_class, model_class):
    _, model = model_of(options)
    ours = model.backbone.causal_lm
    config = config_class(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=options.get("num_kv_heads", 4),
        head_dim=options.get("head_dim", 8),
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
    )
    config._attn_implementation = "sdpa"
    theirs = model_class(config).double()
    state = {plain_names(ours)[name]: tensor for name, tensor in ours.state_dict().items()}

    def our_name(name: str) -> str:
        for their, our in OF_HF.items():
            name = name.replace(their, our)
        return name

    theirs.load_state_dict({name: state[our_name(name)] for name in theirs.state_dict()})
    keep_float64(theirs)
    packed = Packed.of([17])
    tokens = packed.tokens[None]
    logits = theirs(input_ids=tokens).logits[0]
    rows = packed.targets.clone()
    rows[0] = False
    rows = rows.nonzero()[:, 0]
    expected = nn.functional.cross_entropy(logits[rows - 1], packed.tokens[rows], reduction="sum")
    # transformers makes its rotation in float32.
    torch.testing.assert_close(model.backbone(packed, {})[0], expected, rtol=1e-7, atol=1e-7)


def test_an_audio_encoder_equals_that_of_transformers():
    _, model = model_of(audio=AUDIO | {"biases": ["query", "value", "output", "mlp"], "num_positions": 20})
    encoder = model.encoders["audio"].encoder
    config = WhisperConfig(
        d_model=16,
        encoder_layers=3,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=20,
        dropout=0.0,
    )
    config._attn_implementation = ATTENTION
    theirs = WhisperEncoder(config)
    names = {
        "self_attn.out_proj": "o_proj",
        "self_attn.": "",
        "self_attn_layer_norm": "attention_norm",
        "final_layer_norm": "mlp_norm",
        "fc1": "up_proj",
        "fc2": "down_proj",
    }
    plain = plain_names(encoder.model)
    state = {plain[name]: tensor for name, tensor in encoder.model.state_dict().items()}

    def our_name(name: str) -> str:
        for their, our in names.items():
            name = name.replace(their, our)
        return name

    theirs.load_state_dict({name: state[our_name(name)] for name in theirs.state_dict()})
    theirs.double()
    for module in theirs.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    from motet.models.families.audio import AudioEncoder

    values, sizes = torch.randn(53, 8, dtype=torch.float64), torch.tensor([[40], [13]])
    torch.testing.assert_close(encoder(values, sizes), AudioEncoder(theirs)(values, sizes), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"generators": {"made": PICTURE | {"window": 3}}}, "model.generators.made.window is 3"),
        ({"generators": {"made": PICTURE | {"hidden": 25, "head_dim": 4}}}, "model.generators.made.hidden is 25"),
        ({"generators": {"made": PICTURE | {"head_dim": 7}}}, "model.generators.made: heads of 7 channels"),
        (
            {"backbone": DECODER | {"num_experts": 4, "experts_per_token": 1}},
            "model.backbone.num_experts: training computes no mixture of experts yet; leave it out, or plan alone.",
        ),
        ({"backbone": DECODER | {"num_norms": 3}}, "model.backbone.num_norms is 3: .* 2 norms, .* or with 4"),
        ({"backbone": DECODER | {"head_dim": 7}}, "model.backbone: heads of 7 channels"),
        ({"encoders": {"image": VISION | {"window": 3}}}, "model.encoders.image.window is 3"),
        ({"encoders": {"image": VISION | {"qk_norm": True, "qk_norm_rows": True}}}, "set one of the two"),
    ],
)
def test_what_is_not_computed_is_refused(change, said):
    shapes = ModelShapes.model_validate({"backbone": DECODER} | change)
    with pytest.raises(UserError, match=said):
        config_of_shapes(shapes)


def test_an_item_longer_than_the_position_table_is_refused():
    limits = {"num_positions": 9}
    _, model = model_of(generators={"made": PICTURE | limits}, image=VISION | limits, audio=AUDIO | limits)
    assert model.generators["made"].num_tokens(np.array([[9]])) == [3]
    with pytest.raises(UserError, match=r"^model.generators.made: an item of 10 patches is longer than the 9"):
        model.generators["made"].num_tokens(np.array([[10]]))
    for name, most in (("image", 9), ("audio", 18)):
        module = model.encoders[name]
        assert module.num_tokens(np.array([[most]])) == [9]
        with pytest.raises(UserError, match=f"longer than the {most} that num_positions has room for"):
            module.num_tokens(np.array([[most + 1]]))


def test_an_export_is_refused(tmp_path):
    with pytest.raises(UserError, match="A model of shapes cannot be exported"):
        export_hf(model_of()[1], tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_frozen_parts_and_tied_tables_stay_so():
    _, model = model_of(
        {"train": False, "tied": True}, image=VISION | {"train": False, "projector": {"train": True, "kind": "linear"}}
    )
    assert {name.split(".")[2] for name, each in model.named_parameters() if each.requires_grad} == {"projector"}
    assert model.backbone.causal_lm.lm_head.weight is model.backbone.causal_lm.model.embed_tokens.weight
    spec = replace(model_spec(model), name="it")
    assert [module.trainable for module in spec.modules] == [True, False]
