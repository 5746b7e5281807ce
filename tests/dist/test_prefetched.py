"""Batches of a loop of one's own: exact whatever ranks load; what one rank sees stops all, or is skipped on all."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from motet.core.errors import JointUserError, RankFailure, UserError
from motet.core.example import Media, Pixels, TokenSequence
from motet.core.workload import BatchLengths, ItemLengths
from motet.dispatch import LoadedExample, prefetched, take_part
from ranks import run_ranks

WIDTHS = {"image": 3, "audio": 2}
VOCABULARY, DIM = 20, 8


class Product:
    """Lengths and tokens of an item: the product of its sizes."""

    def lengths(self, sizes):
        return sizes.prod(axis=1)

    num_tokens = lengths


MEASURES = {phase: Product() for phase in WIDTHS}


class Examples(torch.utils.data.Dataset):
    """Examples drawn from a seed, for both modes; in exchange mode, those in `bad` are None. No two are alike."""

    def __init__(self, num_examples: int = 24, seed: int = 0, bad: tuple[int, ...] = (), fails: int = -1) -> None:
        self.drawn = [self.draw(np.random.default_rng([seed, number]), number) for number in range(num_examples)]
        self.bad, self.fails = bad, fails

    @staticmethod
    def draw(rng, number: int) -> LoadedExample:
        phases = tuple(map(str, rng.choice(list(WIDTHS), rng.integers(0, 4)))) if rng.random() < 0.5 else ()
        sizes = [rng.integers(1, 4, 2) if phase == "image" else rng.integers(1, 6, 1) for phase in phases]
        media = tuple(
            Media(rng.standard_normal((size.prod(), WIDTHS[phase]), np.float32), size)
            for phase, size in zip(phases, sizes)
        )
        tokens = rng.integers(0, VOCABULARY, len(phases) + int(rng.integers(2, 8)))
        tokens[-1] = number % VOCABULARY
        places = np.sort(rng.choice(len(tokens) - 1, len(phases), replace=False))
        return LoadedExample(TokenSequence(tokens, rng.random(len(tokens)) < 0.6, phases, places), media)

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, number):
        if number == self.fails:
            raise OSError(f"example {number} is torn")
        return None if number in self.bad else self.drawn[number]

    def lengths(self, numbers):
        examples = [self.drawn[number] for number in numbers]
        items = {
            phase: [
                (i, item.size.prod())
                for i, example in enumerate(examples)
                for name, item in zip(example.sequence.media, example.media)
                if name == phase
            ]
            for phase in WIDTHS
        }
        columns = {}
        for phase, pairs in items.items():
            example, rows = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            columns[phase] = ItemLengths(example, rows, rows)
        packed = [expanded(example) for example in examples]
        tokens = np.array([len(tokens) for tokens, _, _ in packed], dtype=np.int64)
        targets = np.array([targets.sum() for _, targets, _ in packed], dtype=np.int64)
        return BatchLengths(tokens, targets, np.zeros(len(examples), np.int32), columns)

    def sequence(self, number):
        if number == self.fails:
            raise OSError(f"example {number} is torn")
        return None if number in self.bad else self.drawn[number].sequence

    def media(self, number, phase, item):
        example = self.drawn[number]
        return [media for name, media in zip(example.sequence.media, example.media) if name == phase][item]


def expanded(example: LoadedExample):
    """Tokens and targets of an example, each item as many rows as it has, and the phase of each row ("" for text)."""
    tokens, targets, phases = [], [], []
    item = 0
    for place, (token, target) in enumerate(zip(example.sequence.tokens, example.sequence.targets)):
        if place in example.sequence.media_positions:
            rows = int(example.media[item].size.prod())
            tokens += [0] * rows
            targets += [False] * rows
            phases += [example.sequence.media[item]] * rows
            item += 1
        else:
            tokens.append(int(token))
            targets.append(bool(target))
            phases.append("")
    targets[0] = False
    return np.array(tokens), np.array(targets), np.array(phases)


class Mixing(nn.Module):
    """An encoder that mixes the rows of an item, so that an item that is cut or confused is seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows, self.item = nn.Linear(width, DIM), nn.Linear(width, DIM)

    def forward(self, values, sizes):
        parts = values.split(sizes.prod(1).tolist())
        return torch.cat([torch.tanh(self.rows(part)) + self.item(part.mean(0)) for part in parts])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoders = nn.ModuleDict({phase: Mixing(width) for phase, width in WIDTHS.items()})
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(2 * DIM, VOCABULARY)
        self.place = nn.Embedding(200, DIM)
        self.double()

    def forward(self, batch):
        """The loss summed over this rank's targets."""
        packed = batch.sequences
        embeds = self.embed(packed.tokens)
        for phase, encoder in self.encoders.items():
            embeds = batch.insert_features(embeds, phase, encoder)
        if packed.num_tokens == 0:
            return take_part(embeds.sum(), self.parameters())
        return self.loss(embeds + self.place(packed.position_ids), packed.labels, packed.offsets.diff().tolist())

    def loss(self, embeds, labels, lengths):
        hidden = torch.cat([torch.cat([part, part.cumsum(0)], 1) for part in embeds.split(lengths)])
        return nn.functional.cross_entropy(self.head(hidden[:-1]), labels[1:], reduction="sum")

    def loss_of(self, example: LoadedExample):
        tokens, targets, phases = expanded(example)
        embeds = self.embed(torch.from_numpy(tokens))
        for phase, encoder in self.encoders.items():
            items = [item for name, item in zip(example.sequence.media, example.media) if name == phase]
            if items:
                values = torch.from_numpy(np.concatenate([item.values for item in items])).double()
                sizes = torch.from_numpy(np.stack([item.size for item in items]))
                embeds = embeds.index_put((torch.from_numpy(np.flatnonzero(phases == phase)),), encoder(values, sizes))
        labels = torch.from_numpy(np.where(targets, tokens, -100))
        return self.loss(embeds + self.place(torch.arange(len(tokens))), labels, [len(tokens)])


