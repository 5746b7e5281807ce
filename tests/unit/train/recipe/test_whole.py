"""A recipe of a whole model: what it derives from a directory, and the sentences for what is not right there."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlavaForConditionalGeneration

from motet.assign.balancing import operation_costs
from motet.balance.cutting import cut_phase
from motet.balance.step_costs import ASSUMED_SPEEDS
from motet.core.cluster import Link
from motet.core.errors import UserError
from motet.core.exchange import Network
from motet.core.plan import Plan, Unit
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.catalogue import cluster
from motet.cost.flops import batch_flops, step_flops, work_of
from motet.cost.operations import Operations
from motet.cost.phases import phase_times
from motet.cost.profile import LayerTimes, ModuleTimes, Points, Profile
from motet.cost.source import cost_model
from motet.data.conversation import parse_conversation
from motet.data.images import ImageTransform
from motet.models.build import build_mllm
from motet.models.lora_read import SavedAdapter
from motet.models.spec import model_spec
from motet.models.whole.export import export_whole
from motet.profiling.measure import MeasuredSubject, entry_once, measure_once
from motet.profiling.subjects import one_layer_deep, subjects
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import dump_recipe, load_recipe
from unit.models.conftest import Packed
from whole_jobs import whole_job, whole_models

written = whole_job("llava", num_examples=2)


@pytest.fixture
def job(written, tmp_path):
    return shutil.copytree(written, tmp_path / "job")


def changed(file, **changes):
    """A JSON file with other values; a dict changes the table of its name."""
    stored = json.loads(file.read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            stored[key] |= value
        else:
            stored[key] = value
    file.write_text(json.dumps(stored))


def complaint(job, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(job / "recipe.toml", overrides).transform("image")
    return str(caught.value).replace(f"{job}/", "")


def test_what_the_directory_says(job):
    recipe = load_recipe(job / "recipe.toml", ["model.train.projector=false", "model.train.backbone=false"])
    image = recipe.modules.encoders["image"]
    assert (image.family, image.feature_layer, image.train_encoder, image.train_projector) == ("clip", -2, True, False)
    assert (recipe.modules.backbone.family, recipe.modules.backbone.train) == ("llama", False)
    transform = recipe.transform("image")
    assert (transform.patch_size, transform.size, transform.shortest_edge) == (8, (24, 24), 24)
    assert transform.sizes(np.array([[640, 480]])).tolist() == [[3, 3]]
    assert recipe.vocabulary().encode is not None


def test_keys_that_have_no_place_beside_it(job):
    assert complaint(job, "data.tokenizer=model") == (
        "recipe.toml: model.path brings its own tokenizer; remove data.tokenizer."
    )
    assert "model.backbone has no place beside it" in complaint(job, "model.backbone.family=llama")
    assert "transforms.image has no effect beside model.path" in complaint(job, "transforms.image.patch_size=8")
    assert complaint(job, "model.train.audio=false") == (
        "recipe.toml: model.train.audio has no effect: model has no such part; it has image, projector, backbone."
    )
    assert "parallel.audio has no effect" in complaint(job, "parallel.audio.tp=2")
    held = 'data.heldout=["train.jsonl"]'
    assert "evaluate.num_made = 4 has no effect without" in complaint(job, held, "evaluate.num_made=4")
    load_recipe(job / "recipe.toml", [held, "evaluate.num_made=12"])  # As in the recipe that a run writes.


@pytest.mark.parametrize("key", ["run.dir", "data.index_folder", "data.cache_folder"])
def test_a_variable_of_the_shell_makes_no_folder_of_its_name(job, key):
    assert complaint(job, f'{key}="$HOME/a"').startswith(f"--set {key}: '{key}' has $HOME in it, and a folder")
    assert "has ${SCRATCH} in it" in complaint(job, f'{key}="/work/${{SCRATCH}}"')
    load_recipe(job / "recipe.toml", [f'{key}="~/5$"'])


LAST = r".*language_model.*\.(q_proj|v_proj)"


def saved_by_peft(job, folder="saved", targets=LAST, **options):
    """A directory that peft has written of adapters on transformers' model of a job."""
    model = LlavaForConditionalGeneration.from_pretrained(job / "model")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    peft.get_peft_model(model, config).save_pretrained(job / folder)
    return job / folder


