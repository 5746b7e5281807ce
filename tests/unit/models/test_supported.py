"""What HF configs may say: every number has a bound, and what is not computed as transformers does is refused."""

import json
from copy import deepcopy
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import transformers

from motet.core.errors import UserError
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.backbone_layers import window_of
from motet.models.build import BackboneConfig, EncoderConfig, build_backbone, build_modality
from motet.models.families.bounds import BOUNDS, check_bounds
from motet.models.families.registry import BACKBONES, ENCODERS
from motet.models.families.supported import check_backbone
from motet.models.spec import spec_of_directory
from motet.train.evaluate import EvaluateConfig
from motet.train.input.datasets import open_dataset

INF, NAN = float("inf"), float("nan")
GEMMA3 = "full_attention", "sliding_attention"
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}


def rope(kind="default", **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | options}


NUMBERS = [
    ("qwen2", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number, at least 1"),
    (
        "qwen2",
        {"num_hidden_layers": 0},
        "num_hidden_layers is 0; it must be a whole number, at least 1 and at most 1024",
    ),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ("llama", {"hidden_size": True}, "hidden_size is True; it must be a whole number"),
    ("qwen2", {"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be a whole number, at least 1"),
    ("qwen3", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ("mistral", {"sliding_window": -4}, "sliding_window is -4"),
    ("qwen2", {"initializer_range": INF}, "initializer_range is inf; it must be a number, more than 0 and at most 1"),
    ("gemma", {"initializer_range": NAN}, "initializer_range is nan"),
    ("olmo2", {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
    ("phi3", {"resid_pdrop": 1.0}, "resid_pdrop is 1.0; it must be a number, at least 0 and less than 1"),
    ("qwen2", rope(rope_theta=-1.0), "rope_parameters.rope_theta is -1.0; it must be a number, more than 1"),
    ("llama", rope("linear", factor=0.0), "rope_parameters.factor is 0.0; it must be a number, at least 1"),
    ("phi3", rope("longrope", short_factor=[1.0, NAN], long_factor=[1.0]), "rope_parameters.short_factor is nan"),
    ("siglip", {"patch_size": 0}, "patch_size is 0"),
    ("dinov2", {"layerscale_value": NAN}, "layerscale_value is nan"),
    ("whisper", {"encoder_layers": 0}, "encoder_layers is 0"),
    ("whisper", {"init_std": INF}, "init_std is inf"),
]
SAYINGS = [
    ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, 3"),
    ("qwen2", rope("ntk", factor=2.0), "whose rope_type Motet does not compute"),
    ("qwen2", {"rope_parameters": MROPE}, r"rope_parameters.mrope_section is \[1, 1, 2\].*M-RoPE"),
    ("qwen2", {"rope_parameters": {"type": "mrope", "rope_theta": 1e6}}, "whose rope_type Motet does not compute"),
    ("qwen2", rope(type="mrope"), "type is 'mrope', and rope_type is 'default'; they must agree"),
    (
        "llama",
        rope(partial_rotary_factor=0.5),
        "partial_rotary_factor is 0.5, which is no option of rope_type 'default'",
    ),
    (
        "llama",
        rope("llama3", factor=2.0, low_freq_factor=2.0, high_freq_factor=2.0),
        "must be less than high_freq_factor",
    ),
    ("llama", rope("yarn", factor=2.0, beta_fast=1.0, beta_slow=32.0), "beta_fast is 1.0; it must be more than"),
    ("llama", {"head_dim": 3}, "3 channels of a head would turn with the position; their number must be even"),
    ("gemma3", rope(), "rope_parameters.rope_theta has no effect; it belongs into a table for a kind of layer"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which Motet does not compute"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True.*must be absent or False"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop is 0.1"),
    ("olmo2", {"hidden_act": "silly"}, "hidden_act is 'silly'; it must be one of .*silu"),
    ("whisper", {"activation_function": ""}, "activation_function is ''; it must be one of"),
    ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_attention'"),
    ("qwen2", {"layer_types": ["full_attention", "wide"]}, "wide"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "'sliding_attention', but sliding_window is not",
    ),
    ("llama", {"layer_types": ["full_attention", "full_attention"]}, "has no option layer_types"),
    ("llama", {"return_dict": False}, "has no option return_dict"),
    ("whisper", {"apply_spec_augment": True}, "apply_spec_augment is True, which Motet does not compute"),
    ("siglip", {"image_size": 8, "patch_size": 16}, "image_size is 8; it must be at least patch_size, 16"),
    ("internvl", {"image_size": 8, "patch_size": [16, 16]}, "image_size is 8; it must be at least patch_size, 16"),
    ("dinov2", {"image_size": [8, 32]}, r"image_size is \[8, 32\]; it must be one whole number"),
    ("qwen2_vl", {"embed_dim": 20, "num_heads": 2}, r"embed_dim is 20; it must be a multiple of 4 \* num_heads"),
    ("qwen2_vl", {"rope_parameters": MROPE}, "rope_parameters is .* only the base, rope_theta, may be set"),
    (
        "gemma3",
        {"rope_parameters": {kind: rope("dynamic", factor=2.0)["rope_parameters"] for kind in GEMMA3}},
        "frequencies follow from the length of a document, .* kind of layer; it must be default, linear, llama3, yarn",
    ),
    ("qwen3", rope("dynamic", factor=2.0) | {"head_dim": 2}, "2 channels of a head.*'dynamic' it needs 4"),
]


def build(tiny, family, options):
    if family in BACKBONES:
        return tiny.backbone(family, **options)
    config = EncoderConfig(family=family, config=tiny.encoders[family] | options)
    return build_modality("x", config, tiny.dim, torch.float32, 0)


@pytest.mark.parametrize(("family", "options", "said"), NUMBERS + SAYINGS)
def test_options_of_a_recipe(tiny, family, options, said):
    given = deepcopy(options)
    with pytest.raises(UserError, match=said) as error:
        build(tiny, family, options)
    assert repr(options) == repr(given)
    where = "model.backbone.config" if family in BACKBONES else "model.encoders.x.config"
    assert str(error.value).startswith(where) and "\n" not in str(error.value)


@pytest.mark.parametrize(("family", "options", "said"), NUMBERS[:4] + SAYINGS[2:3])
def test_options_that_override_a_directory(tiny, tmp_path, family, options, said):
    tiny.backbone(family, dtype=torch.float32).causal_lm.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        build_backbone(BackboneConfig(family=family, path=tmp_path, config=options), 50, torch.float32, 0)
    config = BackboneConfig(family=family, path=tmp_path, config={"hiden_size": 8})
    with pytest.raises(UserError, match="has no option hiden_size"):
        build_backbone(config, 50, torch.float32, 0)


def test_rotary_options_override_those_of_an_older_file(tiny, tmp_path):
    """transformers itself would take the file's `rope_scaling` in place of `rope_parameters`."""
    saved(tiny, tmp_path)
    file = tmp_path / "config.json"
    stored = {key: each for key, each in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps(stored | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}))
    said = {"rope_type": "linear", "factor": 2.0}
    built = [
        build_backbone(BackboneConfig(family="llama", path=tmp_path, config=config), 50, torch.float32, 0)
        for config in ({}, {"rope_parameters": said})
    ]
    factors = [each.causal_lm.config.rope_parameters["factor"] for each in built]
    assert factors == [8.0, 2.0] and built[1].causal_lm.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"sliding_window": 4}),
        ("qwen3", {"sliding_window": 4, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}),  # From layer 28 on, by default.
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2, "max_window_layers": 1}),
        ("qwen3_moe", {"sliding_window": 4}),
    ],
)
def test_windows_that_no_layer_would_have_are_refused(tiny, family, options):
    config = BackboneConfig(family=family, config=tiny.options_of(family) | options)
    with pytest.raises(UserError, match=r"model.backbone.config.\w+ has no effect.*use_sliding_window = true"):
        build_backbone(config, 50, torch.float32, 0)