def loader_of(data, rank: int, num_ranks: int, mode: str, batch_size: int = 2, num_workers: int = 0):
    sampler = DistributedSampler(data, num_ranks, rank, shuffle=False)
    loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=list, num_workers=num_workers)
    return loader, (MEASURES if mode == "exchange" else None)


def gradients_of_steps(rank: int, num_ranks: int, mode: str, seed: int, accumulate: int, means: bool):
    """Per step, the loss and the gradients that DDP leaves."""
    data = Examples(24, seed, bad=(3, 4, 5, 7, 20))
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    steps, losses = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = prefetched(
            *loader_of(data, rank, num_ranks, mode),
            accumulate=accumulate,
            dtype=torch.float64,
            steps_ahead=1 + seed % 2,
        )
        for number, batch in enumerate(batches):
            total = wrapped(batch)
            if means:
                loss = batch.scale_mean(total / batch.num_targets_of_rank)
            else:
                loss = batch.scale_sum(total)
            loss.backward()
            losses.append(loss.detach())
            if (number + 1) % accumulate == 0 or number + 1 == len(batches):
                total = torch.stack(losses).sum()
                dist.all_reduce(total)
                steps.append((total.item() / num_ranks, [p.grad.numpy().copy() for p in model.parameters()]))
                wrapped.zero_grad()
                losses = []
    return steps