def test_an_adapter_goes_on_with_all_that_its_directory_says(job):
    saved_by_peft(job, lora_dropout=0.25, use_rslora=True)
    recipe = load_recipe(job / "recipe.toml", ["model.lora.path=saved"])
    (job / "again.toml").write_text(dump_recipe(recipe))
    assert load_recipe(job / "again.toml") == recipe
    modules = recipe.modules
    lora = modules.lora["backbone"]
    assert (*modules.lora, lora.rank, lora.alpha, lora.dropout, lora.rank_stabilized) == ("backbone", 2, 6, 0.25, True)
    model = build_mllm(modules, 99, deferred=True)
    learns = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(learns) == 2 * 2 * 2 and all(re.search(r"[qv]_proj\.lora_[AB]\.weight$", name) for name in learns)
    more = load_recipe(job / "recipe.toml", ["model.lora.path=saved", "model.train.projector=true"]).modules
    assert (more.encoders["image"].train_projector, more.encoders["image"].train_encoder) == (True, False)


def test_an_adapter_that_two_parts_name_is_read_once(job, monkeypatch):
    saved_by_peft(job, targets=r".*(language_model|vision_tower).*q_proj", modules_to_save=["multi_modal_projector"])
    parts = [f'model.lora.{part}={{ rank = 2, alpha = 6, path = "saved" }}' for part in ("backbone", "image")]
    read, paths = SavedAdapter.read, []
    monkeypatch.setattr(SavedAdapter, "read", lambda where, path, but: paths.append(path) or read(where, path, but))
    modules = load_recipe(job / "recipe.toml", parts).modules
    assert paths == [job / "saved"]
    assert set(modules.lora) == {"backbone", "image"}


def test_modules_that_are_saved_whole_may_be_projectors(job):
    saved = saved_by_peft(job, modules_to_save=["multi_modal_projector"])
    file = saved / "adapter_model.safetensors"
    key = "base_model.model.model.multi_modal_projector.linear_2.bias"
    tensors = load_file(file)
    tensors[key] += 1
    save_file(tensors, file)
    modules = load_recipe(job / "recipe.toml", ["model.lora.path=saved"]).modules
    bias = build_mllm(modules, 99, deferred=True).encoders["image"].projector.layers[2].bias
    assert bias.requires_grad and torch.equal(bias, tensors[key])
    del tensors[key]
    save_file(tensors, file)
    told = complaint(job, "model.lora.path=saved")
    assert "not model.multi_modal_projector.linear_2.bias; say whether all of it learns: model.train.projector" in told
    saved_by_peft(job, "head", modules_to_save=["lm_head"])
    told = complaint(job, "model.lora.path=head")
    assert "lm_head.weight whole (modules_to_save), which only projectors may be" in told