def test_windows_beside_the_kinds_of_layers_of_a_directory_are_refused(tiny, tmp_path):
    config = tiny.backbone("qwen2", dtype=torch.float32).causal_lm.config
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    options = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    with pytest.raises(UserError, match="use_sliding_window has no effect"):
        build_backbone(BackboneConfig(family="qwen2", path=tmp_path, config=options), 50, torch.float32, 0)
    options["layer_types"] = ["sliding_attention"] * 2
    built = build_backbone(BackboneConfig(family="qwen2", path=tmp_path, config=options), 50, torch.float32, 0)
    assert [window_of(built, block.self_attn) for block in built.blocks] == [4, 4]


def test_longrope_is_of_documents_that_count_from_0(tiny):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
    options = tiny.options_of("llama") | rope("longrope", **factors)
    with pytest.raises(UserError, match="first_position is 1; beside rotary positions of type longrope or dynamic"):
        build_backbone(BackboneConfig(family="llama", config=options, first_position=1), 50, torch.float32, 0)
    config = transformers.Qwen2VLTextConfig(**tiny.options_of("llama") | rope("longrope", **factors))
    with pytest.raises(
        UserError, match=r"length of a document, which positions on a grid .*; it must be default, linear, llama3, yarn"
    ):
        check_backbone(config)


