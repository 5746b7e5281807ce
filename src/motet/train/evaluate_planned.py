"""Held-out loss and greedy answers under a Plan with stages, by the forward passes of its Program.

Examples are taken in chunks, each at most a batch of the Plan. Examples that fill a batch up are left out, as those
with bad files are.
Each new token is a forward pass over the prompts with the answers so far, the encoders included: nothing is kept
between passes, so that ranks need no other state than in training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.plan import Plan
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.examples import Examples
from motet.data.media import BadMedia, MediaRef
from motet.data.order import StepExamples
from motet.data.text import ChatTokenizer
from motet.dispatch import PackedSequences, RankBatch
from motet.dropout import heldout_keys
from motet.models.backbone import Backbone
from motet.models.generator import GeneratorModule
from motet.models.mllm import MLLM
from motet.runtime.planned_step import PlannedStep
from motet.schedule.program import Kind
from motet.train.evaluate import (
    Answer,
    EvaluateConfig,
    Evaluation,
    EvaluationProgress,
    LeftOutOfEvaluation,
    answer_to,
    evaluation_of,
    prompt_of,
)
from motet.train.input.loading import Decodes
from motet.train.input.planned import PlannedLoading, StageNeeds, StepDecider
from motet.train.made_items import MadeItem, examples_to_make, makers, named_items, of_all_ranks
from motet.train.world import World


class PlannedEvaluator:
    """As `Evaluator`, for ranks that hold different parts of the model. step: of training, whose lanes it uses."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: ChatTokenizer,
        decoder: Decoder,
        plan: Plan,
        needs: StageNeeds,
        step: PlannedStep,
        world: World,
        config: EvaluateConfig,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        self._left_out, self._report = LeftOutOfEvaluation(report), report
        self._dataset, self._tokenizer, self._decoder = dataset, tokenizer, decoder
        self._plan, self._needs, self._step, self._world, self._config = plan, needs, step, world, config
        self._decide, self._seed = StepDecider(step.place, plan, own_fills=True), seed

    @torch.no_grad()
    def run(self, model: MLLM, is_stopped: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """As `Evaluator.run`. A collective."""
        training = model.training
        model.eval()
        count = min(self._dataset.num_examples, self._config.max_examples or self._dataset.num_examples)
        generators = tuple(self._step.weights)
        totals, answers, stopped = torch.zeros(2 + 2 * len(generators), dtype=torch.float64), list[Answer](), False
        size = min(self._config.batch_size, self._plan.batch_size)
        progress = EvaluationProgress(count, self._report)
        for start in range(0, count, size):
            progress.at(start)
            if stopped := any(self._world.gather(is_stopped())):
                break
            chunk = np.arange(start, min(start + size, count))
            batches, kept = self._loaded(self._dataset, _DecodedOnce(self._decoder), chunk)
            loss_sum, num_targets, *loss_sums = self._step.evaluate(batches).tolist()
            rows = [sum(int(batch.lengths.items[name].length.sum()) for batch in batches) for name in generators]
            of_generators = chain(*zip(loss_sums, rows, strict=True))
            totals += torch.tensor([loss_sum, num_targets, *of_generators], dtype=torch.float64)
            answers += self._answers(model, np.sort(np.concatenate(kept)))
        made = [] if stopped else self._make(model, count, size)
        model.train(training)
        if stopped:
            return None
        evaluation = evaluation_of(totals, generators, count, answers, self._left_out, self._config.num_samples)
        return replace(evaluation, made=made)

    def _make(self, model: MLLM, count: int, size: int) -> list[MadeItem]:
        """As `Evaluator._make`, `size` prompts at a time. A collective."""
        names = sorted({name for of_rank in self._world.gather(makers(model)) for name in of_rank})
        with self._world.together():
            asked = np.array(examples_to_make(self._dataset, names, count, self._config.num_made), dtype=np.int64)
        made = list[MadeItem]()
        for start in range(0, len(asked), size):
            once = _DecodedOnce(self._decoder)
            batches, examples = self._loaded(self._dataset, once, asked[start : start + size])
            samplers = {name: _Sampling(model.generators[name]) for name in makers(model)}
            self._sample(model, batches, samplers)
            for name, sampler in samplers.items():
                if self._step.place.t:
                    continue  # All ranks that share its products have made the same.
                for batch, ids in zip(batches, examples, strict=True):
                    assert batch.draws is not None, "generators draw"
                    if (values := sampler.made.get(batch.draws[name].tobytes())) is not None:
                        made += named_items(self._dataset, batch, ids, name, self._needs.replicas[name], values)
        return of_all_ranks(made, self._world)

    def _sample(self, model: MLLM, batches: Sequence[RankBatch], samplers: Mapping[str, _Sampling]) -> None:
        """Let generators make their items. A collective.

        Of one that is cut over stages, each pass through these is a pass of the Program, of the generator alone after
        the first. What the last stage predicts goes to the first one through all ranks: no lane joins the two.
        """
        silent = {name: _Silent(self._step.spec.module(name)) for name in model.generators}
        parts = SimpleNamespace(encoders=model.encoders, backbone=model.backbone, generators=silent | dict(samplers))
        passes: dict[str, int] = {}
        for of_rank in self._world.gather({name: each.num_passes for name, each in samplers.items()}):
            passes |= {name: number for name, number in of_rank.items() if self._is_cut(name)}
        self._step.evaluate(batches, parts)
        for number in range(max(passes.values(), default=0)):
            own = {name: each.take_predicted() for name, each in samplers.items() if not self._step.place.t}
            for of_rank in self._world.gather(own):
                for name, predicted in of_rank.items():
                    if name in samplers:
                        samplers[name].arrived |= predicted
            self._step.evaluate(batches, parts, {name for name, most in passes.items() if number < most})

    def _is_cut(self, generator: str) -> bool:
        """Whether several stages have blocks of a generator."""
        return sum(generator in stage for stage in self._plan.unit_of(generator).stages) > 1

    def _loaded(
        self, dataset: Examples, decoder: Decodes, examples: Int64Array
    ) -> tuple[list[RankBatch], list[Int64Array]]:
        """The microbatches of some examples, and the examples of each, without those that are bad. A collective.

        dataset, decoder: where the examples and their media are from. examples: int64 [n], at most a batch of the Plan.
        """
        loading, size = PlannedLoading(self._decide, dataset, decoder, self._needs), self._plan.batch_size
        ids = np.concatenate([examples, np.full(size - len(examples), examples[-1])])
        with self._world.together():
            dealt = loading.deal(StepExamples(ids), 0).microbatches
            pending = [loading.start(each) for each in dealt]
            bad = [each.bad() for each in pending]
        everywhere = self._world.gather(bad)
        self._left_out.say(str(example) for of_rank in everywhere for each in of_rank for example in each)
        batches, ids_kept = [], []
        with self._world.together():
            for number, (part, waiting) in enumerate(zip(dealt, pending, strict=True)):
                assert part.decided is not None, "a Plan decides before loading"
                kept: BoolArray = part.decided.examples < len(examples)
                for of_rank in everywhere:
                    kept[[example.index for example in of_rank[number]]] = False
                batch, ids_here = loading.finish(waiting, kept).batch, part.ids[kept]
                if self._step.weights:
                    batch = batch.with_draws(heldout_keys(self._seed, ids_here), self._needs.replicas)
                batches.append(batch.to(self._world.device))
                ids_kept.append(ids_here)
        return batches, ids_kept

    def _answers(self, model: MLLM, examples: Int64Array) -> list[Answer]:
        """Greedy answers to some examples, the same on all ranks; documents have none. A collective."""
        with self._world.together():
            examples = examples[[self._dataset.has_answer(example) for example in examples.tolist()]]
        if not len(examples):
            return []
        with self._world.together():
            growing = GrowingPrompts(self._dataset, examples)
        media, active = _DecodedOnce(self._decoder), examples
        for _ in range(self._config.max_new_tokens):
            if not len(active):
                break
            tokens = self._next_tokens(model, growing, media, active)
            is_ended = np.array([tokens[example] in self._tokenizer.end_tokens for example in active.tolist()])
            active = active[~is_ended]
            for example in active.tolist():
                growing.add(example, tokens[example])
        with self._world.together():
            return [
                answer_to(self._dataset, self._tokenizer, example, growing.answers[example])
                for example in examples.tolist()
            ]

    def _next_tokens(
        self, model: MLLM, growing: GrowingPrompts, media: _DecodedOnce, active: Int64Array
    ) -> dict[int, int]:
        """Example -> its likeliest next token, of all ranks. A collective."""
        batches, examples = self._loaded(growing, media, active)
        predicting = _Predicting(model.backbone)
        silent = {name: _Silent(self._step.spec.module(name)) for name in model.generators}
        self._step.evaluate(batches, SimpleNamespace(encoders=model.encoders, backbone=predicting, generators=silent))
        own: dict[int, int] = {}
        for microbatch, tokens in zip(self._predicted_microbatches(batches), predicting.found, strict=True):
            sequences = batches[microbatch].decision.sequences_on(self._needs.replicas[BACKBONE])
            if (context := batches[microbatch].sequences.context) is not None:
                sequences = sequences[context.ended]
            own |= dict(zip(examples[microbatch][sequences].tolist(), tokens.tolist(), strict=True))
        return {example: token for of_rank in self._world.gather(own) for example, token in of_rank.items()}

    def _predicted_microbatches(self, batches: Sequence[RankBatch]) -> list[int]:
        """The microbatches behind whose last block this rank is, in the order of its row; those with sequences."""
        return [number for number in self._passed(BACKBONE) if int(batches[number].sequences.offsets[-1])]

    def _passed(self, module: str) -> list[int]:
        """The microbatches whose passes through the last block of a module this rank has, in the order of its row."""
        place, num_blocks = self._step.place.forward, self._plan.model.num_blocks[module]
        last = {number for number, stage in place.stages.items() if stage.layers.get(module, (0, 0))[1] == num_blocks}
        return [action.microbatch for action in place.row.row if action.kind is Kind.F and action.stage in last]


class _Predicting:
    """A backbone that takes the likeliest next tokens in place of the loss. found: of each pass, int64 [num_sequences].

    backbone: this rank's part; None if it holds nothing of it.
    """

    def __init__(self, backbone: Backbone | None) -> None:
        self._backbone, self.found = backbone, list[Tensor]()
        self.row_parts = None if backbone is None else backbone.row_parts

    def enter(self, sequences: PackedSequences, features: dict[str, Tensor]) -> Tensor:
        """As `Backbone.enter`."""
        return self._backbone.enter(sequences, features)

    def router_loss(self, sequences: PackedSequences, gradient: float | None = None) -> None:
        """None, as no loss is taken."""

    def through(
        self,
        hidden: Tensor,
        sequences: PackedSequences,
        first: int,
        stop: int,
        features: dict[str, Tensor],
        router_loss: None = None,
    ) -> Tensor:
        """As `Backbone.through`."""
        return self._backbone.through(hidden, sequences, first, stop, features)

    def condition(self, name: str, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """As `Backbone.condition`."""
        return self._backbone.condition(name, hidden, sequences)

    def leave(self, hidden: Tensor, sequences: PackedSequences) -> tuple[Tensor, int]:
        """Find the next tokens. Returns no loss, of no target."""
        self.found.append(self._backbone.likeliest(hidden, sequences))
        return hidden.new_zeros(()), 0


class _Silent:
    """In place of a generator, whose items of earlier turns are in prompts: no loss is asked for. Stages of one that is
    cut send zeros, as many as they would.
    """

    def __init__(self, module: Module) -> None:
        """module: the generator in the spec of the model."""
        self._module = module

    def __call__(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """No loss."""
        return rows.new_zeros(())

    def enter(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """As `GeneratorModule.enter`."""
        lengths, width = sizes.prod(dim=1).numpy(), self._module.sent(1).output_width
        return rows.new_zeros(self._module.num_carried(1, lengths, counts), width)

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array, first: int, stop: int) -> Tensor:
        """As `GeneratorModule.through`."""
        return hidden

    def leave(self, hidden: Tensor, values: Tensor, sizes: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """No loss."""
        return hidden.new_zeros(())


class _Sampling:
    """A generator that makes its items in place of their loss. Of a pass, items are known by the bytes of their keys.

    made:    what has been made, [num_rows, row_dim].
    arrived: what the last stage has predicted in the pass before, [num_rows, row_dim on it].
    """

    def __init__(self, generator: GeneratorModule) -> None:
        self._generator = generator
        self.made: dict[bytes, Tensor] = {}
        self.arrived: dict[bytes, Tensor] = {}
        self._predicted: dict[bytes, Tensor] = {}
        self._running: dict[bytes, Generator[Tensor, Tensor, Tensor]] = {}
        self._entered: dict[bytes, Tensor] = {}

    @property
    def num_passes(self) -> int:
        """Passes of the Program behind the first one, if it is cut; 0 if it cannot be."""
        return 0 if self._generator.uncuttable else self._generator.num_passes

    def take_predicted(self) -> dict[bytes, Tensor]:
        """What the last pass has predicted here, on the host."""
        predicted, self._predicted = self._predicted, {}
        return {key: each.cpu() for key, each in predicted.items()}

    def __call__(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """Make the items of a pass, of a generator that is whole here. Returns no loss."""
        if len(sizes):
            self.made[keys.tobytes()] = self._generator.sample(sizes, rows, keys, counts=counts)
        return rows.new_zeros(())

    def enter(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """As `GeneratorModule.enter`, of what is sampled. rows: of the first pass; others go on from `arrived`."""
        key = keys.tobytes()
        if key not in self._entered:
            self._running[key] = self._generator.sample_in_stages(sizes, rows, keys, counts)
            self._entered[key] = next(self._running[key])
        elif key in self.arrived:
            try:
                self._entered[key] = self._running[key].send(self.arrived.pop(key).to(self._entered[key].device))
            except StopIteration as ended:
                self.made[key] = ended.value
        return self._entered[key]

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array, first: int, stop: int) -> Tensor:
        """As `GeneratorModule.through`."""
        return self._generator.through(hidden, sizes, counts, first, stop)

    def leave(self, hidden: Tensor, values: Tensor, sizes: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """Predict. Returns no loss."""
        self._predicted[keys.tobytes()] = self._generator.predicted(hidden, sizes, counts)
        return hidden.new_zeros(())


class _DecodedOnce:
    """A decoder that keeps what it has decoded: for each new token, and for examples that only fill up a batch."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._futures: dict[tuple[MediaRef, tuple[str, ...]], list[Future[Media | BadMedia]]] = {}

    def submit(self, refs: Sequence[MediaRef], readers: Sequence[Sequence[str]]) -> list[Future[Media | BadMedia]]:
        """As `Decoder.submit`."""
        keys = [(ref, tuple(names)) for ref, names in zip(refs, readers, strict=True)]
        new = [key for key in dict.fromkeys(keys) if key not in self._futures]
        submitted = iter(self._decoder.submit([ref for ref, _ in new], [names for _, names in new]))
        self._futures |= {(ref, names): [next(submitted) for _ in names] for ref, names in new}
        return [future for key in keys for future in self._futures[key]]


class GrowingPrompts:
    """Examples of a dataset as their prompts with the answers so far, in the form in which a dataset is loaded from.

    answers: example -> the tokens of its answer so far. Raises UserError for an example without a prompt.
    """

    def __init__(self, dataset: Dataset, examples: Int64Array) -> None:
        self._dataset = dataset
        self._prompts = {example: prompt_of(dataset, example) for example in examples.tolist()}
        self.answers: dict[int, list[int]] = {example: [] for example in self._prompts}

    def add(self, example: int, token: int) -> None:
        """Append a token to an answer."""
        self.answers[example].append(token)

    def tokens(self, example_id: int) -> TokenSequence:
        """The prompt and the answer so far, whose tokens are targets, as they are in training."""
        prompt, answer = self._prompts[example_id], np.array(self.answers[example_id], dtype=np.int64)
        tokens = np.concatenate([prompt.tokens, answer])
        is_answer = np.arange(len(tokens)) >= len(prompt.tokens)
        return replace(prompt, tokens=tokens, targets=is_answer)

    def batch_lengths(self, example_ids: Int64Array, num_ranks: int) -> BatchLengths:
        """As `Dataset.batch_lengths`."""
        whole, sequence = self._dataset.batch_lengths(example_ids, num_ranks), np.zeros(len(example_ids), np.int64)
        num_targets = np.array([len(self.answers[example]) for example in example_ids.tolist()], dtype=np.int64)
        items = {}
        for phase, columns in whole.items.items():
            in_prompt = self._in_prompt(example_ids, phase, columns)
            segments = None if columns.segments is None else columns.segments.take(in_prompt)
            kept = columns.example[in_prompt], columns.length[in_prompt], columns.num_tokens[in_prompt]
            items[phase] = ItemLengths(*kept, segments)
            if self._dataset.takes_rows(phase):
                np.add.at(sequence, items[phase].example, items[phase].num_tokens)
        for index, example in enumerate(example_ids.tolist()):
            prompt = self._prompts[example]
            num_placeholders = len(set(prompt.media_positions.tolist()))  # Rows that are added share one.
            sequence[index] += len(prompt.tokens) - num_placeholders
        return replace(whole, sequence=sequence + num_targets, num_targets=num_targets, items=items)

    def item_sizes(self, example_ids: Int64Array) -> dict[str, Int64Array]:
        """As `Dataset.item_sizes`."""
        columns = self._dataset.batch_lengths(example_ids, 1).items
        sizes = self._dataset.item_sizes(example_ids)
        return {phase: each[self._in_prompt(example_ids, phase, columns[phase])] for phase, each in sizes.items()}

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """The files of the example's items, of which those of the prompt are the first."""
        return self._dataset.media_refs(example_id)

    def readers_of(self, ref: MediaRef) -> tuple[str, ...]:
        """As `Dataset.readers_of`."""
        return self._dataset.readers_of(ref)

    def where(self, example_id: int) -> str:
        """As `Dataset.where`."""
        return self._dataset.where(example_id)

    def _in_prompt(self, example_ids: Int64Array, phase: str, items: ItemLengths) -> Int64Array:
        """The items of a phase that stand in the prompts, int64 [n]: the first ones of each example."""
        counts = np.array([self._prompts[example].media.count(phase) for example in example_ids.tolist()])
        number = np.arange(items.num_items) - np.searchsorted(items.example, items.example)
        return np.flatnonzero(number < counts[items.example]) if items.num_items else np.zeros(0, np.int64)