def test_adapters_that_do_not_fit_the_directory(job):
    saved = saved_by_peft(job)
    table = 'model.lora.backbone={ rank = 2, alpha = 6, targets = ["q_proj", "v_proj"], path = "saved" }'
    assert load_recipe(job / "recipe.toml", [table]).modules.lora["backbone"].own_name("x") is None

    def built_complaint(override):
        with pytest.raises(UserError) as caught:
            build_mllm(load_recipe(job / "recipe.toml", [override]).modules, 99, deferred=True)
        return str(caught.value)

    assert "this table says 2" in built_complaint(table.replace("alpha = 6", "alpha = 4"))
    assert "is its shape with rank = 4" in built_complaint(table.replace("rank = 2, alpha = 6", "rank = 4, alpha = 12"))
    told = built_complaint(table.replace('"q_proj", "v_proj"', '"q_proj"'))
    assert "has an adapter of model.layers.0.self_attn.v_proj; name the layers that it has" in told
    image = 'model.lora.image={ rank = 2, path = "saved" }'
    told = complaint(job, image)
    assert "saved has adapters of backbone, too; name it in [model.lora.backbone] as well, or take all" in told
    told = complaint(job, "model.lora.path=saved", "model.lora.image={ rank = 2 }")
    assert "`path` says all that there is of adapters, so `image` has no place beside it" in told
    assert "`path` must be a path, as a string, not 3" in complaint(job, "model.lora.path=3")
    assert "`backbone` must be a table, not 'saved'" in complaint(job, "model.lora.backbone=saved")
    told = complaint(job, "model.lora.path=saved", "model.train.backbone=false")
    assert "model.lora.path gives adapters to a part that does not learn; remove model.train.backbone" in told
    told = complaint(job, "model.path=saved")
    assert "model.path: saved holds an adapter of peft alone; name its model there (it was trained on model)" in told
    assert told.endswith('and the adapter as [model.lora] path = "saved".')
    changed(saved / "adapter_config.json", alpha_pattern={"layers.1.self_attn.q_proj": 3})
    assert "several ranks or alphas" in complaint(job, "model.lora.path=saved")
    changed(saved / "adapter_config.json", init_lora_weights="pissa")
    assert "init_lora_weights = 'pissa', which Motet does not compute" in complaint(job, "model.lora.path=saved")
    saved_by_peft(job, "joined", r".*(q_proj|linear_1)")
    told = complaint(job, "model.lora.path=joined")
    assert "has an adapter of model.multi_modal_projector.linear_1, and adapters are those of linear layers in" in told
    saved_by_peft(job, "head", r".*(q_proj|lm_head)")
    assert "has an adapter of lm_head, and adapters are" in complaint(job, "model.lora.path=head")
    file = saved / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({name.replace("layers.1.", "layers.7."): each for name, each in whole.items()}, file)
    changed(saved / "adapter_config.json", init_lora_weights=True, alpha_pattern={})
    assert "layers.7.self_attn.q_proj, which is no linear layer of LlavaFor" in complaint(job, "model.lora.path=saved")
    # As of the text model by itself.
    save_file({name.replace("language_model.", ""): each for name, each in whole.items()}, file)
    told = complaint(job, table)
    assert "model.lora.backbone.path: saved has an adapter of model.layers.0.self_attn." in told
    assert "which is no linear layer of LlavaFor" in told and "it is an adapter of another model, or of" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "blip"}, "holds a model of type 'blip', and whole models are llava, "),
        ({"model_type": ["llava"]}, "it must be a name"),
        ({"vision_feature_select_strategy": "full"}, "is 'full', which Motet does not compute; it must be 'default'"),
        ({"vision_feature_layer": [-2, -1]}, "has shape [24, 16], where the config asks for [24, 32]"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'"),
        ({"quantization_config": {}}, None),
        (
            {"text_config": {"model_type": "helium"}},
            "text_config is of type 'helium', which is not held to transformers in such a model",
        ),
        (
            {"vision_config": {"model_type": "pixtral"}},
            "vision_config is of type 'pixtral', which is not held to transformers",
        ),
        ({"text_config": {"num_hidden_layers": 3}}, "lacks 9 weights of LlavaForConditionalGeneration, model.language"),
        ({"text_config": {"num_hidden_layers": 1}}, "which LlavaForConditionalGeneration has no place for"),
        ({"text_config": {"hidden_size": 27}}, "has shape [263, 24], where the config asks for [263, 27]"),
    ],
)
def test_directories_that_are_refused(job, changes, said):
    file = job / "model" / "config.json"
    if said is None:
        stored = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
        file.write_text(json.dumps(stored))
        said = "quantization_config is {'quant_method': 'bitsandbytes'}, which Motet does not compute"
    else:
        changed(file, **changes)
    assert said in complaint(job)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"do_center_crop": False}, "which does not bring all images to one size"),
        (
            {"crop_size": {"height": 32, "width": 24}},
            "makes images of 32 x 24 pixels, and the vision tower takes 24 x 24",
        ),
        ({"do_resize": False}, "has do_resize = False, which Motet does not compute; it must be True"),
        ({"rescale_factor": 1.0}, "has rescale_factor = 1.0; it must be 1 / 255"),
    ],
)
def test_processors_that_are_refused(job, changes, said):
    file = job / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= changes
    file.write_text(json.dumps(stored))
    assert said in complaint(job)


tiled = whole_job("llava_onevision", num_examples=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": {"height": 32, "width": 32}}, "makes images of 32 x 32 pixels, and the vision tower takes 26 x 26"),
        ({"image_grid_pinpoints": [[24, 48]]}, "has image_grid_pinpoints = ((24, 48),), and config.json"),
        ({"do_resize": False}, "has do_resize = False, which Motet does not compute"),
    ],
)
def test_processors_of_tiles_that_are_refused(tiled, tmp_path, changes, said):
    job = shutil.copytree(tiled, tmp_path / "job")
    file = job / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= changes
    file.write_text(json.dumps(stored))
    assert said in complaint(job)


