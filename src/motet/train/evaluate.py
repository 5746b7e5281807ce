"""Held-out loss, and the share of greedy answers that match exactly, by the record's `task`; on all ranks.

Examples are taken in chunks. The home ranks load a chunk; it is balanced and exchanged like a microbatch of training.
The encoders run once; `generate.py` then writes the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from motet.core.errors import JointUserError, UserError
from motet.core.example import Media, TokenSequence
from motet.core.limits import MAX_EXAMPLES, MAX_STEPS
from motet.core.words import counted_words
from motet.core.workload import home_ranks
from motet.data.dataset import Dataset
from motet.data.decode import Decoder, loaded_items
from motet.data.media import BadMedia
from motet.data.text import ChatTokenizer
from motet.dispatch import ItemExchange, LoadedExample, RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.dropout import heldout_keys
from motet.models.mllm import MLLM
from motet.runtime.casting import compute_types_of, computing
from motet.runtime.mesh import Mesh
from motet.runtime.step import forward_features
from motet.train.generate import generate
from motet.train.input.loading import exchanged
from motet.train.made_items import MadeItem, examples_to_make, make_items, makers
from motet.train.world import World

_NO_TASK = "all"
_MAX_NAMED = 3
"""Examples that an error names."""
_SAY_EVERY_S = 5.0


class EvaluateConfig(BaseModel):
    """`[evaluate]` of a recipe. The examples are those of `data.heldout`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    every_steps: int = Field(
        0, ge=0, le=MAX_STEPS, description="steps between evaluations; 0 evaluates at the end only"
    )
    batch_size: int = Field(32, gt=0, le=MAX_EXAMPLES, description="examples decoded at a time, over all ranks")
    max_new_tokens: int = Field(32, gt=0, le=10**6, description="longest answer, in tokens")
    max_examples: int | None = Field(None, gt=0, le=10**9, description="evaluate on the first so many; all by default")
    num_samples: int = Field(12, ge=0, le=10_000, description="answers shown in the report")
    num_made: int = Field(
        12, ge=0, le=10_000, description="held-out examples of which generators make the items, for the report"
    )


@dataclass(frozen=True)
class Answer:
    """One greedy answer. place: index of the example in the held-out dataset. media: its files, in order."""

    place: int
    task: str
    prompt: str
    answer: str
    expected: str
    media: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether the answer equals the expected one, but for spaces around it."""
        return self.answer.strip() == self.expected.strip()


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    loss:         mean over the target tokens of the held-out examples.
    exact_match:  task -> share of its answers that are exact.
    num_examples: task -> number of its examples.
    samples:      answers for the report.
    made:         what generators made of held-out prompts, for the report.
    losses_made:  generator -> mean of its loss over the rows of what the answers hold; those with nothing are left out.
    """

    loss: float
    exact_match: dict[str, float]
    num_examples: dict[str, int]
    samples: list[Answer] = field(default_factory=list)
    made: list[MadeItem] = field(default_factory=list)
    losses_made: dict[str, float] = field(default_factory=dict)


