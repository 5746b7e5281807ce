"""Which layer of a tower is taken: as larger models of transformers take it, from their directories, or as one says."""

import pytest
import torch
import transformers
from pydantic import ValidationError

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.build import EncoderConfig, ModelConfig, build_mllm, build_modality
from motet.models.exact import keep_float64
from motet.models.export import export_hf
from motet.models.spec import spec_of_directory

TEXT = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
IMAGE = {"image_token_index": 3}
LARGER = {
    "llava": (transformers.LlavaConfig, transformers.LlavaForConditionalGeneration, "clip", -2),
    "llava_next": (transformers.LlavaNextConfig, transformers.LlavaNextForConditionalGeneration, "clip", -2),
    "llava_onevision": (
        transformers.LlavaOnevisionConfig,
        transformers.LlavaOnevisionForConditionalGeneration,
        "siglip",
        -1,
    ),
    "aya_vision": (transformers.AyaVisionConfig, transformers.AyaVisionForConditionalGeneration, "siglip", -1),
}


def larger(tiny, name, **options):
    config, model, family, _ = LARGER[name]
    vision = tiny.encoders[family] | {"num_hidden_layers": 3, "model_type": f"{family}_vision_model"}
    return model(config(text_config=TEXT | {"model_type": "llama"}, vision_config=vision, **IMAGE, **options)).double()


def from_directory(tiny, family, path, **options):
    return build_modality(
        "image", EncoderConfig(family=family, path=path, **options), tiny.dim, torch.float64, 0
    ).eval()


def pixels(rows, height, width):
    return rows.view(height, width, 3, 4, 4).permute(2, 0, 3, 1, 4).reshape(1, 3, 4 * height, 4 * width)


@pytest.mark.parametrize(
    ("name", "layers"), [("llava", -2), ("llava_onevision", -1), ("llava", [-1, 1]), ("llava_onevision", [-3, -2, -1])]
)
def test_rows_are_those_that_the_larger_model_projects(tiny, tmp_path, name, layers):
    model, family = larger(tiny, name, vision_feature_layer=layers), LARGER[name][2]
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    module = from_directory(tiny, family, tmp_path, feature_layer=layers)
    sizes = torch.tensor([[4, 4]])
    values = tiny.values(family, sizes).double()
    taken = []

    def projector(rows):
        taken.append(rows[0])
        raise InterruptedError

    model.model.multi_modal_projector.forward = projector
    with pytest.raises(InterruptedError):
        model.model.get_image_features(pixels(values, 4, 4), image_sizes=torch.tensor([[16, 16]]))
    torch.testing.assert_close(module.encoder(values, sizes), taken[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LARGER)
def test_a_larger_model_that_takes_another_layer_is_not_read_without_a_word(tiny, tmp_path, name):
    larger(tiny, name).save_pretrained(tmp_path)
    *_, family, layer = LARGER[name]
    said = (
        rf"the {name} model in .* takes layer {layer} of its tower.*set model.encoders.image.feature_layer = {layer},"
    )
    with pytest.raises(UserError, match=said):
        from_directory(tiny, family, tmp_path)
    assert len(from_directory(tiny, family, tmp_path, feature_layer=layer).blocks) == 4 + layer


def test_what_the_larger_model_does_with_the_class_row_must_be_the_same(tiny, tmp_path):
    larger(tiny, "llava", vision_feature_select_strategy="full").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="vision_feature_select_strategy = 'full', which keeps the class row"):
        from_directory(tiny, "clip", tmp_path, feature_layer=-2)
    larger(tiny, "llava_onevision", vision_feature_select_strategy="default").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'default', which drops the first patch"):
        from_directory(tiny, "siglip", tmp_path, feature_layer=-1)


@pytest.mark.parametrize(("key", "value"), [("vision_feature_layer", -2), ("vision_feature_select_strategy", "full")])
def test_a_tower_that_returns_its_output_alone_is_read_of_models_that_take_it(tiny, tmp_path, key, value):
    parts = {"text_config": TEXT | {"model_type": "llama"}, "vision_config": tiny.encoders["internvl"]}
    for said in ({}, {key: value}):
        config = transformers.InternVLConfig(**parts, image_token_id=3, **said)
        transformers.InternVLForConditionalGeneration(config).double().save_pretrained(tmp_path)
        if not said:
            assert from_directory(tiny, "internvl", tmp_path).num_encoder_blocks == 2
    with pytest.raises(UserError, match=rf"the internvl model in .* has {key} = {value!r}"):
        from_directory(tiny, "internvl", tmp_path)


def test_layers_that_are_joined_are_not_guessed(tiny, tmp_path):
    larger(tiny, "llava", vision_feature_layer=[-2, -1]).save_pretrained(tmp_path)
    said = r"takes the layers \[-2, -1\] of its tower.*set model.encoders.image.feature_layer = \[-2, -1\],"
    with pytest.raises(UserError, match=said):
        from_directory(tiny, "clip", tmp_path)


def of_family(tiny, family, layer, **options):
    config = tiny.encoders[family] | {"num_hidden_layers": 3}
    config = EncoderConfig(family=family, config=config, feature_layer=layer, **options)
    return build_modality("image", config, tiny.dim, torch.float64, 0)


