"""What is measured and how it is taken apart; the seconds themselves are the machine's matter."""

import time
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from cli.tiny_job import write_tiny_job
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.shapes import Transformer, language_model, multimodal
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.fit import relative_error
from motet.cost.profile import LayerTimes, ModuleTimes, Points, Profile
from motet.data.text import ChatTokenizer
from motet.models.build import ModelConfig, build_mllm
from motet.models.families.registry import BACKBONES, ENCODERS
from motet.models.spec import spec_of_config
from motet.profiling import measure as measuring
from motet.profiling.job_lengths import AskedLengths, asked_lengths, of_examples
from motet.profiling.measure import (
    MeasuredSubject,
    Stopwatch,
    entry_once,
    hooks_once,
    measure,
    measure_once,
    time_passes,
    waits_once,
)
from motet.profiling.runs import MeasuredRuns, run_packs
from motet.profiling.subjects import grid_of, items, one_layer_deep, subjects
from motet.profiling.table import HeldOut, print_tables
from motet.runtime.deferred import WeightProduct, _DeferredLinear
from motet.train.recipe.recipe_file import load_recipe

ALONE = SimpleNamespace(gather=lambda own: [own], num_ranks=1)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return load_recipe(write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_train=4, num_heldout=1))


@pytest.fixture(scope="module")
def chosen(recipe):
    vocab_size = ChatTokenizer.from_directory(recipe.data.tokenizer).vocabulary_size
    model, twin = (build_mllm(one_layer_deep(recipe.model), vocab_size) for _ in range(2))
    return {subject.name: subject for subject in subjects(recipe, model, twin, torch.device("cpu"))}


def counting_watch(work, near=None):
    """A call is a second."""
    return 1.0, work()


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=40, unique=True),
    st.integers(1, 20_000),
    st.booleans(),
)
@example([8, 123, 4999], 4999, False)
def test_batches_stay_in_bounds_and_held_out_ones_are_others(lengths, max_rows, padded):
    lengths = np.array(sorted(lengths))
    grid, held_out = grid_of(lengths, max_rows, padded=padded)
    seen = {length for batch in grid for _, length in batch}
    for batch in [*grid, *held_out]:
        assert {length for _, length in batch} <= set(lengths.tolist())
        whole = sum(count for count, _ in batch) * max(length for _, length in batch)
        assert sum(count * length for count, length in batch) <= max(max_rows, sum(length for _, length in batch))
        assert not padded or len(batch) == 1 or whole <= max(max_rows, sum(length for _, length in batch) * len(batch))
    assert not set(grid) & set(held_out)
    assert len(set(grid)) == len(grid)
    assert max(seen) == max(length for length in lengths if length <= max(max_rows, lengths[0]))


def test_a_grid_tells_rows_from_pairs():
    grid, held_out = grid_of(np.arange(8, 2049), 8192, padded=False)
    rows = np.array([items(batch).sum() for batch in grid])
    squares = np.array([np.square(items(batch)).sum() for batch in grid])
    assert len({tuple(length for _, length in batch) for batch in grid}) == 6
    assert np.linalg.matrix_rank(np.stack([np.ones(len(grid)), rows / rows.max(), squares / squares.max()])) == 3
    assert any(len(batch) > 1 for batch in held_out)