@pytest.mark.parametrize(
    ("num_ranks", "mode", "seed", "accumulate", "means"),
    [
        (1, "exchange", 0, 1, False),
        (1, "index", 0, 5, True),
        (2, "exchange", 1, 2, True),
        (2, "index", 2, 1, False),
        (3, "exchange", 3, 1, False),
        (3, "index", 4, 3, True),
    ],
)
def test_gradients_are_those_of_one_process(num_ranks, mode, seed, accumulate, means):
    data, model = Examples(24, seed, bad=(3, 4, 5, 7, 20)), Model()
    results = run_ranks(gradients_of_steps, num_ranks, mode, seed, accumulate, means)
    size = 2 * num_ranks * accumulate
    expected = [range(first, min(first + size, len(data))) for first in range(0, len(data), size)]
    assert {len(steps) for steps in results} == {len(expected)}
    for step, numbers in enumerate(expected):
        examples = [data[number] for number in numbers if data[number] is not None]
        num_targets = sum(int(expanded(example)[1].sum()) for example in examples)
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        if examples:
            loss = sum(model.loss_of(example) for example in examples) / num_targets
            loss.backward()
        for steps in results:
            found, gradients = steps[step]
            assert abs(found - loss.item()) < 1e-10
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                reference = 0 if parameter.grad is None else parameter.grad.numpy()
                assert np.allclose(gradient, reference, rtol=0, atol=1e-10)


def error_of(rank: int, num_ranks: int, mode: str, kind: str):
    """How many batches came, and the error that ended the loop."""
    data = Examples(24, fails=13 if (kind == "raises" and rank == 1) or kind == "raises in a worker" else -1)
    num_workers = 1 if kind == "raises in a worker" else 0
    loader, measures = loader_of(data, rank, num_ranks, mode, num_workers=num_workers)
    if kind == "batch":
        loader = [torch.zeros(2)] if rank == 1 else [[]]
    if kind == "placeholder":
        text = TokenSequence(np.arange(3), np.ones(3, bool), ("image",), np.array([1]))
        loader = [[LoadedExample(text, ()) if rank == 1 else data[0]]]
    if kind == "phase":
        text = TokenSequence(np.arange(3), np.ones(3, bool), ("video",), np.array([1]))
        loader = [
            [LoadedExample(text, (Media(np.zeros((1, 3), np.float32), np.array([1])),)) if rank == 1 else data[0]]
        ]
    if kind == "pixels":
        # What rank 1 has loaded goes to other ranks, and its values are not those of its pixels.
        text = TokenSequence(np.arange(9), np.ones(9, bool), ("image",), np.array([0]))
        pixels = Pixels(np.float32([0]), np.float32([1]))
        item = Media(np.full((4, 3), 0.3, np.float32), np.array([2, 2]), pixels)
        loader = [[LoadedExample(text, (item,))] * 5 if rank == 1 else []]
    num_batches = 0
    try:
        for _ in prefetched(loader, measures):
            num_batches += 1
    except Exception as error:
        return num_batches, type(error), str(error)
    return num_batches, None, ""


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("exchange", "raises", "example 13 is torn"),
        ("exchange", "raises in a worker", "example 13 is torn"),
        ("index", "raises in a worker", "example 13 is torn"),
        ("exchange", "batch", "The loader gave a Tensor, and prefetched takes lists of motet.dispatch.LoadedExample"),
        ("exchange", "placeholder", "An example of the loader cannot be used: example 0 has 1 placeholders and 0"),
        ("exchange", "phase", "has an item of phase 'video', and measures are given for image, audio"),
        ("exchange", "pixels", "the values of an item are not those of its pixels"),
    ],
)
def test_an_error_of_one_rank_stops_all(mode, kind, words):
    results = run_ranks(error_of, 2, mode, kind)
    assert len({num_batches for num_batches, _, _ in results}) == 1
    assert all(words in text for _, _, text in results)
    kinds = [error for _, error, _ in results]
    if kind in ("batch", "placeholder", "phase"):
        assert kinds == [JointUserError] * 2
    else:
        assert RankFailure in kinds and kinds != [RankFailure] * 2


def numbers_of(batch) -> list[int]:
    """The last tokens of a rank's sequences, which are the numbers of the examples."""
    return batch.sequences.tokens[batch.sequences.offsets[1:].long() - 1].tolist()


