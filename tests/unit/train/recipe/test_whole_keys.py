"""Recipes of whole models whose images are keys of some layers (Mllama): tokens, operations, prices and profiles."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from motet.assign.balancing import operation_costs
from motet.assign.context_rows import context_rows
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
from motet.models.build import build_mllm
from motet.models.key_items import KeyItems
from motet.models.spec import model_spec
from motet.planner.alone import bytes_alone
from motet.planner.item_memory import RankMemory
from motet.profiling.measure import MeasuredSubject, entry_once, measure_once
from motet.profiling.subjects import one_layer_deep, subjects
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe
from unit.models.conftest import Packed
from whole_jobs import changed, complaint, whole_job

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
    assert image.lengths(sizes).tolist() == [4 * 10] * 3
    assert image.num_values(sizes).tolist() == [9, 36, 27]
    assert image.grids(sizes).tolist() == [[10, 1, 1], [40, 1, 1], [30, 1, 1]]
    spec = model_spec(model)
    block = spec.module("image").layers[1]
    assert block.rows(image.lengths(sizes)).tolist() == [4 * (10 + 6)] * 3  # Padding is computed, too.
    assert spec.module("image").token_parts == 4 * 10
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


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *rest, **options: (
        sdpa_flop_count(query, key, value)
    )
}
"""That of tiles, which the counter does not know."""


def counted_and_priced(model, num_images, priced):
    """Operations of a forward pass of the backbone: torch counts them, and so does the model's spec.

    priced: of a layer, what of it is priced.
    """
    batch, num_rows = sequences_with(*num_images), model.backbone.keys["image"]
    places = [12 * number + image for number, count in enumerate(num_images) for image in range(count)]
    packed = Packed.of([12] * len(num_images), image=places)
    packed.key_rows = torch.full(packed.tokens.shape, num_rows)
    rows = torch.ones(len(places), model.backbone.row_width("image"))
    counter = FlopCounterMode(display=False, custom_mapping=KERNELS)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
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


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_shares_a_sequence_makes_keys_of_all_images_that_it_sees(mllama, num_ranks):
    """Text before the first image sees all: its rank makes as many keys as one that has the sequence whole."""
    recipe = load_recipe(mllama / "recipe.toml")
    with torch.device("meta"):
        spec = model_spec(build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size))
    keys, batch = next(layer for layer in spec.module(BACKBONE).layers if layer.makes_keys), sequences_with(3)
    length, num_rows = batch.sequence, keys.item_rows
    items = KeyItems.packed(np.array([0, length[0]]), np.array([2, 5, 9]), np.full(3, num_rows), num_rows)
    made = num_rows * max(len(items.items_of(own)) for own in context_rows(length, num_ranks).rows)
    on_ranks = cluster("h100", ranks_per_node=num_ranks)
    shared = Plan(spec, on_ranks, (Unit("all", (spec.num_blocks,), cp=num_ranks, zero=0),), 1, balance="off")
    cost = cost_model(on_ranks, "bf16")
    pricing = Pricing(shared, planned(shared), assign_batch(shared, batch, cost), cost)
    assert pricing.layer_pricing.price(BACKBONE, keys).work.rows.tolist() == [made] == [3 * num_rows]
    # Operations are those of the keys that each of the ranks makes, as if its rows saw all images.
    alone = replace(shared, units=(replace(shared.units[0], cp=1),))
    apart = Pricing(alone, planned(alone), assign_batch(alone, batch, cost), cost)
    number = sum(layer == keys for layer in spec.module(BACKBONE).layers)
    once = number * step_flops(Module.of("keys", [keys]), length, num_media=np.array([3]), reached=True)
    assert pricing.hardware_flops() - apart.hardware_flops() == (num_ranks - 1) * once > 0
    plans = [replace(shared, model=_with_more_kept(spec)), shared]
    of_keys = sum(layer == keys for layer in spec.module(BACKBONE).layers) * made * 1000 * 2
    assert np.subtract(*(bytes_alone(plan, batch)[0] for plan in plans)) == of_keys
    units, one = np.array([num_ranks]), np.array([0])
    dealt = {
        "units": (Unit("all", (spec.num_blocks,), dp=num_ranks, zero=0),),
        "schedule": "data_parallel",
        "batch_size": num_ranks,
    }
    taken = [RankMemory(replace(plan, **dealt))(batch)[BACKBONE] for plan in plans]
    kept = [each.of_fragments(one, units // num_ranks, units)[0][0] for each in taken]
    assert kept[0] - kept[1] == pytest.approx(of_keys, abs=4)


def _with_more_kept(spec):
    """The model whose layers that make keys keep 1,000 elements a row more."""
    [image, backbone] = spec.modules
    layers = [
        replace(layer, activation_width=layer.activation_width + 1000) if layer.makes_keys else layer
        for layer in backbone.layers
    ]
    return replace(spec, modules=(image, Module.of(BACKBONE, layers)))


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