def test_canvases_that_are_not_made_of_tiles(tiled, tmp_path):
    job = shutil.copytree(tiled, tmp_path / "job")
    for file, table in (("config.json", None), ("processor_config.json", "image_processor")):
        stored = json.loads((job / "model" / file).read_text())
        (stored if table is None else stored[table])["image_grid_pinpoints"] = [[24, 50]]
        (job / "model" / file).write_text(json.dumps(stored))
    assert "has [24, 50] among its image_grid_pinpoints; each must be of whole tiles of 26 pixels" in complaint(job)
    changed(job / "model" / "config.json", vision_aspect_ratio="pad")
    assert "vision_aspect_ratio is 'pad', which Motet does not compute" in complaint(job)


def test_a_profile_makes_the_rows_of_all_tiles(tiled):
    recipe = load_recipe(tiled / "recipe.toml")
    model = build_mllm(one_layer_deep(recipe.modules), recipe.vocabulary().vocabulary_size)
    image = next(each for each in subjects(recipe, model, model, torch.device("cpu")) if each.name == "image")
    rows = image.prepare(((2, int(image.lengths[-1])),), model.encoders["image"])()
    assert rows.shape[1] == model.backbone.dim


def test_several_images_of_an_example_are_squares_of_one_tile(tiled, tmp_path):
    job = shutil.copytree(tiled, tmp_path / "job")
    shutil.rmtree(job / "media")
    whole_models.write_examples(job, 4)  # 1, 0, 2 and 1 images.
    recipe = load_recipe(job / "recipe.toml")
    with torch.device("meta"):
        model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    dataset = open_dataset(recipe, recipe.data.train, recipe.vocabulary(), model, lambda sentence: None)
    images = dataset.batch_lengths(np.arange(4), 1).items["image"]
    assert images.example.tolist() == [0, 2, 2, 3]
    tile = 16
    assert images.length[1:3].tolist() == [tile, tile] and (images.length[[0, 3]] > tile).all()
    assert images.num_tokens[1:3].tolist() == [tile + 1, tile + 1]
    # Squares have the colour of the processor's mean.
    mean = json.loads((job / "model" / "processor_config.json").read_text())["image_processor"]["image_mean"]
    assert recipe.transform("image").square == tuple(int(255 * value) for value in mean)


def test_the_text_of_a_family_without_chat_templates(tmp_path):
    recipe = load_recipe(whole_models.write_job(tmp_path, "paligemma", num_examples=1))
    vocabulary = recipe.vocabulary()
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It."}]
    sequence = vocabulary.encode(parse_conversation({"conversations": turns}, "here"))
    # The tokenizer's own post-processor would put <bos> before the image.
    assert sequence.media_positions.tolist() == [0]
    assert vocabulary.decode(sequence.tokens[sequence.targets]) == "It."
    with pytest.raises(UserError, match="PaliGemma takes one question, and one answer to it"):
        vocabulary.encode(parse_conversation({"conversations": turns * 2}, "here"))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="has a chat template, where the processor of PaliGemma"):
        load_recipe(tmp_path / "recipe.toml").vocabulary()


def test_paligemma_2_in_an_older_format_is_the_same_model(tmp_path):
    """Names of an older format, the image processor in a file of its own, and keys that nothing reads."""
    recipe = load_recipe(whole_models.write_job(tmp_path, "paligemma2", num_examples=1))
    folder = tmp_path / "model"
    [(file, names)] = recipe.directory.keys.items()
    older = {name: name.replace("model.language_model.", "language_model.model.") for name in names.values()}
    for now, before in (("vision_tower.", "vision_tower.vision_model."), ("multi_modal_projector.",) * 2):
        older = {name: other.replace(f"model.{now}", before) for name, other in older.items()}
    assert not any(other.startswith("model.") for other in older.values())
    save_file({older[names[key]]: tensor for key, tensor in load_file(file).items()}, file)
    changed(folder / "config.json", vision_config={"num_image_tokens": 16, "num_positions": 16})
    processor = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    stored = processor["image_processor"] | {"processor_class": processor["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(stored))
    again = load_recipe(tmp_path / "recipe.toml")
    assert again.directory.keys[file] == {older[name]: name for name in names.values()}
    assert again.vocabulary().vocabulary_size == recipe.vocabulary().vocabulary_size
    assert again.transform("image") == recipe.transform("image")
    with torch.device("meta"):
        models = [build_mllm(each.modules, again.vocabulary().vocabulary_size) for each in (recipe, again)]
    both = [model.backbone.causal_lm.config.to_dict() for model in models]
    assert both[0] == both[1] and both[0]["sliding_window"] == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_config": {"image_size": [24, 30]}}, "image_size is [24, 30]; it must be square"),
        ({"vision_config": {"image_size": [30, 30]}}, "patches of a tile's side modulo 2 is 1"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2, which Motet does not compute; it must be -1"),
        ({"downsample_ratio": 1.0}, "downsample_ratio is 1.0, which Motet does not compute; it must be 0.5"),
    ],
)
def test_options_of_internvl_that_are_refused(internvl, tmp_path, changes, said):
    job = shutil.copytree(internvl, tmp_path / "job")
    changed(job / "model" / "config.json", **changes)
    with pytest.raises(UserError) as caught, torch.device("meta"):
        build_mllm(load_recipe(job / "recipe.toml").modules, 200)
    assert said in str(caught.value)


internvl = whole_job("internvl", num_examples=1)
idefics3 = whole_job("idefics3", num_examples=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": {"height": 72, "width": 72}}, "it must name longest_edge alone"),
        (
            {"max_image_size": {"longest_edge": 24}},
            "makes images of 24 x 24 pixels, and the vision tower takes 36 x 36",
        ),
    ],
)
def test_processors_of_marked_tiles_that_are_refused(idefics3, tmp_path, changes, said):
    job = shutil.copytree(idefics3, tmp_path / "job")
    file = job / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= changes
    file.write_text(json.dumps(stored))
    assert said in complaint(job)