def reaches(module):
    return [layer.attention.reach for layer in module.layers if layer.attention is not None]


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("gemma3", {"sliding_window": 8}, [(True, 8, False), (True, 0, False)]),
        ("gemma3", {"layer_types": [FULL] * 7}, [(True, 0, False)]),
        ("qwen2", WINDOWS | {"max_window_layers": 3}, [(True, 0, False), (True, 8, False)]),
        ("qwen2", WINDOWS | {"max_window_layers": 9}, [(True, 0, False)]),
        ("qwen3", WINDOWS | {"layer_types": [SLIDING, FULL] + [SLIDING] * 5}, [(True, 8, False), (True, 0, False)]),
        ("mistral", {"sliding_window": 8}, [(True, 8, False)]),
        ("qwen2_5_vl", {"fullatt_block_indexes": [2, 4]}, [(False, 0, False), (False, 0, True)]),
        ("qwen2_5_vl", {"fullatt_block_indexes": list(range(7))}, [(False, 0, True)]),
    ],
)
def test_one_layer_is_left_of_each_reach_of_attention(family, config, expected):
    backbone = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    given = {"backbone": {"family": "qwen2", "config": backbone}}
    if family == "qwen2_5_vl":
        config |= {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, "depth": 7}
        given["encoders"] = {"image": {"family": family, "config": config}}
    else:
        given["backbone"] = {"family": family, "config": backbone | {"num_hidden_layers": 7} | config}
    made = one_layer_deep(ModelConfig.model_validate(given))
    assert reaches(spec_of_config(made, 64).module("image" if "image" in made.encoders else BACKBONE)) == expected


def test_a_depth_out_of_bounds_is_refused_before_layers_are_listed():
    config = ModelConfig.model_validate({"backbone": {"family": "qwen2", "config": {"num_hidden_layers": 2**60}}})
    with pytest.raises(UserError, match=r"model\.backbone\.config\.num_hidden_layers is"):
        one_layer_deep(config)


def test_layers_with_and_without_a_window_are_timed_apart(recipe):
    backbone = recipe.model.backbone.model_copy(
        update={
            "family": "gemma3",
            "config": {
                "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 8, "num_hidden_layers": 7, "sliding_window": 4,
            },
        }
    )  # fmt: skip
    model_config = recipe.model.model_copy(update={"backbone": backbone})
    vocab_size = ChatTokenizer.from_directory(recipe.data.tokenizer).vocabulary_size
    model, twin = (build_mllm(one_layer_deep(model_config), vocab_size) for _ in range(2))
    changed = recipe.model_copy(update={"model": model_config})
    subject = next(each for each in subjects(changed, model, twin, torch.device("cpu")) if each.name == BACKBONE)
    batch = ((2, int(subject.lengths[1])),)
    times = MeasuredSubject(subject, [batch], [], [[measure_once(subject, batch, counting_watch)]]).times(ALONE)
    windowed, whole = (each for each in times.layers if each.kind == "attention")
    assert (windowed.reach, whole.reach) == ((True, 4, False), (True, 0, False))
    assert windowed.weights == whole.weights and windowed.grid.pairs[0] < whole.grid.pairs[0]
    assert whole.grid.forward_s[0] == 1  # Its own call, in full.
    spec = spec_of_config(model_config, vocab_size)
    found = [times.of_layer(layer) for layer in spec.module(BACKBONE).layers if layer.kind == "attention"]
    assert [each is whole for each in found] == [False] * 5 + [True, False]