def uneven(rank: int, num_ranks: int):
    """What came, where rank 1 has one batch and rank 0 three; and the sentences that were printed."""
    data = Examples(14)
    mine = [[data[0], data[1]], [data[2], None], [data[4], data[5]]] if rank == 0 else [[data[6], data[7]]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = prefetched(mine, MEASURES)
        lists = [numbers_of(batch) for batch in batches]
    return len(batches), lists, [str(each.message) for each in caught]


def test_a_rank_whose_loader_ends_early_goes_on():
    (length, first, told), (other_length, second, silent) = run_ranks(uneven, 2)
    assert length == other_length == 3
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [[0, 1, 6, 7], [2], [4, 5]]
    assert all(first[2]) and second[2], "the rank without examples computes some of the others'"
    assert told == [
        "1 example of a batch could not be loaded; all ranks leave it out.",
        "The loader of rank 1 has ended before the others'; it goes on with what they load.",
    ]
    assert silent == []


class Arrays:
    """A batch sampler of arrays, as of `np.array_split`, whose first batch is example 0 alone."""

    def __iter__(self):
        return iter(np.array_split(np.arange(24), [1, 3]))

    def __len__(self):
        return 3


def numbers_of_arrays(rank: int, num_ranks: int):
    batches = prefetched(DataLoader(Examples(), batch_sampler=Arrays(), collate_fn=list))
    return [sorted(numbers_of(batch)) for batch in batches]


def test_a_batch_sampler_may_give_arrays():
    assert run_ranks(numbers_of_arrays, 1) == [[[0], [1, 2], sorted(number % VOCABULARY for number in range(3, 24))]]


def left(rank: int, num_ranks: int, mode: str):
    """Leave a loop on all ranks, run another; then leave on rank 0 alone. Returns the last error of the others."""
    batches = prefetched(*loader_of(Examples(18), rank, num_ranks, mode, num_workers=1), steps_ahead=1)
    for _ in batches:
        break
    for thread in threading.enumerate():
        if thread.name == "prefetched":
            thread.join()
    assert len(list(batches)) == len(batches)
    for number, _ in enumerate(iterator := iter(batches)):
        if rank == 0 and number == 1:
            iterator.close()
            return ""
    return "not told"


def told_that_others_left(rank: int, num_ranks: int, mode: str) -> str:
    try:
        return left(rank, num_ranks, mode)
    except JointUserError as error:
        return str(error)


@pytest.mark.parametrize("mode", ["exchange", "index"])
def test_a_loop_may_be_left(mode):
    first, second = run_ranks(told_that_others_left, 2, mode)
    assert first == "" and second.startswith("Rank 0 has left the loop over batches and this rank has not")


class Stateful:
    """A loader as torchdata's StatefulDataLoader: it counts what it has loaded, and goes on behind it."""

    def __init__(self, loader) -> None:
        self.loader, self.num_loaded, self.first = loader, 0, 0

    def __iter__(self):
        self.num_loaded, self.first = self.first, 0
        for number, batch in enumerate(self.loader):
            if number >= self.num_loaded:
                self.num_loaded += 1
                yield batch

    def state_dict(self):
        return {"num_loaded": self.num_loaded}

    def load_state_dict(self, state):
        self.first = state["num_loaded"]


def resumed(rank: int, num_ranks: int, mode: str, is_stateful: bool):
    """The batches behind the third of an epoch; as they came, and after a restart; and those of the next epoch."""

    def batches():
        loader, measures = loader_of(Examples(20), rank, num_ranks, mode)
        return prefetched(Stateful(loader) if is_stateful else loader, measures)

    first, saved, expected = batches(), None, []
    for number, batch in enumerate(first):
        if number == 2:
            saved = first.state_dict()
        if number > 2:
            expected.append(numbers_of(batch))
    again = batches()
    again.load_state_dict(saved)
    found = [numbers_of(batch) for batch in again]
    return expected, found, len(list(again)), again.state_dict()["num_batches"], saved["num_batches"]


@pytest.mark.parametrize(("mode", "is_stateful"), [("exchange", False), ("exchange", True), ("index", False)])
def test_an_epoch_is_resumed(mode, is_stateful):
    for expected, found, num_next, num_batches, num_saved in run_ranks(resumed, 2, mode, is_stateful):
        assert found == expected and len(found) == 2
        assert (num_next, num_batches, num_saved) == (5, 0, 3)


def saved_in_steps_of_three(rank: int, num_ranks: int):
    """Of an epoch of five batches: what is said of the position behind each, and what comes behind the last."""

    def batches():
        return prefetched(loader_of(Examples(20), rank, num_ranks, "exchange")[0], MEASURES, accumulate=3)

    first, said, again = batches(), [], batches()
    for _ in first:
        try:
            again.load_state_dict(first.state_dict())
            said.append("taken")
        except UserError as error:
            said.append(str(error))
    return said, len(list(again)), len(list(again))


def test_a_position_behind_the_short_last_step_of_an_epoch_is_taken():
    for said, num_left, num_next in run_ranks(saved_in_steps_of_three, 2):
        assert [each == "taken" for each in said] == [False, False, True, False, True]
        assert said[3].startswith("The state was saved after 4 batches, inside a step of 3 microbatches")
        assert (num_left, num_next) == (0, 5)


def begun_by_number(rank: int, num_ranks: int):
    """All batches of an epoch; those from a state saved between epochs, and from one that has the number alone."""

    def numbers(state=None):
        loader, measures = loader_of(Examples(20), rank, num_ranks, "exchange")
        batches = prefetched(Stateful(loader), measures)
        if state is not None:
            batches.load_state_dict(state)
        return [numbers_of(batch) for batch in batches], batches.state_dict()

    whole, between = numbers()
    return whole, numbers(between)[0], numbers({"num_batches": 3, "loader": None})[0]


def test_a_loader_with_a_state_of_its_own_goes_on_from_a_position_without_one():
    for whole, again, behind in run_ranks(begun_by_number, 2):
        assert len(whole) == 5 and again == whole and behind == whole[3:]


def refused(rank: int, num_ranks: int):
    loader, measures = loader_of(Examples(8), rank, num_ranks, "exchange")
    texts = []
    for call in (
        lambda: prefetched(loader, measures, accumulate=1 + rank),
        lambda: prefetched([[]] if rank else loader),
        lambda: prefetched(loader, measures, accumulate=2).load_state_dict({"num_batches": 3, "loader": None}),
    ):
        try:
            call()
            texts.append("")
        except UserError as error:
            texts.append(str(error))
    return texts


def test_what_is_refused_is_refused_on_all_ranks():
    for texts in run_ranks(refused, 2):
        assert texts[0].startswith("Ranks were given different options of prefetched")
        assert texts[1].startswith("prefetched was given no measures, and the loader is no DataLoader")
        assert texts[2].startswith("The state was saved after 3 batches, inside a step of 2 microbatches")


def test_a_process_group_is_needed():
    with pytest.raises(UserError, match="there is no process group"):
        prefetched([], MEASURES)


def set_epochs(rank: int, num_ranks: int):
    data = Examples(20)
    sampler = DistributedSampler(data, num_ranks, rank, shuffle=True)
    loader = DataLoader(data, 2, sampler=sampler, collate_fn=list)
    batches, orders = prefetched(loader, MEASURES), []
    for epoch in range(2):
        batches.set_epoch(epoch)
        orders.append([numbers_of(batch) for batch in batches])
    return orders


def test_an_epoch_reaches_the_sampler():
    for first, second in run_ranks(set_epochs, 2):
        assert first != second and len(first) == len(second) == 5