class Evaluator:
    """Evaluates a model on one held-out dataset.

    exchange: on a host group of the main thread, of `replicas`: the ranks that run different examples.
    seed:     of the noise that generators draw and are judged by: the same in each evaluation.
    report:   called once with a sentence for each example that is left out, because its files cannot be used; and
              every few seconds with how far it is.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: ChatTokenizer,
        decoder: Decoder,
        exchange: ItemExchange,
        mesh: Mesh,
        world: World,
        replicas: World,
        config: EvaluateConfig,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        self._left_out, self._report = LeftOutOfEvaluation(report), report
        self._dataset, self._tokenizer, self._decoder, self._exchange = dataset, tokenizer, decoder, exchange
        self._mesh, self._world, self._replicas, self._config, self._seed = mesh, world, replicas, config, seed

    @torch.no_grad()
    def run(self, model: MLLM, is_stopped: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Held-out loss and answers of the model; its train or eval mode is restored. A collective.

        is_stopped: called between chunks; if it is true on any rank, the evaluation ends and returns None.
        Raises UserError, on all ranks, if no held-out example can be used.
        """
        training = model.training
        model.eval()
        count = min(self._dataset.num_examples, self._config.max_examples or self._dataset.num_examples)
        totals = torch.zeros(2 + 2 * len(model.generators), dtype=torch.float64, device=self._mesh.device)
        answers: list[Answer] = []
        stopped, progress = False, EvaluationProgress(count, self._report)
        for start in range(0, count, self._config.batch_size):
            progress.at(start)
            if stopped := any(self._world.gather(is_stopped())):
                break
            loaded = self._load(np.arange(start, min(start + self._config.batch_size, count)))
            with computing(model):
                totals += self._loss(model, loaded)
                answers += self._answer(model, loaded)
        made = [] if stopped else self._make(model, count)
        model.train(training)
        if stopped:
            return None
        dist.all_reduce(totals, group=self._mesh.group)
        everywhere = [answer for of_rank in self._replicas.gather(answers) for answer in of_rank]
        evaluation = evaluation_of(
            totals, tuple(model.generators), count, everywhere, self._left_out, self._config.num_samples
        )
        return replace(evaluation, made=made)

    def _make(self, model: MLLM, count: int) -> list[MadeItem]:
        """What generators make of the first prompts, among the first `count`, that ask for anything. A collective."""
        with self._world.together():
            asked = examples_to_make(self._dataset, makers(model), count, self._config.num_made)
        made: list[MadeItem] = []
        for start in range(0, len(asked), self._config.batch_size):
            loaded = self._load(np.array(asked[start : start + self._config.batch_size]))
            batch = self._batch(model, [self._dataset.tokens(example) for example, _ in loaded], loaded)
            examples = np.array(self._of_all_ranks(loaded), dtype=np.int64)
            with computing(model):
                made += make_items(model, batch, examples, self._dataset, self._seed, self._mesh.group, self._replicas)
        return made

    def _load(self, examples: np.ndarray) -> list[tuple[int, list[Media]]]:
        """(example, its items) for the home examples of this rank whose media can be used; others are reported.

        examples: indices in the dataset, int64 [num_examples]. A collective.
        """
        with self._world.together():
            homes = home_ranks(len(examples), self._replicas.num_ranks)
            submitted = [
                (example, self._decoder.submit(refs, [self._dataset.readers_of(ref) for ref in refs]))
                for example in examples[homes == self._replicas.rank].tolist()
                for refs in (self._dataset.media_refs(example),)
            ]
            items = iter(
                loaded_items(
                    (future, partial(self._dataset.where, example))
                    for example, futures in submitted
                    for future in futures
                )
            )
            loaded = [(example, [next(items) for _ in futures]) for example, futures in submitted]
            bad = [
                (example, f"{self._dataset.where(example)}: {item}")
                for example, items in loaded
                for item in items
                if isinstance(item, BadMedia)
            ]
        # Ranks that share products have loaded the same, and one of them alone may have failed to.
        everywhere = [each for of_rank in self._world.gather(bad) for each in of_rank]
        self._left_out.say(sentence for _, sentence in everywhere)
        unusable = {example for example, _ in everywhere}
        return [(example, items) for example, items in loaded if example not in unusable]

    def _batch(
        self, model: MLLM, sequences: Sequence[TokenSequence], loaded: Sequence[tuple[int, list[Media]]]
    ) -> RankBatch:
        """What this rank computes of the examples that all ranks have loaded. A collective."""
        examples = [
            LoadedExample(sequence, tuple(items)) for sequence, (_, items) in zip(sequences, loaded, strict=True)
        ]
        batch = exchanged(self._exchange, examples).batch
        return batch.to(self._mesh.device, dtype=compute_types_of(model).compute)

    def _of_all_ranks(self, loaded: Sequence[tuple[int, list[Media]]]) -> list[int]:
        """The examples that all ranks have loaded, rank by rank, as the exchange numbers them. A collective."""
        return [example for of_rank in self._replicas.gather([example for example, _ in loaded]) for example in of_rank]

    def _loss(self, model: MLLM, loaded: Sequence[tuple[int, list[Media]]]) -> Tensor:
        """This rank's part of the totals that `evaluation_of` takes. A collective."""
        group = self._mesh.group
        batch = self._batch(model, [self._dataset.tokens(example) for example, _ in loaded], loaded)
        loss_sum, num_targets, *given = model.backbone(batch.sequences, forward_features(model, batch, group))
        totals = [float(loss_sum), num_targets]
        if model.generators:
            examples = np.array(self._of_all_ranks(loaded), dtype=np.int64)
            batch = batch.with_draws(heldout_keys(self._seed, examples))
        for name, generator in model.generators.items():
            made = 0.0, 0
            if batch.has(name):
                rows = exchange_rows(given[0][name], batch.routes[name].transpose, group)
                values, sizes = batch.media[name]
                loss = generator(values, sizes, rows, batch.draws[name], batch.item_rows[name])
                made = float(loss), int(sizes.prod(dim=1).sum())
            totals += made
        return torch.tensor(totals, dtype=torch.float64, device=self._mesh.device)

    def _answer(self, model: MLLM, loaded: Sequence[tuple[int, list[Media]]]) -> list[Answer]:
        """Answers to the examples whose sequences this rank runs; documents have none. A collective."""
        with self._world.together():
            loaded = [(example, items) for example, items in loaded if self._dataset.has_answer(example)]
        if not any(self._world.gather(bool(loaded))):
            return []
        with self._world.together():
            prompts = [prompt_of(self._dataset, example) for example, _ in loaded]
        # Media of the turns after the prompt are left out.
        prompt_media = [
            (example, media[: len(prompt.media)]) for prompt, (example, media) in zip(prompts, loaded, strict=True)
        ]
        batch = self._batch(model, prompts, prompt_media)
        examples = self._of_all_ranks(loaded)
        computed = [examples[index] for index in batch.decision.backbone.on_rank(self._replicas.rank).tolist()]
        features = forward_features(model, batch, self._mesh.group)
        answers = generate(
            model, batch.sequences, features, self._tokenizer.end_tokens, self._config.max_new_tokens, self._mesh
        )
        return [
            answer_to(self._dataset, self._tokenizer, example, tokens)
            for example, tokens in zip(computed, answers, strict=True)
        ]


