"""Recomputation held against every choice there is, and against the memory model."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.memory import FSDP_BF16, MEGATRON_BF16, stage_layers, stage_memory, unit_spans
from motet.planner.stages.recompute import fit_rank, least_recompute, stage_bytes

SHAPE = Transformer(256, 1024, 4, num_kv_heads=2, gated=True, norm="rms", biases=(), causal=True)
VISION = Transformer(128, 512, 4)
MODELS = {
    trainable: multimodal(
        "tiny",
        language_model(SHAPE, 4, 1000, trainable=trainable),
        [connect(vit("image", VISION, 3, trainable=trainable), 256), connect(vit("audio", VISION, 2), 256)],
    )
    for trainable in (True, False)
}


@st.composite
def modules(draw):
    """Columns of up to three modules: seconds, saved and grown bytes, alike or not."""
    number = st.integers(0, 9)
    found = {}
    for name in draw(st.permutations("abc"))[: draw(st.integers(1, 3))]:
        size = draw(st.integers(0, 4))
        alike = draw(st.booleans())
        rows = [[draw(number)] * size if alike else draw(st.lists(number, min_size=size, max_size=size)) for _ in "123"]
        found[name] = np.array(rows, dtype=np.float64).reshape(3, size)
    return found


def every_choice(found):
    for counts in product(*(range(rows.shape[1] + 1) for rows in found.values())):
        own = [rows[:, :count] for rows, count in zip(found.values(), counts)]
        seconds, saved = (sum(rows[line].sum() for rows in own) for line in (0, 1))
        yield seconds, sum(counts), saved - max(rows[2].max(initial=0) for rows in own), counts


@pytest.mark.slow
@given(modules(), st.integers(1, 60))
@settings(max_examples=400)
def test_the_least_seconds_then_the_fewest_blocks_of_every_choice_that_suffices(found, lacking):
    columns = ({name: rows[line] for name, rows in found.items()} for line in range(3))
    recompute_s, saved, grown = columns
    chosen = least_recompute(recompute_s, saved, lacking, grown)
    enough = [choice for choice in every_choice(found) if choice[2] >= lacking]
    if chosen is None:
        assert not enough
        return
    own = next(choice for choice in every_choice(found) if choice[3] == tuple(chosen.values()))
    assert own[2] >= lacking
    assert own[:2] == min(enough)[:2]


def test_nothing_is_recomputed_where_nothing_lacks():
    assert least_recompute({"a": np.ones(3)}, {"a": np.ones(3)}, 0) == {"a": 0}


@pytest.mark.parametrize("wrong", [np.array([1.0]), np.array([1.0, -1.0]), np.array([1.0, np.nan])])
def test_wrong_columns_are_named(wrong):
    with pytest.raises(ArgumentError, match="saved_bytes of 'a' must be 2"):
        least_recompute({"a": np.ones(2)}, {"a": wrong}, 1)


def test_the_cheaper_module_is_recomputed_first_where_a_block_saves_the_most():
    recompute_s = {(chunk, name): np.full(8, cost) for chunk in range(12) for name, cost in (("a", 1.0), ("b", 4.0))}
    saved = {key: np.full(8, 3.0 * (key[0] + 1)) for key in recompute_s}
    chosen = least_recompute(recompute_s, saved, 1200)
    # The largest first, and only of the cheaper module.
    assert chosen[11, "a"] == chosen[10, "a"] == 8 and not any(count for key, count in chosen.items() if key[1] == "b")


UNITS = {
    "fsdp": (Unit("all", ({"image": 3, "audio": 2, "backbone": 4},), dp=4, zero=3), FSDP_BF16),
    "pipeline": (Unit("all", ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 3}), pp=2, tp=2), MEGATRON_BF16),
}


def rows(module, layer):
    return {"image": 70.0, "audio": 31.0, "backbone": 96.0}[module] / layer.divisor


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("mode", ["none", "least", "full"])
@given(share=st.floats(0.3, 1.1), in_flight=st.integers(1, 4), copied=st.sampled_from([0.0, 70_000.5]))
@settings(max_examples=15)
def test_a_stage_is_as_full_as_the_memory_model_says_and_never_fuller_than_there_is(
    trainable, kind, mode, share, in_flight, copied
):
    model, (unit, precision) = MODELS[trainable], UNITS[kind]
    spans = unit_spans(model, unit, 0)
    recompute_s = {name: np.full(stop - first, 1.0 + len(name)) for name, (first, stop) in spans.items()}

    def copies(module, layer):
        return copied if layer.attention else 0.0

    stage = stage_bytes(model, unit, spans, rows, lambda _: 0.0, in_flight, precision, copies=copies)
    capacity = share * fit_rank([stage], [recompute_s], 1e18).peak_bytes

    def peak(recompute):
        layers = stage_layers(model, spans, recompute)
        return stage_memory(unit, layers, rows, in_flight, precision, copies=copies).peak_bytes

    fit = fit_rank([stage], [recompute_s], capacity, mode)
    (recompute,) = fit.recompute
    assert fit.peak_bytes == peak(recompute)
    assert fit.shortfall_bytes == pytest.approx(max(peak(recompute) - capacity, 0))
    if mode == "least":
        choices = [
            dict(zip(spans, counts)) for counts in product(*(range(stop - first + 1) for first, stop in spans.values()))
        ]
        enough = [choice for choice in choices if peak(choice) <= capacity]
        assert bool(enough) == (fit.shortfall_bytes == 0)
        if enough:
            added = [sum(recompute_s[name][0] * count for name, count in choice.items()) for choice in enough]
            assert sum(recompute_s[name][0] * count for name, count in recompute.items()) == min(added)


def test_chunks_of_a_rank_share_its_memory():
    model = MODELS[True]
    unit = Unit("all", ({"image": 3, "audio": 2}, {"backbone": 2}, {"backbone": 2}), pp=1)
    spans = [unit_spans(model, unit, stage) for stage in range(3)]
    stages = [
        stage_bytes(model, unit, own, rows, lambda _: 0.0, flight, MEGATRON_BF16)
        for own, flight in zip(spans, (3, 2, 1))
    ]
    recompute_s = [{name: np.ones(stop - first) for name, (first, stop) in own.items()} for own in spans]
    whole = fit_rank(stages, recompute_s, 1e18)
    assert whole.peak_bytes == sum(s.state_bytes + s.kept_bytes for s in stages) + max(
        s.sharding_bytes + s.largest_bytes for s in stages
    )
    fit = fit_rank(stages, recompute_s, whole.peak_bytes - 1)
    assert fit.shortfall_bytes == 0 and sum(sum(own.values()) for own in fit.recompute) == 1
