"""Context parallelism: pairs counted from segments equal those of the mask, and every layout keeps one contract."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Segments, distribute_tokens
from motet.core.errors import UserError
from unit.balance.contract import BACKENDS, check_equal, check_structure

METHODS = ["lpt", "zigzag", "ring", "random"]


def attends(segments):
    """The mask itself, bool [num_tokens, num_tokens]: query x key, word for word as motet.balance.segments has it."""
    tokens = np.repeat(np.arange(segments.num_segments), segments.length)
    document, modality, instance, attends_to = (
        column[tokens] for column in (segments.document, segments.modality, segments.instance, segments.attends_to)
    )
    place = np.arange(len(tokens))
    itself = place[:, None] == place
    earlier = (place[:, None] > place) & ((attends_to[:, None] >> modality) & 1 == 1)
    together = (instance[:, None] == instance) & (instance > 0)
    return (document[:, None] == document) & (itself | earlier | together)


@st.composite
def tables(draw):
    """Any valid table: some instances in several runs, some text of an instance (a prefix), any bits, empty runs."""
    num_segments = draw(st.integers(0, 10))

    def column(values):
        return draw(st.lists(values, min_size=num_segments, max_size=num_segments))

    length, modality, attends_to = column(st.integers(0, 9)), column(st.integers(0, 2)), column(st.integers(0, 7))
    document = np.cumsum(column(st.sampled_from([0, 0, 0, 1, 5])))
    instance, owner = [], {}
    for row, wanted in enumerate(column(st.integers(0, min(3, num_segments)))):
        fits = owner.setdefault(wanted, (document[row], modality[row])) == (document[row], modality[row])
        instance.append(wanted if fits else 0)
    return Segments(length, document, modality, instance, attends_to)


documents = st.lists(
    st.lists(st.tuples(st.sampled_from(["text", "image", "audio"]), st.integers(0, 12)), max_size=5), max_size=4
)


def check(placed, segments, num_ranks, block):
    """The structure, and loads and bounds that are what the mask says."""
    num_tokens = segments.num_tokens
    starts = np.arange(0, num_tokens, block)
    check_structure(placed, len(starts), num_ranks)
    tokens = np.minimum(block, num_tokens - starts)
    pairs = np.add.reduceat(attends(segments).sum(axis=1), starts) if num_tokens else np.zeros(0, dtype=np.int64)
    for rank in range(num_ranks):
        mine = placed.on_rank(rank)
        assert placed.loads[rank].tolist() == [pairs[mine].sum(), tokens[mine].sum()]
    assert placed.bound.shape == (2,)
    assert placed.bound[1] * num_ranks >= num_tokens


@pytest.mark.parametrize("method", METHODS)
@given(segments=tables(), num_ranks=st.integers(1, 6), block=st.integers(1, 9))
def test_contract_and_equal_backends(method, segments, num_ranks, block):
    native, reference = (distribute_tokens(segments, num_ranks, block, method, backend=backend) for backend in BACKENDS)
    check(native, segments, num_ranks, block)
    check_equal(native, reference)


@pytest.mark.parametrize("backend", BACKENDS)
@given(segments=tables(), num_ranks=st.integers(1, 6), block=st.integers(1, 9))
def test_equal_counts(backend, segments, num_ranks, block):
    placed = distribute_tokens(segments, num_ranks, block, equal_counts=True, backend=backend)
    check(placed, segments, num_ranks, block)
    assert np.ptp(placed.counts) <= 1


@given(segments=tables(), num_ranks=st.integers(1, 6), block=st.integers(1, 9))
def test_pairs_of_tokens_are_as_good_as_segments(segments, num_ranks, block):
    placed = distribute_tokens(segments.table().pairs, num_ranks, block, equal_counts=True)
    check_equal(placed, distribute_tokens(segments, num_ranks, block, equal_counts=True))


@pytest.mark.parametrize("media", ["isolated", "bidirectional", "causal"])
@given(documents=documents)
def test_documents_become_the_mask_that_is_described(media, documents):
    segments = Segments.of_documents(documents, media=media)
    of = [
        (number, entry, kind)
        for number, rows in enumerate(documents)
        for entry, (kind, n) in enumerate(rows)
        for _ in range(n)
    ]
    mask = attends(segments)
    for query, (document, entry, kind) in enumerate(of):
        for key, (other, other_entry, _) in enumerate(of):
            causal = kind == "text" or media == "causal"
            before = key <= query if causal else other_entry < entry and media == "bidirectional"
            inside = not causal and entry == other_entry
            assert mask[query, key] == (document == other and (before or inside))
    if of:
        assert distribute_tokens(segments, 1, 4).loads.tolist() == [[mask.sum(), len(of)]]


@given(documents=documents, num_ranks=st.integers(1, 6))
def test_never_worse_than_the_paper(documents, num_ranks):
    segments = Segments.of_documents(documents)
    pairs = (
        np.add.reduceat(attends(segments).sum(axis=1), np.arange(0, segments.num_tokens, 2))
        if segments.num_tokens
        else []
    )
    loads = [0] * num_ranks
    for weight in sorted(pairs, reverse=True):
        heapq.heapreplace(loads, loads[0] + weight)
    assert distribute_tokens(segments, num_ranks, 2).loads[:, 0].max() <= max(loads)


def prepended(num_tokens, rng):
    """Cornstarch figure 11a: images, then text."""
    images = 256 * rng.integers(1, 13, num_tokens)
    images = images[: np.searchsorted(np.cumsum(images), num_tokens // 2)]
    return [[*(("image", n) for n in images), ("text", num_tokens - int(images.sum()))]]


def embedded(num_tokens, rng):
    """Cornstarch figure 11b: images among text."""
    document = []
    while num_tokens > 0:
        for kind, length in (("text", int(rng.integers(20, 400))), ("image", 256 * int(rng.integers(1, 13)))):
            document.append((kind, min(length, num_tokens)))
            num_tokens -= document[-1][1]
    return [document]


def packed(num_tokens, rng):
    """Cornstarch figure 11c: documents with images among text, of log-normal length."""
    placed = []
    while num_tokens > 0:
        length = min(num_tokens, int(np.clip(rng.lognormal(7, 1), 64, 16384)))
        placed += embedded(length, rng)
        num_tokens -= length
    return placed


def one_text(num_tokens, rng):
    return [[("text", num_tokens)]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "block"), [(one_text, 128), (prepended, 128), (packed, 128), (embedded, 64)])
@pytest.mark.parametrize("equal_counts", [False, True])
def test_64k_tokens_on_64_ranks_are_within_two_parts_in_a_thousand(kind, block, seed, equal_counts):
    segments = Segments.of_documents(kind(2**16, np.random.default_rng(seed)))
    placed = distribute_tokens(segments, 64, block, equal_counts=equal_counts)
    pairs = placed.loads[:, 0]
    assert pairs.max() <= 1.002 * pairs.mean()
    assert placed.imbalance[1] == 1 or not equal_counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_zigzag_is_even_for_one_causal_document_and_ring_is_not(backend):
    segments = Segments.of_documents(one_text(2**14, None))
    assert distribute_tokens(segments, 8, method="zigzag", backend=backend).imbalance.tolist() == [1, 1]
    ring = distribute_tokens(segments, 8, method="ring", backend=backend)
    assert ring.ranks.tolist() == np.repeat(np.arange(8), 16).tolist()
    assert ring.imbalance[0] > 1.8


def test_zigzag_pairs_the_first_chunk_with_the_last():
    segments = Segments.of_documents(one_text(12, None))
    assert distribute_tokens(segments, 3, 1, "zigzag").ranks.tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]


def test_random_is_even_in_number_and_a_function_of_its_seed():
    segments = Segments.of_documents(packed(2**16, np.random.default_rng(0)))
    first, again, other = (distribute_tokens(segments, 10, method="random", seed=seed) for seed in (0, 0, 2**64 - 1))
    check_equal(first, again)
    assert (first.ranks != other.ranks).mean() > 0.8
    assert set(first.counts.tolist()) == set(other.counts.tolist()) == {51, 52}
    assert first.ranks[:12].tolist() == [4, 6, 1, 2, 6, 3, 1, 8, 8, 3, 6, 3]


def test_two_images_and_two_documents_are_told_apart():
    # Within a plain bitfield, all images of all documents would attend to one another: 12 pairs and more.
    segments = Segments.of_documents([[("image", 2), ("image", 3)], [("image", 1)]])
    assert distribute_tokens(segments, 1).loads[0, 0] == 4 + 9 + 1


def test_frames_of_a_video_attend_to_one_another_across_the_text_between():
    segments = Segments([2, 1, 2], [0, 0, 0], [1, 0, 1], [1, 0, 1], [0, 0b11, 0])
    assert distribute_tokens(segments, 1).loads[0, 0] == 4 * 4 + 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_blocks_than_ranks_and_none(method, backend):
    for num_blocks in (0, 1, 5):
        segments = Segments.of_documents([[("text", 128 * num_blocks)]])
        placed = distribute_tokens(segments, 8, method=method, backend=backend)
        check(placed, segments, 8, 128)
        assert placed.loads[:, 1].max() == min(num_blocks, 1) * 128
        assert placed.imbalance.tolist() == [1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_near_the_end_of_64_bits(backend):
    num_tokens = 2**31 - 1
    segments = Segments([num_tokens], [0], [1], [1], [0])
    placed = distribute_tokens(segments, 3, 2**26, backend=backend)
    assert placed.loads.sum(axis=0).tolist() == [num_tokens**2, num_tokens]


def table(**change):
    columns = {"length": [2, 3], "document": [0, 0], "modality": [0, 1], "instance": [0, 1], "attends_to": [3, 0]}
    return Segments(**(columns | change))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: table(length=[2, -3]), r"length\[1\] is -3; it must be at least 0"),
        (lambda: table(length=[2, 2.5]), r"length\[1\] is 2.5; it must be a whole number"),
        (lambda: table(length=[2, 2**31]), "length adds up to 2147483650 tokens; it must be at most 2147483647"),
        (lambda: table(length=[2**63 - 1] * 2), "length adds up to 18446744073709551614 tokens"),
        (lambda: table(document=[0]), "document has 1 rows; length has 2"),
        (lambda: table(document=[1, 0]), r"document\[1\] is 0; it must be at least that of the row before"),
        (lambda: table(modality=[0, 63]), r"modality\[1\] is 63; it must be below 63"),
        (lambda: table(instance=[0, 3]), r"instance\[1\] is 3; it must be at most 2"),
        (lambda: table(instance=[1, 1]), r"instance\[1\] is 1; it must be of one document and one modality"),
        (lambda: table(instance=[0, -1]), r"instance\[1\] is -1"),
        (lambda: table(attends_to=[[1], [1]]), r"attends_to has shape \(2, 1\)"),
        (lambda: Segments.of_documents([[("video", 3)]]), r"documents\[0\] has 'video'; modalities are \('text'"),
        (lambda: Segments.of_documents([[("image", 2.5)]]), r"length\[0\] is 2.5; it must be a whole number"),
        (lambda: Segments.of_documents([], media="full"), "media is 'full'"),
        (lambda: distribute_tokens(table(), 0), "num_ranks is 0"),
        (lambda: distribute_tokens([3, -1], 2), r"segments\[1\] is -1; it must be at least 0"),
        (lambda: distribute_tokens([[3, 1]], 2), r"segments has shape \(1, 2\)"),
        (lambda: distribute_tokens(table(), 2, 0), "block is 0; it must be from 1 to 2147483647"),
        (lambda: distribute_tokens(table(), 2, seed=-1), "seed is -1; it must be from 0 to 18446744073709551615"),
        (lambda: distribute_tokens(table(), 2, method="ring", equal_counts=True), "given with method 'ring'"),
        (lambda: distribute_tokens(table(), 2, method="best"), "method is 'best'; it must be 'lpt', 'zigzag'"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        call()
    assert isinstance(raised.value, UserError)