@pytest.mark.parametrize("family", ["siglip", "clip", "eva_clip", "dinov2"])
@pytest.mark.parametrize("layer", [1, -1, -2])
def test_layers_are_counted_as_transformers_counts_hidden_states(tiny, family, layer):
    module = of_family(tiny, family, layer).eval()
    model, names = module.encoder.model, plain_names(module.encoder.model)
    tower = type(model)(type(model.config).from_dict(model.config.to_dict())).double().eval()
    tower.load_state_dict({names[name]: tensor for name, tensor in model.state_dict().items()})
    keep_float64(tower)
    sizes = torch.tensor([[4, 4]])
    values = tiny.values(family, sizes).double()
    hidden = tower(pixels(values, 4, 4), output_hidden_states=True).hidden_states[layer][0]
    torch.testing.assert_close(module.encoder(values, sizes), hidden[-16:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["siglip", "clip", "eva_clip", "dinov2", "siglip2", "dinov3", "pixtral"])
def test_rows_of_several_layers_stand_side_by_side(tiny, family):
    module = of_family(tiny, family, [-1, 1, -2, 1]).eval()
    encoder, sizes = module.encoder, tiny.sizes(family)
    values = tiny.values(family, sizes).double()
    singles = [of_family(tiny, family, layer).eval().encoder(values, sizes) for layer in (-1, 1, -2)]
    expected = torch.cat([*singles, singles[1]], dim=1)
    torch.testing.assert_close(encoder(values, sizes), expected, rtol=1e-12, atol=1e-12)
    # In stages, and in halves of a layer, messages have the widths that the layers say.
    hidden, widths = encoder.enter(values, sizes), [layer.output_width for layer in module.spec_module("image").layers]
    for number, block in enumerate(module.blocks[:3]):
        hidden = encoder.through(hidden, sizes, number, number)
        for block.half in (0, 1) if hasattr(encoder, "halves") else (-1,):
            hidden = encoder.through(hidden, sizes, number, number + 1)
        block.half = -1
        assert hidden.shape[1] == widths[1 + number]
    torch.testing.assert_close(encoder.leave(hidden, sizes), expected, rtol=1e-12, atol=1e-12)
    assert module(values, sizes).shape == (module.num_tokens(sizes.numpy()).sum(), tiny.dim)


@pytest.mark.parametrize("family", ["siglip", "clip", "eva_clip", "dinov2"])
def test_layers_behind_are_neither_computed_nor_trained(tiny, family):
    module = of_family(tiny, family, -2)
    layers = module.encoder.model.encoder.layer if family == "dinov2" else module.encoder.model.encoder.layers
    layers[2].forward = None  # Would fail if it were called.
    assert len(module.blocks) == 2 and not any(p.requires_grad for p in layers[2].parameters())
    sizes = tiny.sizes(family)
    module(tiny.values(family, sizes), sizes).sum().backward()
    assert [n for n, p in module.named_parameters() if p.requires_grad != (p.grad is not None)] == []
    spec = module.spec_module("image")
    assert [layer.kind for layer in spec.layers].count("attention") == 2
    assert spec.num_parameters == sum(p.numel() for p in module.parameters())
    for each in module.layers():
        assert each.layer.trainable == any(p.requires_grad for part in each.modules for p in part.parameters())


def test_a_layer_that_there_is_not_is_named(tiny):
    for layer in (0, 4, -4):
        with pytest.raises(UserError, match=rf"model.encoders.image: feature_layer is {layer}, but the tower has 3"):
            of_family(tiny, "clip", layer)
        with pytest.raises(UserError, match=rf"model.encoders.image: feature_layer is {layer}, but the tower has 3"):
            of_family(tiny, "clip", [-1, layer])
    with pytest.raises(UserError, match=r"model\.encoders\.image: feature_layer names no layer"):
        of_family(tiny, "clip", [])
    with pytest.raises(ValidationError, match="is for siglip, clip, eva_clip, dinov2, siglip2, pixtral, dinov3 only"):
        EncoderConfig(family="whisper", feature_layer=-1)


def test_an_export_is_the_whole_tower(tiny, tmp_path):
    backbone = {"family": "llama", "config": tiny.backbone_options}
    vision = {"family": "clip", "config": tiny.encoders["clip"], "feature_layer": -2}
    mllm = build_mllm(ModelConfig(backbone=backbone, encoders={"image": vision}), tiny.vocab, torch.float64)
    export_hf(mllm, tmp_path)
    again = from_directory(tiny, "clip", tmp_path / "encoders" / "image", feature_layer=-2)
    sizes = tiny.sizes("clip")
    values = tiny.values("clip", sizes).double()
    assert torch.equal(again.encoder(values, sizes), mllm.encoders["image"].eval().encoder(values, sizes))


def test_a_directory_with_llava_computes_no_last_layer(tiny, tmp_path):
    model = larger(tiny, "llava")
    model.config.save_pretrained(tmp_path)
    spec = spec_of_directory(tmp_path)
    kinds = [layer.kind for layer in spec.module("image").layers]
    assert kinds.count("attention") == 2 and kinds.count("unused") == 2
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