def test_every_family_can_be_one_layer_deep():
    options = {
        "siglip": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4},
        "clip": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4},
        "dinov2": {"hidden_size": 16, "num_attention_heads": 2, "patch_size": 4},
        "qwen2_vl": {"embed_dim": 16, "num_heads": 2, "hidden_size": 16, "depth": 5},
        "qwen2_5_vl": {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, "depth": 5},
        "siglip2": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
        "pixtral": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
        "whisper": {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
        "qwen2_audio": {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    }
    backbone = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    others = {
        "gpt2": {"n_embd": 16, "n_head": 2, "n_inner": 16},
        "opt": {"hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2, "ffn_dim": 16},
    }
    for family in BACKBONES:
        config = others.get(family, backbone) | {BACKBONES[family].depth: 5}
        given = {"backbone": {"family": family, "config": config, "train": False}}
        given["encoders"] = {
            name: {"family": name, "config": config, "train_encoder": False} for name, config in options.items()
        }
        config = ModelConfig.model_validate(given)
        whole = spec_of_config(config, 64)
        for module in spec_of_config(one_layer_deep(config), 64).modules:
            assert reaches(module) == list(dict.fromkeys(reaches(whole.module(module.name))))
            assert all(layer.trainable for layer in module.layers if layer.kind not in ("unused",))


@pytest.mark.parametrize("family", ["qwen2", "whisper"])
def test_a_directory_is_read_one_layer_deep(tmp_path, family):
    registered = (BACKBONES | ENCODERS)[family]
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {"vocab_size": 64, "layer_types": ["full_attention"] * 3}
    if family == "whisper":
        small = {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    registered.model(registered.config(**small, **{registered.depth: 3})).save_pretrained(tmp_path)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    given = {"backbone": {"family": "qwen2", "config": {"hidden_size": 16} | heads}}
    if family == "whisper":
        given["encoders"] = {"audio": {"family": family, "path": tmp_path}}
    else:
        given["backbone"] = {"family": family, "path": tmp_path}
    model = build_mllm(one_layer_deep(ModelConfig.model_validate(given)), 64)
    assert len((model.encoders["audio"] if family == "whisper" else model.backbone).blocks) == 1


def test_lengths_are_those_that_transform_and_encoder_allow(recipe, chosen):
    longest = recipe.model.encoders["audio"].config["max_source_positions"] * 2
    assert chosen["audio"].lengths.max() <= longest
    assert (chosen["image"].lengths % 4 == 0).all() and len(chosen["image"].lengths) > 5
    assert chosen[BACKBONE].lengths.min() == 8


def test_seconds_are_spent_where_the_jobs_lengths_are(recipe, chosen, monkeypatch):
    """4 training examples, 2 in a microbatch of a rank of 3: no batch is longer, or has more rows than twice those."""
    encoders = {name: chosen[name].module for name in ("image", "audio")}
    model = SimpleNamespace(encoders=encoders, generators={}, measured=encoders, backbone=chosen[BACKBONE].module)
    asked = asked_lengths(recipe, model, 1)
    found = {one.name: one for one in subjects(recipe, model, model, torch.device("cpu"), asked)}
    for name, subject in found.items():
        longest = asked[name].longest
        assert subject.lengths.max() <= longest < 10**4 and subject.job_rows == asked[name].rows >= longest
        assert set(subject.lengths) <= set(chosen[name].lengths)
        assert (subject.lengths < asked[name].shortest).sum() <= 1
    assert found[BACKBONE].lengths.max() < chosen[BACKBONE].lengths.max()
    grouped = recipe.model_copy(update={"data": recipe.data.model_copy(update={"group": "auto"})})
    suited = {"image": 5000, "audio": 6000, BACKBONE: 7000}
    monkeypatch.setattr("motet.data.groups.suggest_phase_caps", lambda totals: {name: suited[name] for name in totals})
    assert {name: of_module.rows for name, of_module in asked_lengths(grouped, model, 1).items()} == suited


def test_a_jobs_rows_are_those_of_its_microbatches():
    items = {"image": ItemLengths(np.array([0, 0, 1]), np.array([100, 200, 300]), np.array([25, 50, 75]))}
    batch = BatchLengths(np.array([400, 600]), np.array([300, 500]), np.zeros(2, np.int32), items)
    assert of_examples(batch, 4.0) == {
        "image": AskedLengths(104, 300, 2 * 4 * 300), BACKBONE: AskedLengths(404, 600, 2 * 4 * 500)
    }  # fmt: skip
    assert of_examples(batch, 4.0, {"image": 700})["image"].rows == 700
    assert AskedLengths(100, 300, 1).among(np.array([8, 64, 128, 256, 512])).tolist() == [64, 128, 256]
    assert AskedLengths(3, 5, 1).among(np.array([8, 64])).tolist() == [8]


def test_small_batches_are_for_many_rounds_and_those_of_a_job_for_some(chosen, monkeypatch):
    """A row takes 1 ms: 0.1 s are 30 rows for 8 rounds. The job's microbatches have 64, and 3 rounds reach them."""
    aimed = []

    def most(subject, watch, most_s):
        aimed.append(most_s)
        return int(most_s * 1000)

    monkeypatch.setattr("motet.profiling.measure._max_rows", most)
    subject = replace(chosen["image"], job_rows=64)
    seconds = 8 * 20 * 0.03
    watch = lambda work, near=None: (0.001, work())  # noqa: E731
    measure([subject], watch, ALONE, seconds, lambda share: None)
    assert aimed == pytest.approx([0.03, 0.08])
    aimed.clear()
    measure([replace(subject, job_rows=30)], watch, ALONE, seconds, lambda share: None)
    assert aimed == pytest.approx([0.03])


def test_an_encoder_that_no_item_fits_is_named(recipe, chosen, monkeypatch):
    parts = {"image": chosen["image"].module}
    model = SimpleNamespace(encoders=parts, backbone=chosen[BACKBONE].module, generators={})

    def refuse(sizes):
        raise UserError("never")

    monkeypatch.setattr(chosen["image"].module, "num_tokens", refuse)
    with pytest.raises(UserError, match=r"transforms.image makes no item that model.encoders.image can take"):
        subjects(recipe, model, model, torch.device("cpu"))


def test_pairs_of_an_encoder_with_segments_end_at_them(recipe, chosen, monkeypatch):
    """In segments of 4 rows a row attends to 4, however long the item is."""
    parts = {"image": chosen["image"].module}
    model = SimpleNamespace(encoders=parts, backbone=chosen[BACKBONE].module, generators={})
    monkeypatch.setattr(chosen["image"].module, "cut", lambda sizes: ItemSegments.cut(sizes.prod(axis=1), 4))
    subject, _ = subjects(recipe, model, model, torch.device("cpu"))
    lengths = subject.lengths[subject.lengths % 4 == 0]
    batches = [((3, int(lengths[-1])),), ((2, int(lengths[0])),)]
    measured = MeasuredSubject(subject, batches[:1], batches[1:])
    number = next(number for number, (layer, _) in enumerate(subject.layers) if layer.attention)
    grid, held_out = measured.points(number, np.ones((2, 3)))
    assert grid.pairs[0] == 4 * grid.rows[0] and held_out.pairs[0] == 4 * held_out.rows[0]
    measured.samples = [[np.ones((1 + len(subject.layers), 3))] for _ in batches]
    times = measured.times(ALONE)
    assert times.amounts(padded=False)[1] == (4.0 * 3 * int(lengths[-1]),)
    assert times.amounts(held_out=True, padded=False)[1] == (4.0 * 2 * int(lengths[0]),)


def test_passes_are_timed_apart_and_only_where_there_are_any():
    linear, rows = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    parameters = list(linear.parameters())
    assert time_passes(counting_watch, lambda: linear(rows), [rows], parameters).tolist() == [1, 1, 1]
    assert time_passes(counting_watch, lambda: linear(rows), [], parameters).tolist() == [1, 0, 1]
    assert time_passes(counting_watch, lambda: rows.detach() * 2, [], []).tolist() == [1, 0, 0]
    assert rows.grad is None and linear.weight.grad is None


@pytest.mark.parametrize("name", ["image", "audio", BACKBONE])
def test_every_layer_is_measured_and_layers_add_up_to_the_module(chosen, name):
    subject = chosen[name]
    batch = ((2, int(subject.lengths[subject.lengths <= 64][-1])), (3, int(subject.lengths[0])))
    sample = measure_once(subject, batch, counting_watch)
    assert sample.shape == (1 + len(subject.layers), 3)
    called = {layer.kind for (layer, _), seconds in zip(subject.layers, sample[1:]) if seconds.any()}
    # Patches are embedded by a product with the convolution's weights, not by calling it.
    assert called == {layer.kind for layer, _ in subject.layers} - {"patches"}
    # Whatever the layers took, together with what is put to the first of them they take what the whole did.
    sample[0] = [100.0, 0.0, 200.0]
    measured = MeasuredSubject(subject, [batch], [], [[sample]])
    times = measured.times(ALONE)
    assert sum(layer.grid.forward_s[0] for layer in times.layers) == pytest.approx(100)
    assert sum(layer.grid.input_s[0] + layer.grid.weight_s[0] for layer in times.layers) == pytest.approx(200)


@pytest.mark.parametrize("name", ["image", "audio", BACKBONE])
def test_what_hooks_add_is_told_by_layer(chosen, monkeypatch, name):
    """By a watch on which a hook takes 1 s, around the whole module and each of its blocks, and all else nothing."""
    subject, called = chosen[name], []
    batch = ((1, int(subject.lengths[0])),)
    assert not hooks_once(subject, batch, counting_watch).any()  # Its second copy is not under FSDP here.
    monkeypatch.setattr(measuring, "FSDPModule", type(subject.sharded))
    hooked = [subject.sharded, *subject.sharded.blocks]
    hooks = [module.register_forward_pre_hook(lambda *_: called.append(1)) for module in hooked]

    def watch(work, near=None):
        before, result = len(called), work()
        return float(len(called) - before), result

    added = hooks_once(subject, batch, watch)
    for hook in hooks:
        hook.remove()
    kinds = [layer.kind for layer, _ in subject.layers]
    assert added[:, 0].sum() == 2 and added[0, 0] == 1 == added[kinds.index("attention"), 0]
    assert not added[:, 1].any()
    measured = MeasuredSubject(subject, [batch], [], [[measure_once(subject, batch, counting_watch)]], [added])
    assert sum(layer.hooks_s[0] for layer in measured.times(ALONE).layers) == 2


@pytest.mark.parametrize("name", ["image", "audio", BACKBONE])
def test_what_waiting_adds_is_told_by_layer(chosen, monkeypatch, name):
    """By a watch on which a linear layer whose product waits takes 1 s, each product 10 s, and all else nothing."""
    subject, called = chosen[name], []
    forward, add = _DeferredLinear.forward, WeightProduct.add
    monkeypatch.setattr(_DeferredLinear, "forward", lambda *given: (called.append(1.0), forward(*given))[1])
    monkeypatch.setattr(WeightProduct, "add", lambda product: (called.append(10.0), add(product))[1])

    def watch(work, near=None):
        before, result = sum(called), work()
        return sum(called) - before, result

    kept = {key: value.clone() for key, value in subject.module.state_dict().items()}
    added = waits_once(subject, ((1, int(subject.lengths[0])),), watch)
    defers = [layer.defers_weights for layer, _ in subject.layers]
    assert any(defers) and [bool(each) for each in added[:, 0] > 0] == defers
    np.testing.assert_array_equal(added[:, 2], 10 * added[:, 0])  # A layer multiplies once, and its weight waits once.
    assert not added[:, 1].any()
    assert all(torch.equal(kept[key], value) for key, value in subject.module.state_dict().items())
    measured = MeasuredSubject(subject, [((1, int(subject.lengths[0])),)], [], waits=[added])
    measured.samples = [[measure_once(subject, measured.grid[0], counting_watch)]]
    told = measured.times(ALONE).layers
    assert sum(layer.waits_s[0] for layer in told) == added[:, 0].sum() and told[0].waits_s[1] == 0


def test_points_say_what_each_layer_saw(chosen):
    subject, batch = chosen[BACKBONE], ((2, 8), (1, 20))
    measured = MeasuredSubject(subject, [batch], [], [[measure_once(subject, batch, counting_watch)]])
    by_kind = {layer.kind: layer.grid for layer in measured.times(ALONE).layers}
    assert by_kind["attention"].rows == (36.0,)
    assert by_kind["attention"].pairs[0] == pytest.approx((2 * 8**2 + 20**2) / 2, rel=0.1)
    # The first token of each of the three sequences is no target.
    assert by_kind["head"].rows == (33.0,)
    audio, batch = chosen["audio"], ((1, 20), (1, 8))
    measured = MeasuredSubject(audio, [batch], [], [[measure_once(audio, batch, counting_watch)]])
    by_kind = {layer.kind: layer.grid for layer in measured.times(ALONE).layers}
    assert by_kind["attention"].rows == (20.0,) and by_kind["attention"].pairs == (200.0,)


@pytest.mark.parametrize(("noise", "given_s", "num_rounds"), [(0.0, 40, 3), (0.5, 40, 8), (0.5, 1, 3)])
def test_rounds_go_on_until_times_have_settled_or_the_time_is_up(chosen, monkeypatch, noise, given_s, num_rounds):
    """By a clock on which a row takes 0.1 s, and so does what has none; each call up to `noise` longer."""
    now_s, shares, longer = [0.0], [], cycle(np.linspace(0, noise, 7))
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    # By that clock, in which rows of forward passes are all that counts, it would be most of a round of one batch.
    monkeypatch.setattr(measuring, "waits_once", lambda subject, batch, watch: np.zeros((len(subject.layers), 3)))

    def watch(work, near=None):
        result = work()
        seconds = 0.1 * (len(result) if torch.is_tensor(result) else 1) * (1 + next(longer))
        now_s[0] += seconds
        return seconds, result

    (found,) = measure([chosen["image"]], watch, ALONE, given_s, shares.append)
    assert {len(samples) for samples in found.samples} == {num_rounds}
    # At least 3 rounds; of more, none is begun that would end too late.
    assert num_rounds == 3 or 0.9 * given_s < now_s[0] <= given_s
    assert shares == sorted(shares) and shares[-1] <= 1


def test_a_layer_is_measured_to_take_time(chosen):
    times = measure([chosen["image"]], Stopwatch(torch.device("cpu")), ALONE, 0.1, lambda share: None)[0].times(ALONE)
    attention = next(layer for layer in times.layers if layer.kind == "attention")
    assert attention.grid.forward_s and min(attention.grid.forward_s + attention.held_out.forward_s) > 0


def test_the_error_is_that_of_lengths_that_were_not_seen():
    def points(rows, factor=1.0):
        seconds = [1e-6 * row * factor for row in rows]
        return Points(rows=rows, pairs=[0] * len(rows), forward_s=seconds, input_s=seconds, weight_s=seconds)

    times = LayerTimes(kind="head", weights=1, grid=points([10, 20, 40]), held_out=points([15, 30], 1.25))
    interpolated, fitted = HeldOut.of(times).errors
    assert interpolated.mean == pytest.approx(0.2) and fitted.overall == pytest.approx(0.2)
    two = HeldOut.of(times) + HeldOut.of(times)
    assert relative_error(two.interpolated, two.measured).overall == pytest.approx(0.2)


@pytest.mark.parametrize("waits", [True, False])
def test_processor_time_leaves_out_what_is_waited_for(waits):
    seconds, result = Stopwatch(torch.device("cpu"), waits=waits)(lambda: time.sleep(0.05) or "slept")
    assert result == "slept" and (seconds >= 0.05) == waits


def test_items_of_a_batch_are_not_all_alike_where_there_is_room():
    grid, _ = grid_of(np.arange(8, 2049), 8192, padded=False)
    assert {len(batch) for batch in grid} == {1, 7, 15}
    assert all(len({count for count, _ in batch}) == 1 for batch in grid)
    padded, _ = grid_of(np.arange(8, 2049), 8192, padded=True)
    # All are padded to the length that the batch is about.
    assert {max(length for _, length in batch) for batch in padded} == {8, 25, 75, 227, 682, 2048}


def test_tables_say_what_there_was_no_time_for(capsys):
    one = Points(rows=(8.0,), pairs=(0.0,), forward_s=(1e-3,), input_s=(1e-3,), weight_s=(1e-3,))
    none = Points(rows=(), pairs=(), forward_s=(), input_s=(), weight_s=())
    spec = multimodal("tiny", language_model(Transformer(8, 16, 1), 1, 50), ())
    layers = [
        LayerTimes(kind=each.kind, weights=each.weights, grid=one, held_out=none) for each in spec.modules[0].layers
    ]
    modules = (ModuleTimes(name=BACKBONE, grid=(((1, 8),),), held_out=(), layers=layers),)
    about = {"recipe": "tiny", "device": "cpu", "precision": "float32", "torch": "2", "measured_at": "", "num_ranks": 1}
    print_tables(Profile(modules=modules, **about), spec, recomputed={})
    printed = capsys.readouterr().out
    assert "not held out" in printed and "0.0%" not in printed
    assert "too few batches of backbone" in printed


@pytest.mark.parametrize("name", ["image", "audio", BACKBONE])
def test_where_a_pass_begins_inside_a_module_is_measured_without_its_layers(chosen, name):
    """By a watch on which a call of the blocks takes 9 s, and each layer in it 1 s."""
    subject, called = chosen[name], []
    hooks = [
        module.register_forward_pre_hook(lambda *_: called.append(1))
        for each in subject.layers
        for module in each.modules
    ]

    def watch(work, near=None):
        is_whole, called[:] = near is not None, []
        result = work()
        return (9.0 if is_whole and called else float(bool(called))), result

    entry_s = entry_once(subject, ((2, int(subject.lengths[subject.lengths <= 64][-1])),), watch)
    for hook in hooks:
        hook.remove()
    assert 0 < entry_s < 9 and entry_s == int(entry_s)
    batch = ((2, int(subject.lengths[0])),)
    measured = MeasuredSubject(
        subject, [batch], [], [[measure_once(subject, batch, counting_watch)]], entries=[entry_s, entry_s, 1.0]
    )
    assert measured.times(ALONE).entry_s == entry_s
    assert entry_once(replace(subject, through=None), batch, watch) == 0


def test_work_that_says_so_finds_other_data_in_the_caches():
    watch, made = Stopwatch(torch.device("cpu"), evicts=True), torch.ones(3)
    before = watch._other_data.clone()
    watch(lambda: None)
    assert torch.equal(watch._other_data, before)
    watch(lambda: None, [made])
    assert torch.equal(watch._other_data, before + 1) and made.tolist() == [1, 1, 1]


def test_attention_of_shared_items_is_timed_in_runs_and_whole(chosen):
    """A call is a second: each of two ranks has a forward and a backward pass of a pack's runs, and there is one of the
    pack whole. Nothing of padded items, nor of packs that are too short."""
    found = MeasuredRuns(replace(chosen[BACKBONE], lengths=np.arange(8, 300)), 400)
    for _ in range(2):
        found.measure(counting_watch)
    (number,) = [n for n, each in enumerate(chosen[BACKBONE].layers) if each.layer.attention is not None]
    times = found.times(number, ALONE.gather)
    for points, packs in ((times.grid, found.grid), (times.held_out, found.held_out)):
        assert (set(points.forward_s), set(points.input_s)) == ({2.0}, {2.0})
        assert (set(points.whole_forward_s), set(points.whole_input_s)) == ({1.0}, {1.0})
        for pairs, rows, pack in zip(points.pairs, points.rows, packs, strict=True):
            assert pairs == sum(length * (length + 1) // 2 for length in pack.lengths)
            assert rows == pytest.approx(sum(pack.lengths) / pack.num_runs)
    assert len({(pack.lengths, pack.size) for pack in [*found.grid, *found.held_out]}) == 4
    assert found.times(number + 1, ALONE.gather) is None  # The norm.
    assert not MeasuredRuns(chosen[BACKBONE], 32).grid


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40, unique=True), st.integers(1, 20_000))
def test_both_ranks_have_all_rows_of_a_pack_in_as_many_runs(lengths, max_rows):
    for pack in (pack for packs in run_packs(np.array(sorted(lengths)), max_rows) for pack in packs):
        assert max(pack.lengths) <= max_rows and set(pack.lengths) <= set(lengths)
        rows = [pack.rows_of(rank) for rank in range(2)]
        assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(sum(pack.lengths)))
        starts = np.cumsum(pack.lengths) - pack.lengths
        runs = [((np.diff(own, prepend=-2) > 1) | np.isin(own, starts)).sum() for own in rows]
        assert sum(runs) == pack.num_runs
