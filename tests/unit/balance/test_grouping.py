"""Groups of samples: none lost, none above a cap but a single sample, full ones near a cap, the same from both."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import (
    GroupCaps,
    dist_ratio,
    group,
    group_phases,
    pad_ratio,
    suggest_caps,
    suggest_phase_caps,
)
from unit.balance.contract import BACKENDS

samples = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 900)), max_size=80)


def check_groups(groups, vision, text, caps):
    assert sorted(groups.items.tolist()) == list(range(len(vision)))
    assert {groups.items.dtype, groups.offsets.dtype, groups.oversized.dtype} == {np.dtype(np.int64)}
    totals = np.stack([groups.totals(vision), groups.totals(text)], axis=1).tolist()
    above = [
        sample for sample in range(len(vision)) if vision[sample] > caps.max_vision or text[sample] > caps.max_text
    ]
    assert sorted(groups.oversized.tolist()) == above
    for number, (num_vision, num_text) in enumerate(totals):
        members = groups.samples_of(number).tolist()
        assert len(members) >= 1
        if members[0] in above:
            assert len(members) == 1
            assert groups.num_full <= number < groups.num_full + len(above)
            continue
        assert num_vision <= caps.max_vision
        assert num_text <= caps.max_text
        is_full = num_vision >= caps.min_vision or num_text >= caps.min_text
        assert is_full == (number < groups.num_full)
        assert is_full == (number not in groups.leftover)


@given(samples=samples, seed=st.integers(0, 2**64 - 1), num_iterations=st.integers(1, 6))
def test_contract_and_equal_backends(samples, seed, num_iterations):
    vision, text = np.array(samples, dtype=np.int64).reshape(-1, 2).T.copy()
    vision[:1], text[:1] = 0, 0  # one sample that meets any caps
    caps = GroupCaps(9, 700, 8, 500)
    groups, reference = (
        group(
            vision,
            text,
            caps.max_vision,
            caps.max_text,
            min_vision=caps.min_vision,
            min_text=caps.min_text,
            num_iterations=num_iterations,
            seed=seed,
            backend=backend,
        )
        for backend in BACKENDS
    )
    check_groups(groups, vision, text, caps)
    for field in ("items", "offsets", "oversized"):
        np.testing.assert_array_equal(getattr(groups, field), getattr(reference, field))
    assert groups.num_full == reference.num_full


@given(
    samples=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(1, 90)), min_size=1, max_size=60),
    caps=st.lists(st.integers(20, 60), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_groups_of_any_phases_are_under_the_cap_of_each(samples, caps, seed):
    names = ["image", "audio", "backbone"][-len(caps) :]
    sizes = {name: column.copy() for name, column in zip(["image", "audio", "backbone"], np.array(samples).T)}
    limits = dict(zip(names, caps))
    for name in names:
        sizes[name][0] = 1  # one sample that meets all caps
    groups = group_phases(sizes, limits, seed=seed)
    above = np.any([sizes[name] > cap for name, cap in limits.items()], axis=0)
    assert sorted(groups.items.tolist()) == list(range(len(samples)))
    assert groups.oversized.tolist() == np.flatnonzero(above).tolist()
    for number in range(groups.num_groups):
        members = groups.samples_of(number)
        assert len(members) == 1 if above[members].any() else len(members) >= 1
        assert above[members].any() or all(sizes[name][members].sum() <= cap for name, cap in limits.items())


def test_a_phase_that_no_sample_has_changes_no_group():
    vision, text = epoch(400)
    two = group_phases({"image": vision, "backbone": text}, {"image": 9, "backbone": 4096}, seed=3)
    silent = {"image": vision, "audio": np.zeros_like(vision), "backbone": text}
    # An audio cap of 10 is full from 10, which no group reaches.
    three = group_phases(silent, {"image": 9, "audio": 10, "backbone": 4096}, seed=3)
    assert two.items.tolist() == three.items.tolist() and two.num_full == three.num_full


def test_variable_lengths_make_full_groups():
    """Where lengths never meet an encoder's cap exactly, groups next to it are full."""
    rng = np.random.default_rng(0)
    sizes = {"image": rng.integers(60, 900, 4000), "backbone": rng.integers(10, 400, 4000)}
    groups = group_phases(sizes, {"image": 4096, "backbone": 8192})
    assert groups.num_full > 0.9 * groups.num_groups
    assert groups.totals(sizes["image"])[: groups.num_full].min() >= 4096 - 4096 // 32


def test_caps_of_phases_are_those_of_each_encoder_with_the_backbone():
    vision, text = epoch()
    sizes = {"image": vision, "audio": 7 * vision, "backbone": text}
    caps, pair = suggest_phase_caps(sizes), suggest_caps(vision, text)
    assert (caps["image"], caps["backbone"]) == (pair.max_vision, pair.max_text)
    assert caps["audio"] == suggest_caps(7 * vision, text).max_vision
    assert suggest_phase_caps({"image": [0, 0], "backbone": [5, 5]})["image"] == 1