def answer_to(dataset: Dataset, tokenizer: ChatTokenizer, example: int, tokens: Sequence[int]) -> Answer:
    """The Answer with the given tokens to an example of a dataset."""
    conversation, _ = dataset.conversation(example).without_last_answer()
    _, refs, expected = dataset.prompt(example)
    return Answer(
        example,
        str(dataset.record(example).get("task") or _NO_TASK),
        "\n".join(turn.text for turn in conversation.turns),
        # Marks of a place in an image may be special tokens, and stand in what is expected.
        tokenizer.decode(np.array(tokens, dtype=np.int64), special=True),
        expected,
        [ref.name for ref in refs],
    )


def prompt_of(dataset: Dataset, example: int) -> TokenSequence:
    """The tokens before the last answer of an example. Raises UserError if there are none."""
    try:
        return dataset.prompt(example)[0]
    except UserError as error:
        raise UserError(f"{dataset.where(example)}: has no prompt to answer ({error})") from None


def check_prompts(heldout: Dataset | None, config: EvaluateConfig, world: World, say: Callable[[str], None]) -> None:
    """Raise UserError, on all ranks, for a held-out example with an answer before which no prompt can be made.

    Else the first evaluation would end the run, perhaps behind its last step. Each rank makes its share of the prompts.
    say: called with a sentence if answers are longer than those that are written.
    """
    lengths = list[int]()
    with world.together():
        if heldout is not None:
            count = min(heldout.num_examples, config.max_examples or heldout.num_examples)
            for example in range(world.rank, count, world.num_ranks):
                if heldout.has_answer(example):
                    prompt_of(heldout, example)
                    lengths.append(_answer_tokens(heldout.tokens(example)))
    lengths = [length for of_rank in world.gather(lengths) for length in of_rank]
    if too_long := sum(length > config.max_new_tokens for length in lengths):
        answers, most = counted_words(len(lengths), "held-out answer"), config.max_new_tokens
        say(
            f"{too_long:,} of {answers} have more than evaluate.max_new_tokens = {most:,} tokens, up to "
            f"{max(lengths):,}: they are not written to their end, and so never match."
        )