def test_marks_of_tiles_are_for_images_that_are_cut(idefics3, monkeypatch):
    """Beside another transform sizes would be taken for numbers of tiles."""
    recipe = load_recipe(idefics3 / "recipe.toml")
    vocabulary = recipe.vocabulary()
    text = vocabulary.item_text("image")((1, 2))
    assert vocabulary.decode(text.tokens, special=True) == (
        "<row_1_col_1><image><fake_token_around_image><row_1_col_2><image>\n\n"
        "<fake_token_around_image><global-img><image>"
    )
    assert (len(text.places), text.num_marks) == (3, 7)
    with torch.device("meta"):
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size)
    monkeypatch.setattr(type(recipe), "transform", lambda self, encoder: ImageTransform(patch_size=6))
    with pytest.raises(UserError, match="is of a model that cuts images into tiles"):
        open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)


mllama = whole_job("mllama", num_examples=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": {"cross_attention_layers": [0, 3]}}, "is [0, 3]; it must name layers 1 to 4 in order, one at"),
        ({"text_config": {"cross_attention_layers": []}}, "cross_attention_layers is []; it must name layers 1 to 4"),
        (
            {"vision_config": {"intermediate_layers_indices": [2, 0]}},
            "vision_config.intermediate_layers_indices is [2, 0]; it must name layers 0 to 2 in order",
        ),
        ({"vision_config": {"vision_output_dim": 64}}, "vision_output_dim is 64, which Motet does not compute"),
        (
            {"vision_config": {"image_size": [24, 30], "patch_size": 8}},
            "image_size is [24, 30] and patch_size 8; each must be one number",
        ),
    ],
)
def test_options_of_mllama_that_are_refused(mllama, tmp_path, changes, said):
    job = shutil.copytree(mllama, tmp_path / "job")
    changed(job / "model" / "config.json", **changes)
    assert said in complaint(job)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": {"height": 32, "width": 32}}, "makes images of 32 x 32 pixels, and the vision tower takes 24 x 24"),
        (
            {"max_image_tiles": 3},
            "has max_image_tiles = 3, and config.json supported_aspect_ratios = [[1, 1], [1, 2], ",
        ),
    ],
)
def test_processors_of_canvases_that_are_refused(mllama, tmp_path, changes, said):
    job = shutil.copytree(mllama, tmp_path / "job")
    file = job / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= changes
    file.write_text(json.dumps(stored))
    assert said in complaint(job)


def test_images_that_are_keys_take_one_token_whatever_their_tiles(mllama):
    recipe = load_recipe(mllama / "recipe.toml")
    vocabulary = recipe.vocabulary()
    with torch.device("meta"):
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size)
    image = model.encoders["image"]
    sizes = np.array([[1, 1], [2, 2], [1, 3]])
    assert image.num_tokens(sizes).tolist() == [1, 1, 1]
    assert image.lengths(sizes).tolist() == [4 * (10 + 6)] * 3  # Padding is computed, too.
    assert image.num_values(sizes).tolist() == [9, 36, 27]
    assert image.grids(sizes).tolist() == [[10, 1, 1], [40, 1, 1], [30, 1, 1]]
    spec = model_spec(model)
    assert spec.moved("image")[0].output_width == 4 * 10 * model.backbone.dim
    assert [block for *_, block in spec.reentries] == [1, 3]
    dataset = open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)
    text = dataset.tokens(0)
    assert dataset.batch_lengths(np.array([0]), 1).sequence.tolist() == [len(text.tokens)]
    assert vocabulary.backend.token(int(text.tokens[text.media_positions[0]])) == "<|image|>"