STORED = [
    ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers is 1000000000"),
    (
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "config.json: rope_parameters is .*whose rope_type",
    ),
    ({"rope_parameters": MROPE}, "config.json: rope_parameters.mrope_section"),
    ({"logits_scaling": 8.0}, "config.json: logits_scaling is 8.0, which Motet does not compute"),
    ({"num_local_experts": 4}, "config.json: num_local_experts is 4"),
    ({"return_dict": False}, "config.json: return_dict is False"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "config.json: quantization_config is"),
    ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "config.json"),
    ({"initializer_range": -1.0}, "config.json: initializer_range is -1.0"),
]


@pytest.mark.parametrize(("options", "said"), STORED)
def test_options_of_a_directory(tiny, tmp_path, options, said):
    backbone = tiny.backbone("qwen2", dtype=torch.float32)
    backbone.causal_lm.config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    if "rope_scaling" in options:
        del stored["rope_parameters"]
    file.write_text(json.dumps(stored | options))
    with pytest.raises(UserError, match=said) as error:
        build_backbone(BackboneConfig(family="qwen2", path=tmp_path), 50, torch.float32, 0)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=said):
        spec_of_directory(tmp_path)


def test_a_directory_of_a_multimodal_model_is_no_backbone(tiny, tmp_path):
    config = transformers.Qwen2VLConfig(text_config=tiny.backbone_options, vision_config=tiny.encoders["qwen2_vl"])
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds a model of type 'qwen2_vl', where 'qwen2' is needed"):
        build_backbone(BackboneConfig(family="qwen2", path=tmp_path), 50, torch.float32, 0)
    config.text_config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds a model of type 'qwen2_vl_text', where 'qwen2' is needed"):
        build_backbone(BackboneConfig(family="qwen2", path=tmp_path), 50, torch.float32, 0)


def test_files_that_are_no_config(tiny, tmp_path):
    for content in (b"[1, 2]", b"\xff\xfe", b"3", b'{"model_type": ["llama"], "hidden_size": 3}'):
        (tmp_path / "config.json").write_bytes(content)
        for read in (
            lambda: build_backbone(BackboneConfig(family="llama", path=tmp_path), 50, torch.float32, 0),
            lambda: build_modality("x", EncoderConfig(family="clip", path=tmp_path), 8, torch.float32, 0),
            lambda: spec_of_directory(tmp_path),
        ):
            with pytest.raises(UserError):
                read()


def saved(tiny, tmp_path, **options):
    config = transformers.LlamaConfig(**tiny.backbone_options | {"vocab_size": 50} | options)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return BackboneConfig(family="llama", path=tmp_path)


def test_a_class_beside_the_weights_is_not_taken_for_that_of_transformers(tiny, tmp_path):
    config, file = saved(tiny, tmp_path), tmp_path / "config.json"
    stored = json.loads(file.read_text())
    for named, code in (("LlamaForCausalLM", "AutoModelForCausalLM"), ("OwnLlama", "AutoConfig")):
        file.write_text(json.dumps(stored | {"architectures": [named], "auto_map": {code: "own.Own"}}))
        build_backbone(config, 50, torch.float32, 0)
    file.write_text(json.dumps(stored | {"architectures": ["OwnLlama"], "auto_map": {"AutoModel": "own.OwnLlama"}}))
    with pytest.raises(UserError, match=r"OwnLlama is no class of transformers.*remove auto_map if transformers' own"):
        build_backbone(config, 50, torch.float32, 0)


def test_weights_that_the_config_does_not_name(tiny, tmp_path):
    config = saved(tiny, tmp_path, attention_bias=True)
    config.config["attention_bias"] = False
    with pytest.raises(UserError, match=r"8 weights that LlamaForCausalLM has no place for, .*bias for one"):
        build_backbone(config, 50, torch.float32, 0)


def test_layers_may_be_left_out_of_a_directory(tiny, tmp_path):
    config = saved(tiny, tmp_path)
    config.config["num_hidden_layers"] = 1
    assert len(build_backbone(config, 50, torch.float32, 0).blocks) == 1


