"""Held-out loss, and exact match of greedy answers by the record's `task`, with the sharded model on all ranks.

A chunk of examples is loaded by its home ranks, balanced and exchanged like a training batch. Encoders run once; then
all ranks append one token after the other in lock-step, by forward passes over the packed sequences that are not
finished yet, until no rank has any: the collectives of a sharded model must meet, whoever still has something to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from motet.core.errors import JointUserError, UserError
from motet.core.example import Media, TokenSequence
from motet.core.limits import MAX_EXAMPLES, MAX_STEPS
from motet.core.workload import home_ranks
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.media import BadMedia
from motet.data.text import ChatTokenizer
from motet.dispatch import ItemExchange, LoadedExample, PackedSequences, RankBatch
from motet.models.module import MLLM
from motet.runtime.mesh import Mesh
from motet.runtime.step import forward_features
from motet.train.input.loading import exchanged
from motet.train.world import World

_NO_TASK = "all"
_NAMED = 3
"""Examples that a sentence names, where many are left out."""


class EvaluateConfig(BaseModel):
    """`[evaluate]` of a recipe; works on `data.heldout`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    every_steps: int = Field(
        0, ge=0, le=MAX_STEPS, description="steps between evaluations; 0 evaluates at the end only"
    )
    batch_size: int = Field(32, gt=0, le=MAX_EXAMPLES, description="examples decoded at a time, over all ranks")
    max_new_tokens: int = Field(32, gt=0, le=10**6, description="longest answer, in tokens")
    max_examples: int | None = Field(None, gt=0, le=10**9, description="evaluate on the first so many; all by default")
    num_samples: int = Field(12, ge=0, le=10_000, description="answers shown in the report")


@dataclass(frozen=True)
class Answer:
    """One greedy answer. place: number of the example in the held-out manifest; media: files it refers to, in order."""

    place: int
    task: str
    prompt: str
    answer: str
    expected: str
    media: list[str]

    @property
    def is_exact(self) -> bool:
        return self.answer.strip() == self.expected.strip()


@dataclass(frozen=True)
class Evaluation:
    """loss: per target token, over the held-out examples. exact_match, num_examples: per task."""

    loss: float
    exact_match: dict[str, float]
    num_examples: dict[str, int]
    samples: list[Answer] = field(default_factory=list)


class Evaluator:
    """Evaluates one model on one held-out dataset; every method is a collective.

    exchange: over a host group that the main thread may use. report: called with what is said of each example that is
    left out, once, as its files cannot be used.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: ChatTokenizer,
        decoder: Decoder,
        exchange: ItemExchange,
        mesh: Mesh,
        world: World,
        config: EvaluateConfig,
        report: Callable[[str], None],
    ) -> None:
        self._report, self._reported = report, set[str]()
        self._dataset, self._tokenizer, self._decoder, self._exchange = dataset, tokenizer, decoder, exchange
        self._mesh, self._world, self._config = mesh, world, config

    @torch.no_grad()
    def run(self, model: MLLM, is_stopped: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Held-out loss and answers of the model as it is; a collective, which leaves the model's mode as it was.

        is_stopped: asked between chunks; None is returned where any rank says so.
        Raises UserError, on all ranks, if no held-out example can be used.
        """
        training = model.training
        model.eval()
        count = min(self._dataset.num_examples, self._config.max_examples or self._dataset.num_examples)
        totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        answers: list[Answer] = []
        stopped = False
        for start in range(0, count, self._config.batch_size):
            if stopped := any(self._world.gather(is_stopped())):
                break
            places = np.arange(start, min(start + self._config.batch_size, count))
            loaded = self._load(places)
            totals += self._loss(model, loaded)
            answers += self._answer(model, loaded)
        model.train(training)
        if stopped:
            return None
        dist.all_reduce(totals, group=self._mesh.group)
        if not totals[1]:
            raise JointUserError(
                f"None of the {count} held-out examples can be used, so there is no loss to tell: "
                f"{'; '.join(sorted(self._reported)[:_NAMED]) or 'they have no answer'}."
            )
        answers = sorted((a for told in self._world.gather(answers) for a in told), key=lambda answer: answer.place)
        return _summed(float(totals[0] / totals[1]), answers, self._config.num_samples)

    def _load(self, places: np.ndarray) -> list[tuple[int, list[Media]]]:
        """This rank's home examples whose media can be used, as (place, items). Others are left out, and named."""
        with self._world.together():
            homes = home_ranks(len(places), self._world.num_ranks)
            own = places[homes == self._world.rank].tolist()
            waiting = [(place, self._decoder.submit(self._dataset.media_refs(place))) for place in own]
            loaded = [(place, [future.result() for future in futures]) for place, futures in waiting]
            bad = [
                f"{self._dataset.where(place)}: {item}"
                for place, items in loaded
                for item in items
                if isinstance(item, BadMedia)
            ]
        for sentence in sorted({sentence for told in self._world.gather(bad) for sentence in told} - self._reported):
            self._reported.add(sentence)
            self._report(f"Left out of the evaluation: {sentence}")
        return [(place, items) for place, items in loaded if not any(isinstance(item, BadMedia) for item in items)]

    def _batch(self, sequences: Sequence[TokenSequence], loaded: Sequence[tuple[int, list[Media]]]) -> RankBatch:
        examples = [
            LoadedExample(sequence, tuple(items)) for sequence, (_, items) in zip(sequences, loaded, strict=True)
        ]
        return exchanged(self._exchange, examples, self._world.ranks_per_node).batch.to(self._mesh.device)

    def _loss(self, model: MLLM, loaded: Sequence[tuple[int, list[Media]]]) -> Tensor:
        batch = self._batch([self._dataset.tokens(place) for place, _ in loaded], loaded)
        loss_sum, num_targets = model.backbone(batch.sequences, forward_features(model, batch, self._mesh.group))
        return torch.tensor([float(loss_sum), num_targets], dtype=torch.float64, device=self._mesh.device)

    def _answer(self, model: MLLM, loaded: Sequence[tuple[int, list[Media]]]) -> list[Answer]:
        """Answers to the examples of which this rank runs the sequence."""
        with self._world.together():
            prompts = [self._prompt(place) for place, _ in loaded]
        # Media of later turns are no part of the prompt.
        asked = [(place, items[: len(prompt.media)]) for prompt, (place, items) in zip(prompts, loaded, strict=True)]
        batch = self._batch(prompts, asked)
        # Examples count by rank, as the exchange numbers them.
        slots = batch.decision.backbone.on_rank(self._world.rank).tolist()
        everyone = [place for told in self._world.gather([place for place, _ in loaded]) for place in told]
        features = forward_features(model, batch, self._mesh.group)
        written = generate(
            model, batch.sequences, features, self._tokenizer.end_token, self._config.max_new_tokens, self._mesh
        )
        return [self._describe(everyone[slot], tokens) for slot, tokens in zip(slots, written, strict=True)]

    def _prompt(self, place: int) -> TokenSequence:
        try:
            return self._dataset.prompt(place)[0]
        except UserError as error:
            raise UserError(f"{self._dataset.where(place)}: has no prompt to answer ({error})") from None

    def _describe(self, place: int, tokens: list[int]) -> Answer:
        conversation, expected = self._dataset.conversation(place).without_last_answer()
        refs = self._dataset.media_refs(place)[: len(conversation.placeholders)]
        return Answer(
            place,
            str(self._dataset.record(place).get("task") or _NO_TASK),
            "\n".join(turn.text for turn in conversation.turns),
            self._tokenizer.decode(np.array(tokens, dtype=np.int64)),
            expected,
            [ref.name for ref in refs],
        )