def sequences_with(*num_images, length=12):
    example = np.repeat(np.arange(len(num_images)), num_images)
    sequence, one = np.full(len(num_images), length), np.ones(len(example), dtype=np.int64)
    return BatchLengths(sequence, 0 * sequence, 0 * sequence, {"image": ItemLengths(example, 64 * one, one)})


def counted_and_priced(model, num_images, priced):
    """Operations of a forward pass of the backbone: torch counts them, and so does the model's spec.

    priced: of a layer, what of it is priced.
    """
    batch, num_rows = sequences_with(*num_images), model.backbone.keys["image"]
    places = [12 * number + image for number, count in enumerate(num_images) for image in range(count)]
    packed = Packed.of([12] * len(num_images), image=places)
    packed.key_rows = torch.full(packed.tokens.shape, num_rows)
    rows = torch.ones(len(places), model.backbone.row_width("image"))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        num_targets = model.backbone(packed, {"image": rows})[1]
    [module] = [each for each in model_spec(model).modules if each.name == BACKBONE]
    module, items = Module.of(BACKBONE, map(priced, module.layers)), batch.of(BACKBONE)
    return counter, step_flops(module, items.length, num_targets, num_media=items.num_media)


def test_operations_of_layers_that_see_images_follow_the_images_of_each_sequence(mllama):
    recipe = load_recipe(mllama / "recipe.toml")
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)

    def seen_whole(layer):  # The counter knows of no mask.
        return replace(layer, trainable=False, attention=layer.attention and replace(layer.attention, causal=False))

    for num_images in ([1], [0]):
        counter, priced = counted_and_priced(model, num_images, seen_whole)
        assert counter.get_total_flops() == priced
    # The counter sees no attention with a mask, as of several images; it sees products.
    counter, products = counted_and_priced(
        model, [2, 0, 3], lambda layer: replace(layer, trainable=False, attention=None)
    )
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == products
    spec = model_spec(model)
    crossing = next(layer for layer in spec.module(BACKBONE).layers if layer.of_media)
    items = sequences_with(0, 1, 3).of(BACKBONE)
    work = work_of(crossing, items.length, np.arange(3), 3, num_media=items.num_media)
    assert (work.rows.tolist(), work.pairs.tolist()) == ([0, 12, 12], [0, 12 * 40, 12 * 120])
    batch = sequences_with(0, 1, 3)
    by_item = Operations(spec)(batch)[BACKBONE]
    assert by_item.sum() * Operations(spec).unit_flops == pytest.approx(batch_flops(spec, batch)[BACKBONE], rel=1e-3)
    assert by_item[0] < by_item[1] < by_item[2]


def test_steps_are_predicted_by_the_images_of_each_sequence(mllama):
    """Of two ranks, one has the sequences with images: it computes for longer, and keeps more."""
    recipe = load_recipe(mllama / "recipe.toml")
    with torch.device("meta"):
        model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    spec = model_spec(model)
    unit = Unit("all", (spec.num_blocks,), dp=2)
    plan = Plan(
        spec, cluster("h100", ranks_per_node=2), (unit,), 4, microbatch_size=2, schedule="data_parallel", balance="off"
    )
    cost = cost_model(plan.cluster, "bf16")

    def prices(*num_images):
        placed = assign_batch(plan, sequences_with(*num_images), cost)
        pricing = Pricing(plan, planned(plan), placed, cost)
        stages = [number for number, stage in enumerate(pricing.planned.stages) if BACKBONE in stage.layers]
        assert len({placed.island_key(replica, 2) for replica in range(2)}) == len({num_images[:2], num_images[2:]})
        found = pricing.in_islands([0])
        return found.forward[0, stages, 0].tolist(), found.held[0, stages, 0].tolist()

    for uneven, even in zip(prices(1, 3, 0, 1), prices(1, 1, 1, 1)):
        assert uneven[0] > even[0] == even[1] > uneven[1]