def test_an_adapter_beside_the_weights_is_refused(tiny, tmp_path):
    config = saved(tiny, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds an adapter.*merge it into the weights first"):
        build_backbone(config, 50, torch.float32, 0)


@pytest.mark.parametrize("name", ["Cohere", "Olmo3", "SmolLM3"])
def test_other_classes_are_no_backbone(tiny, name):
    config = getattr(transformers, f"{name}Config")(
        **tiny.backbone_options | {"vocab_size": 50, "pad_token_id": 0}, attn_implementation=ATTENTION
    )
    with torch.device("meta"):
        causal_lm = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(UserError, match=f"{name}ForCausalLM is no backbone that Motet computes.*there are Qwen2ForCau"):
        Backbone(causal_lm)


def test_a_class_that_inherits_from_a_backbone_is_another_class(tiny):
    class Own(transformers.Qwen2ForCausalLM):
        pass

    config = transformers.Qwen2Config(**tiny.backbone_options, vocab_size=50, attn_implementation=ATTENTION)
    with pytest.raises(UserError, match="Own is no backbone"):
        Backbone(Own(config))


def test_a_model_in_hand_is_held_to_the_same(tiny):
    config = transformers.Qwen2Config(
        **tiny.backbone_options, vocab_size=50, rope_parameters=deepcopy(MROPE), attn_implementation=ATTENTION
    )
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM: rope_parameters.mrope_section"):
        Backbone(transformers.Qwen2ForCausalLM(config))


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16; it must be hidden_size, 32"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False, which Motet does not compute"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("opt", {"layerdrop": 0.1}, "layerdrop is 0.1"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("llama", {"logits_scaling": 2.0}, "has no option logits_scaling"),
    ],
)
def test_what_families_with_learned_positions_do_not_compute(tiny, family, options, said):
    with pytest.raises(UserError, match=said):
        tiny.backbone(family, **options)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_document_is_no_longer_than_the_table_of_positions(tiny, family):
    backbone = tiny.backbone(family)
    assert backbone.max_rows == 64 and tiny.backbone("llama").max_rows is None
    backbone(tiny.Packed.of([64, 3]), {})
    with pytest.raises(UserError, match=r"65 rows is longer than the 64 .* set data.max_sequence_length to 64"):
        backbone(tiny.Packed.of([3, 65]), {})


@pytest.mark.parametrize(("allowed", "said"), [(None, "not set"), (65, "65")])
def test_a_recipe_says_that_its_sequences_fit_the_table(tiny, allowed, said):
    recipe = SimpleNamespace(data=SimpleNamespace(max_sequence_length=allowed), evaluate=EvaluateConfig())
    model = SimpleNamespace(backbone=tiny.backbone("gpt2"))
    with pytest.raises(UserError, match=f"max_sequence_length is {said}, but model.backbone has positions for 64 rows"):
        open_dataset(recipe, (), None, model, print)
    recipe.data.max_sequence_length = 64
    with pytest.raises(UserError, match=r"evaluate\.max_new_tokens of an answer; set it to 32 at most"):
        open_dataset(recipe, (), None, model, print, whole=True)


UNBOUNDED = {
    "pretraining_tp",
    "_out_indices",
    "median_filter_width",
    "summary_first_dropout",
}
"""Numbers that may have one value only, and such as no encoder reads."""


@pytest.mark.parametrize("family", [*BACKBONES, *ENCODERS])
def test_every_number_of_every_family_has_a_bound(family):
    config = (BACKBONES | ENCODERS)[family].config
    of_all = {field.name for field in fields(transformers.PreTrainedConfig)}
    for field in fields(config):
        number = "int" in str(field.type) or "float" in str(field.type)
        unread = field.name in UNBOUNDED or "_token" in field.name or field.name.startswith("mask_")
        assert not number or unread or field.name in of_all | BOUNDS.keys(), field.name


def test_bounds_reach_into_tables_and_lists():
    with pytest.raises(UserError, match=r"x\.text_config\.num_hidden_layers is 0"):
        check_bounds("x.", {"text_config": {"num_hidden_layers": 0}})
    with pytest.raises(UserError, match=r"x\.anything is inf; it must be finite"):
        check_bounds("x.", {"anything": [1.0, INF]})
    check_bounds("x.", {"sliding_window": None, "hidden_size": 8, "factor": 2, "large": 10**400, "hidden_act": "silu"})


def test_padding_tokens_of_another_vocabulary_freeze_no_row(tiny):
    for family in ("gemma", "phi3", "olmo2"):
        assert tiny.backbone(family, head_dim=8) if family == "gemma" else tiny.backbone(family)
        assert tiny.backbone(family).causal_lm.model.embed_tokens.padding_idx is None


@pytest.mark.parametrize("sections", [None, [2, 1], [2, 1, 2], [3, 3, 0], [2.0, 1, 3], "213"])
def test_sections_of_a_grid_are_checked(sections):
    config = transformers.Qwen2VLTextConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=1)
    config.rope_parameters = {"rope_type": "default", "type": "mrope", "rope_theta": 1e4, "mrope_section": [2, 1, 3]}
    check_backbone(config)
    config.rope_parameters["mrope_section"] = sections
    with pytest.raises(UserError, match=r"mrope_section is .* add up to 6"):
        check_backbone(config)