def epoch(num_samples=20_000):
    """As InternVL's: tiles of 256 tokens, and some text to each."""
    rng = np.random.default_rng(0)
    vision = rng.choice([0, 1, 3, 5], num_samples, p=[0.2, 0.2, 0.3, 0.3])
    return vision, np.clip(rng.lognormal(5, 0.8, num_samples), 16, 3000).astype(np.int64) + 256 * vision


def test_more_passes_leave_less_over():
    vision, text = epoch()
    left = [len(group(vision, text, 9, 4096, num_iterations=count).leftover) for count in (1, 5, 20)]
    assert left[0] > left[1] > left[2]


def test_full_groups_are_evenly_sized():
    vision, text = epoch()
    groups = group(vision, text, 9, 4096)
    full = slice(0, groups.num_full // 16 * 16)
    at_random = np.random.default_rng(0).permutation(len(vision))[: len(vision) // 64 * 64]
    for sizes in (vision, text):
        ours = dist_ratio(groups.totals(sizes)[full].reshape(-1, 16))
        assert ours < dist_ratio(sizes[at_random].reshape(-1, 16, 4).sum(axis=2)) / 1.5


def test_seeds_shuffle_differently_but_each_the_same():
    vision, text = epoch(500)
    first, again, other = (group(vision, text, 9, 4096, seed=seed).items.tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_epochs(backend):
    assert group([], [], 1, 1, backend=backend).num_groups == 0
    alone = group([3, 0], [9, 2], 1, 5, min_text=2, backend=backend)
    assert (alone.num_full, alone.oversized.tolist(), list(alone.leftover)) == (1, [0], [])
    huge = group([2**62, 2**62, 2**62], [0, 0, 0], 2**63 - 1, 0, min_vision=2**63 - 1, backend=backend)
    assert huge.totals(np.ones(3, dtype=np.int64)).max() <= 3
    assert group([0, 0], [0, 0], 0, 0, backend=backend).num_full == 1


def test_caps_follow_the_data():
    assert suggest_caps([1, 2, 0], [1000, 2000, 1000], batch_size=1) == GroupCaps(2, 2000, 2, 1872)
    assert suggest_caps([1, 2, 0], [1000, 2000, 1000], batch_size=6) == GroupCaps(6, 8000, 6, 7872)
    # 4,096 tokens go with 8 images where there is one for 512 tokens; no sample is oversized.
    assert suggest_caps([1] * 9 + [0], [100] * 9 + [4096]).max_vision == 7
    vision, text = epoch()
    caps = suggest_caps(vision, text)
    assert len(group(vision, text, caps.max_vision, caps.max_text).oversized) == 0


def test_ratios_are_equations_1_and_2():
    # ((10 - 5) + 0) / 20 and (0 + 0 + (6 - 3)) / 18, on average; then ((9 - 3) + 0) / 18.
    assert pad_ratio([5, 10, 6, 6, 3], [0, 2, 5]) == pytest.approx((5 / 20 + 3 / 18) / 2)
    assert dist_ratio([[3, 9], [4, 4]]) == pytest.approx((6 / 18 + 0) / 2)
    assert pad_ratio([], [0]) == dist_ratio(np.zeros((0, 4), dtype=np.int64)) == dist_ratio([[0, 0]]) == 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: group([1], [1, 2], 1, 1), r"text has shape \(2,\)"),
        (lambda: group([3, 5], [1, 1], 2, 9), "max_vision is 2; no sample meets it, the smallest has 3"),
        (lambda: group([3, 5], [7, 9], 5, 6), "max_text is 6; no sample meets it, the smallest has 7"),
        (lambda: group([3, 5], [9, 7], 3, 7), "max_vision is 3 and max_text is 7; no sample meets both"),
        (lambda: group([1], [1], -1, 1), "max_vision is -1"),
        (lambda: group([1], [1], 2, 9, min_vision=3), "min_vision is 3; it must be in 0 .. max_vision, which is 2"),
        (lambda: group([1], [1], 2, 9, min_text=-1), "min_text is -1"),
        (lambda: group([1], [1], 2, 9, num_iterations=0), "num_iterations is 0"),
        (lambda: group([1], [1], 2, 9, seed=-1), "seed is -1"),
        (lambda: group([-1], [1], 2, 9), r"vision\[0\] is -1"),
        (lambda: group_phases({"image": [1]}, {"audio": 1}), "caps are of audio; they must be of image"),
        (lambda: group_phases({"image": [1]}, {}), "caps are of no phase; they must be of image"),
        (lambda: group_phases({"image": [1], "audio": [1, 2]}, {"image": 1, "audio": 1}), "all must be equal"),
        (lambda: group_phases({key: [4] for key in "abc"}, {"a": 5, "b": 3, "c": 9}), "b is 3; no sample meets it"),
        (lambda: suggest_caps([], []), "at least 1"),
        (lambda: suggest_caps([1], [1], batch_size=0), "batch_size is 0"),
        (lambda: pad_ratio([1, 2], [0, 1]), "offsets must grow from 0 to 2"),
        (lambda: pad_ratio([1, 2], [0, 0, 2]), "offsets must grow"),
    ],
)
def test_wrong_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