def test_what_ranks_that_share_a_sequence_exchange_beside_images(mllama):
    """Each further rank gets the rows of the images, and sends gradients back; its rows see no others of them."""
    recipe = load_recipe(mllama / "recipe.toml")
    with torch.device("meta"):
        spec = model_spec(build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size))
    phases = operation_costs(spec, {}, ASSUMED_SPEEDS["cpu"], 4).phases(sequences_with(0, 1, 3))
    [image, backbone] = phases if phases[0].name == "image" else reversed(phases)
    assert backbone.beside.tolist() == [0, 40 * 24 * 4, 3 * 40 * 24 * 4]
    assert image.output_bytes.tolist() == [40 * 24 * 4] * 4
    assert [each.count for each in backbone.keys] == [3 * 2]  # Of the three layers that attend to text.
    network, cut = Link(1e9, 0.0), {}
    for name, beside in (("with", backbone.beside), ("without", None)):
        phase = replace(backbone, lengths=backbone.lengths[2:], rows=backbone.rows[2:], owner=np.zeros(1, np.int64))
        phase = replace(phase, bytes=None, beside=beside if beside is None else beside[2:])
        cut[name] = cut_phase(phase, 2, Network.of(network))[0]
    assert cut["with"].fragments.num_cut == 1
    assert cut["with"].keys_bytes - cut["without"].keys_bytes == 2 * 3 * 40 * 24 * 4


def test_layers_that_see_images_are_profiled_apart_from_what_makes_their_keys(mllama):
    """A call is a second: of the block's call two products and a norm are the keys', which take them off it."""
    recipe = load_recipe(mllama / "recipe.toml")
    vocabulary_size = recipe.vocabulary().vocabulary_size
    model, twin = (build_mllm(one_layer_deep(recipe.modules), vocabulary_size) for _ in range(2))
    assert [len(module.blocks) for module in (model.encoders["image"], model.backbone)] == [1, 2]
    found = {each.name: each for each in subjects(recipe, model, twin, torch.device("cpu"))}
    subject = found[BACKBONE]
    batch = ((2, 30), (3, 16))  # Of the 40 rows of an image no more than of text: two sequences have one.
    assert subject.media(batch).tolist() == [0, 0, 0, 1, 1]
    watch = lambda work, near=None: (1.0, work())  # noqa: E731
    seconds = measure_once(subject, batch, watch)
    crossing = next(number for number, (layer, _) in enumerate(subject.layers) if layer.of_media)
    assert [layer.kind for layer, _ in subject.layers[crossing : crossing + 2]] == ["attention", "keys"]
    assert seconds[crossing + 1 : crossing + 3, 0].tolist() == [1 - 3, 3]
    assert entry_once(subject, batch, watch) <= 1
    measured = MeasuredSubject(subject, [batch], [batch])
    points = [measured.points(number, np.ones((2, 3)))[0] for number in (crossing, crossing + 1)]
    assert [(each.rows, each.pairs) for each in points] == [((32.0,), (32.0 * 40,)), ((80.0,), (0.0,))]
    assert measure_once(found["image"], ((3, int(found["image"].lengths[0])),), watch)[:, 0].sum() > 0


def test_a_measured_sequence_costs_by_its_images(mllama):
    recipe = load_recipe(mllama / "recipe.toml")
    with torch.device("meta"):
        spec = model_spec(build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size))
    batches, layers = [((1, 20),), ((4, 20),)], {}
    for layer in spec.module(BACKBONE).layers:
        each_s = {"keys": 1e-3}.get(layer.kind, 2e-3 if layer.of_media else 0.0)  # A row, in each of three passes.
        rows = [20.0 * (40 / 20 if layer.item_rows else 1) * count for count in (1, 4)]
        points = Points(
            rows=rows,
            pairs=[40 * each for each in rows] if layer.attention else [0, 0],
            **{f"{name}_s": [each_s * each for each in rows] for name in ("forward", "input", "weight")},
        )
        reach = layer.attention.reach if layer.attention else None
        layers[layer.kind, layer.weights, reach] = LayerTimes(
            kind=layer.kind, weights=layer.weights, reach=reach, grid=points, held_out=points
        )
    module = ModuleTimes(name=BACKBONE, grid=batches, held_out=batches, layers=list(layers.values()))
    profile = Profile(
        recipe="r.toml", device="cpu", precision="float32", torch="2", measured_at="now", num_ranks=1, modules=[module]
    )
    items = sequences_with(0, 1, 3).of(BACKBONE)
    found = phase_times(profile, spec, BACKBONE).of_items(items, np.zeros(3, np.int64))
    seen, made = 2 * 3 * 2 * 10**9 * items.length, 2 * 3 * 40 * 10**9  # Of two layers: of a row, and of an image.
    assert found.tolist() == pytest.approx([0, seen[1] + made, seen[2] + 3 * made], rel=1e-6)