def _answer_tokens(sequence: TokenSequence) -> int:
    """The tokens of the last answer, without the one that ends it."""
    behind = np.flatnonzero(np.diff(sequence.targets, append=False) & sequence.targets)[-1]
    before = np.flatnonzero(~sequence.targets[:behind])
    return int(behind - (before[-1] if len(before) else -1) - 1)


class EvaluationProgress:
    """Says every few seconds how far an evaluation is. say: called with a sentence.

    Example:
        >>> progress = EvaluationProgress(400, print, every_s=0.0)
        >>> progress.at(64)
        Evaluating: 64 of 400 held-out examples so far.
    """

    def __init__(self, num_examples: int, say: Callable[[str], None], every_s: float = _SAY_EVERY_S) -> None:
        self._num_examples, self._say, self._every_s = num_examples, say, every_s
        self._said_s = time.monotonic()

    def at(self, number: int) -> None:
        """Note how many examples are done."""
        now_s = time.monotonic()
        if number and now_s - self._said_s >= self._every_s:
            self._say(f"Evaluating: {number:,} of {counted_words(self._num_examples, 'held-out example')} so far.")
            self._said_s = now_s


class LeftOutOfEvaluation:
    """Held-out examples whose files cannot be used, each said once. report: called with a sentence for each."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.sentences: set[str] = set()

    def say(self, bad: Iterable[str]) -> None:
        """Report what ranks found bad, a sentence each. bad: of all ranks, on each of them."""
        for sentence in sorted(set(bad) - self.sentences):
            self.sentences.add(sentence)
            self._report(f"Left out of the evaluation: {sentence}")


def evaluation_of(
    totals: Tensor,
    generators: Sequence[str],
    num_examples: int,
    answers: Sequence[Answer],
    left_out: LeftOutOfEvaluation,
    num_samples: int,
) -> Evaluation:
    """The Evaluation of held-out examples.

    totals: over all ranks, [2 + 2 * generators]: sum of the loss and number of targets; of each generator sum of its
            loss and number of rows.
    Raises JointUserError if there are no targets; call it on all ranks.
    """
    if not totals[1]:
        raise JointUserError(
            f"None of {counted_words(num_examples, 'held-out example')} can be used, so there is no loss to tell: "
            f"{'; '.join(sorted(left_out.sentences)[:_MAX_NAMED]) or 'they have no answer'}."
        )
    in_order = sorted(answers, key=lambda answer: answer.place)
    found = _summarised(float(totals[0] / totals[1]), in_order, num_samples)
    sums = zip(generators, totals[2:].reshape(-1, 2).tolist(), strict=True)
    return replace(found, losses_made={name: loss_sum / num_rows for name, (loss_sum, num_rows) in sums if num_rows})


def _summarised(loss: float, answers: Sequence[Answer], num_samples: int) -> Evaluation:
    """The Evaluation of all answers. Samples are taken in turn from each task, so that rare tasks are seen too."""
    tasks = sorted({answer.task for answer in answers})
    by_task = {task: [answer for answer in answers if answer.task == task] for task in tasks}
    exact = {task: sum(answer.is_exact for answer in of_task) / len(of_task) for task, of_task in by_task.items()}
    turns = sorted(
        (turn, task, answer.place) for task, of_task in by_task.items() for turn, answer in enumerate(of_task)
    )
    chosen = {place for _, _, place in turns[:num_samples]}
    samples = [answer for answer in answers if answer.place in chosen]
    return Evaluation(loss, exact, {task: len(of_task) for task, of_task in by_task.items()}, samples)
