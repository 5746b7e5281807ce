"""A recipe of a whole model: what it derives from a directory, and the sentences for what is not right there."""

import json
import re
import shutil

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration, Qwen2_5OmniThinkerForConditionalGeneration

from motet.core.errors import UserError
from motet.data.conversation import parse_conversation
from motet.models.build import build_mllm
from motet.models.lora_read import SavedAdapter
from motet.models.whole.export import export_whole
from motet.planning.planned_recipe import read_job_recipe
from motet.train.recipe.recipe_file import dump_recipe, load_recipe
from whole_jobs import changed, complaint, whole_job, whole_models

written = whole_job("llava", num_examples=2)


@pytest.fixture
def job(written, tmp_path):
    return shutil.copytree(written, tmp_path / "job")


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


def test_weights_that_have_their_names_in_transformers_class_are_read(tmp_path):
    """Older ones are those of files that transformers writes."""
    path, folder = whole_models.write_job(tmp_path, "qwen2_5_omni_thinker", 1), tmp_path / "model"

    def built():
        recipe = load_recipe(path, [])
        return build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size).state_dict()

    expected, stored = built(), Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder).state_dict()
    assert any(name.startswith("model.language_model.") for name in stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    assert all(torch.equal(weight, expected[name]) for name, weight in built().items())


def test_a_class_beside_the_weights_is_refused(job):
    file = job / "model" / "config.json"
    own = {"architectures": ["OwnLlava"], "auto_map": {"AutoModel": "own.OwnLlava"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    assert "OwnLlava is no class of transformers, but code of its own (auto_map), which Motet" in complaint(job)


def test_quantised_weights_are_refused_whatever_the_config_says(job):
    file = job / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    assert f"{name} in model/model.safetensors is quantised (F8_E4M3)" in complaint(job)


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


def test_weights_that_are_not_there(job):
    (job / "model" / "model.safetensors").write_bytes(b"cut")
    assert "cannot be read" in complaint(job)
    (job / "model" / "model.safetensors").unlink()
    assert "holds no model.safetensors, nor a file that an index of such files names; without w" in complaint(job)
    shutil.rmtree(job / "model")
    assert "there is no model/config.json; give a local directory" in complaint(job)


def test_without_weights_a_model_is_planned_as_with_them(job):
    recipe = job / "recipe.toml"
    spec = read_job_recipe(recipe).model
    (job / "model" / "model.safetensors").unlink()
    assert read_job_recipe(recipe).model == spec
    index = job / "model" / "model.safetensors.index.json"  # As is there where JSON files alone were fetched.
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    assert read_job_recipe(recipe).model == spec
    assert "without weights a model can be planned, and not trained" in complaint(job)


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
