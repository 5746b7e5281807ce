"""What a profile says that layers keep for backward, against what a deeper model keeps of other lengths."""

from types import SimpleNamespace

import pytest
import torch

from cli.tiny_job import write_tiny_job
from motet.core.workload import BACKBONE
from motet.cost.flops import work_of
from motet.cost.memory import kept_bytes, stage_layers, with_measured_bytes
from motet.cost.profile import Profile, kept_shares
from motet.models.build import build_mllm
from motet.models.spec import spec_of_config
from motet.profiling.kept import kept_once
from motet.profiling.measure import MeasuredSubject, measure_once
from motet.profiling.subjects import TimedLayer, grid_of, items, one_layer_deep, subjects
from motet.train.recipe.recipe_file import load_recipe
from whole_jobs import whole_job

ALONE = SimpleNamespace(gather=lambda own: [own], num_ranks=1)
DEEP = ("model.backbone.config.num_hidden_layers=3", "model.encoders.image.config.depth=3")
mllama = whole_job("mllama", num_examples=3)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    data = tmp_path_factory.mktemp("job") / "data"
    return load_recipe(write_tiny_job(data, num_train=4, num_heldout=1), DEEP)


def made(recipe, config):
    vocab_size = recipe.vocabulary().vocabulary_size
    model, twin = (build_mllm(config, vocab_size) for _ in range(2))
    return {subject.name: subject for subject in subjects(recipe, model, twin, torch.device("cpu"))}


def profiled(chosen):
    """The profile of subjects by a watch that counts calls."""

    def watch(work, near=None):
        return 1.0, work()

    modules = []
    for subject in chosen.values():
        grid, held_out = grid_of(subject.lengths, 256, padded=subject.spec.padded)
        measured = MeasuredSubject(subject, grid, held_out)
        measured.samples = [[measure_once(subject, batch, watch)] for batch in measured.batches]
        measured.kept = [kept_once(subject, batch) for batch in measured.batches]
        modules.append(measured.times(ALONE))
    return Profile(
        recipe="tiny", device="cpu", precision="float32", torch="", measured_at="", num_ranks=1, modules=modules
    )


def said_bytes(model, subject, batch):
    """What the memory model says that layers keep of a batch, without the output layer."""
    total = 0.0
    for placed in stage_layers(model, {subject.name: (0, model.num_blocks[subject.name])}, {}):
        if placed.layer.targets_only:
            continue
        work = work_of(
            placed.layer,
            items(batch),
            padded=subject.spec.padded,
            segments=subject.segments(batch),
            num_tokens=subject.num_tokens(batch),
        )
        total += placed.has_backward * kept_bytes(placed, work.rows[0], 1, 4)[0]
    return total


def saved_bytes(subject, batch):
    """What a forward pass saves for backward up to the output layer, each storage once, without parameters."""
    tensors = [*subject.module.parameters(), *subject.module.buffers()]
    own, held, is_over = {each.untyped_storage().data_ptr() for each in tensors}, {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if not is_over and storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    if subject.name == BACKBONE:
        (norm,) = (module for layer, modules in subject.layers for module in modules if layer.kind == "norm")
        norm.register_forward_hook(lambda *called: is_over.append(True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        subject.prepare(batch, subject.module)()
    return sum(storage.nbytes() for storage in held.values())


def test_measured_bytes_are_those_of_a_deeper_model(recipe):
    """Within 6 %: rotations, which all blocks share, are in none. By widths alone, one is further off."""
    spec = spec_of_config(recipe.model, recipe.vocabulary().vocabulary_size)
    measured = with_measured_bytes(spec, kept_shares(profiled(made(recipe, one_layer_deep(recipe.model))), spec))
    assert measured == spec
    worst = 0.0
    for name, subject in made(recipe, recipe.model).items():
        longest = subject.lengths[subject.lengths <= 120]
        batch = ((3, int(longest[-1])), (2, int(longest[len(longest) // 2])))
        kept = saved_bytes(subject, batch)
        assert said_bytes(measured, subject, batch) == pytest.approx(kept, rel=0.06), name
        worst = max(worst, abs(said_bytes(spec, subject, batch) / kept - 1))
    assert worst > 0.08


def test_an_output_layer_keeps_nothing(recipe):
    subject = made(recipe, one_layer_deep(recipe.model))[BACKBONE]
    assert subject.layers[-1].layer.targets_only and kept_once(subject, ((2, 16),))[-1] == 0


def test_what_makes_keys_inside_a_block_keeps_its_tensors_once(mllama):
    recipe = load_recipe(mllama / "recipe.toml")
    subject, batch = made(recipe, one_layer_deep(recipe.modules))[BACKBONE], ((2, 30), (3, 16))
    (keys,) = (number for number in range(len(subject.layers)) if subject.is_inside(number))
    kept = kept_once(subject, batch)
    assert kept[keys] > 0 and kept.sum() < saved_bytes(subject, batch)


@pytest.mark.parametrize(("is_apart", "expected"), [(True, [2 * 3 * 4, 2 * 4 * 4]), (False, [0, 0])])
def test_layers_that_are_timed_as_one_are_left_to_the_memory_model(is_apart, expected):
    """Else the first would have what all keep, beside what the memory model says of the others."""
    block = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    layer, rows = SimpleNamespace(in_block=True, targets_only=False), torch.randn(2, 3)
    subject = SimpleNamespace(
        module=block,
        layers=[
            TimedLayer(layer, modules) for modules in ([(each,) for each in block] if is_apart else [(block,), ()])
        ],
        spec=SimpleNamespace(blocks=(range(2),)),
        is_inside=lambda number: False,
        prepare=lambda batch, module: lambda: module(rows),
    )
    assert kept_once(subject, ()).tolist() == expected