def test_a_template_that_leaves_the_begin_to_the_processor(mllama, tmp_path):
    """Their processor would write it behind the first images, and the tokenizer once more before them."""
    job = shutil.copytree(mllama, tmp_path / "job")
    file = job / "model" / "chat_template.jinja"
    file.write_text(file.read_text().replace("{{ bos_token }}", ""))
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]
    with pytest.raises(UserError, match=r"does not begin with <\|begin_of_text\|>"):
        load_recipe(job / "recipe.toml").vocabulary().encode(parse_conversation({"conversations": turns}, "here"))


def test_weights_that_are_not_there(job):
    (job / "model" / "model.safetensors").write_bytes(b"cut")
    assert "cannot be read" in complaint(job)
    (job / "model" / "model.safetensors").unlink()
    assert "holds no model.safetensors, nor an index of such files" in complaint(job)
    shutil.rmtree(job / "model")
    assert "there is no model/config.json; give a local directory" in complaint(job)


def test_tied_weights_by_the_flag_of_the_whole_model(job):
    changed(job / "model" / "config.json", tie_word_embeddings=True)
    weights = load_file(job / "model" / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "lm_head" not in name},
        job / "model" / "model.safetensors",
        {"format": "pt"},
    )
    recipe = load_recipe(job / "recipe.toml")
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    assert model.backbone.causal_lm.lm_head.weight is model.backbone.causal_lm.model.embed_tokens.weight


def test_an_export_replaces_an_export_alone_and_leaves_old_weights_out(job, tmp_path):
    (job / "model" / "pytorch_model.bin").write_bytes(b"old")
    (job / "model" / "LICENSE").write_text("free")
    recipe = load_recipe(job / "recipe.toml")
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    out = tmp_path / "out"
    for _ in range(2):
        export_whole(recipe.directory, model, out, model.state_dict(), "A card.")
    before, after = (load_file(folder / "model.safetensors") for folder in (job / "model", out))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    assert not (out / "pytorch_model.bin").exists() and (out / "LICENSE").read_text() == "free"
    (out / "README.md").write_text("mine")
    with pytest.raises(UserError, match="exists and is no export"):
        export_whole(recipe.directory, model, out, model.state_dict(), "A card.")
    with pytest.raises(UserError, match="exists and is no export"):
        export_whole(recipe.directory, model, job / "model", model.state_dict(), "A card.")


def test_an_export_has_what_a_frozen_part_learned_in_an_earlier_phase(job, tmp_path):
    recipe = load_recipe(job / "recipe.toml", ["model.train.projector=false"])
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    name = "encoders.image.projector.layers.0.bias"
    state = model.state_dict() | {name: model.state_dict()[name] + 1}
    export_whole(recipe.directory, model, tmp_path / "out", state, "A card.")
    before, after = (load_file(folder / "model.safetensors") for folder in (job / "model", tmp_path / "out"))
    assert [key for key in before if not before[key].equal(after[key])] == ["multi_modal_projector.linear_1.bias"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("[model]", "line 6: the recipe names no model; give model.path"),
        ('[model]\npth = "model"', r"line 7: unknown key 'model.pth'; did you mean 'path'\? The recipe names no model"),
        ("[model.backbon]", "unknown key 'model.backbon'; did you mean 'backbone'"),
        (
            '[model]\npath = "Org/Name"',
            r"there is no .*Org/Name/config.json; .*hf download NAME .*nothing is downloaded",
        ),
    ],
)
def test_a_recipe_that_names_no_model(job, model, said):
    recipe = job / "recipe.toml"
    recipe.write_text(whole_models.RECIPE.replace('[model]\npath = "model"', model))
    with pytest.raises(UserError, match=said):
        load_recipe(recipe)


def test_weights_that_were_cloned_without_their_files(job):
    (job / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 123\n")
    with pytest.raises(UserError, match=r"model\.safetensors is a pointer of Git LFS; fetch the weights by `git lfs"):
        load_recipe(job / "recipe.toml")