@torch.no_grad()
def generate(
    model: MLLM,
    prompts: PackedSequences,
    features: dict[str, Tensor],
    end_token: int | None,
    max_new_tokens: int,
    mesh: Mesh,
) -> list[list[int]]:
    """Greedy answers to this rank's prompts, without the end token; a collective, also for a rank without prompts."""
    growing = [_Growing(*pieces) for pieces in _cut(prompts, features)]
    active = list(growing)
    for _ in range(max_new_tokens):
        left = torch.tensor(len(active), device=mesh.device)
        dist.all_reduce(left, op=dist.ReduceOp.MAX, group=mesh.group)
        if not int(left):
            break
        sequences, own = _join(active, features, mesh.device)
        for sequence, token in zip(active, model.backbone.next_tokens(sequences, own).tolist(), strict=True):
            sequence.add(token, end_token)
        active = [sequence for sequence in active if not sequence.is_finished]
    return [sequence.written for sequence in growing]


class _Growing:
    """A prompt with what has been written after it. positions, rows: per phase, of its feature rows."""

    def __init__(self, tokens: Tensor, positions: dict[str, Tensor], rows: dict[str, Tensor]) -> None:
        self.tokens, self.positions, self.rows = tokens, positions, rows
        self.written: list[int] = []
        self.is_finished = False

    def add(self, token: int, end_token: int | None) -> None:
        if token == end_token:
            self.is_finished = True
            return
        self.written.append(token)
        self.tokens = torch.cat([self.tokens, self.tokens.new_tensor([token])])


def _cut(
    prompts: PackedSequences, features: dict[str, Tensor]
) -> list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """The packed prompts one by one: tokens, places of feature rows, and the rows."""
    offsets = prompts.offsets.tolist()
    ends = {
        name: torch.searchsorted(at.cpu(), prompts.offsets.long()).tolist()
        for name, at in prompts.feature_positions.items()
    }
    pieces = []
    for i, (start, end) in enumerate(pairwise(offsets)):
        span = {name: slice(ends[name][i], ends[name][i + 1]) for name in features}
        positions = {name: prompts.feature_positions[name][span[name]] - start for name in features}
        pieces.append((prompts.tokens[start:end], positions, {name: features[name][span[name]] for name in features}))
    return pieces


def _join(
    active: Sequence[_Growing], features: dict[str, Tensor], device: torch.device
) -> tuple[PackedSequences, dict[str, Tensor]]:
    offsets = np.concatenate([[0], np.cumsum([len(sequence.tokens) for sequence in active])]).astype(np.int32)
    starts = offsets[:-1].tolist()
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    tokens = torch.cat([nothing, *(sequence.tokens for sequence in active)])
    positions = {
        name: torch.cat([nothing, *(s.positions[name] + start for s, start in zip(active, starts))])
        for name in features
    }
    rows = {name: torch.cat([features[name][:0], *(s.rows[name] for s in active)]) for name in features}
    targets = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    return PackedSequences(tokens, targets, torch.from_numpy(offsets), positions), rows


def _summed(loss: float, answers: Sequence[Answer], num_samples: int) -> Evaluation:
    tasks = sorted({answer.task for answer in answers})
    by_task = {task: [answer for answer in answers if answer.task == task] for task in tasks}
    exact = {task: sum(answer.is_exact for answer in given) / len(given) for task, given in by_task.items()}
    # In turn from each task, so that rare ones are seen too.
    turns = sorted((rank, task, answer.place) for task, given in by_task.items() for rank, answer in enumerate(given))
    chosen = {place for _, _, place in turns[:num_samples]}
    samples = [answer for answer in answers if answer.place in chosen]
    return Evaluation(loss, exact, {task: len(given) for task, given in by_task.items()}, samples)
