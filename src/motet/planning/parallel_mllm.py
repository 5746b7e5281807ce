"""The part of a model that a rank holds under a Plan, in a loop of the user's own: steps, checkpoints, weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motet.assign.whole_step import DecidedMicrobatch
from motet.core.errors import JointUserError, UserError
from motet.core.plan import Plan
from motet.core.words import counted_words
from motet.core.workload import BatchLengths
from motet.dispatch import LoadedExample, RankBatch
from motet.dispatch.loaded import LoadedTables, Measure, tables_of
from motet.dropout import drops_out, example_keys, step_seed
from motet.models.export import export_hf
from motet.models.mllm import MLLM
from motet.planning.own_calls import OwnCalls
from motet.runtime.mesh import build_mesh
from motet.runtime.place import Place
from motet.runtime.step import StepResult
from motet.train.changing_buffers import Buffers
from motet.train.checkpoint.choice import choose_checkpoint
from motet.train.checkpoint.contents import Progress, is_checkpoint, name_of
from motet.train.checkpoint.options import options_of, over_ranks, restore_options
from motet.train.checkpoint.restoring import load
from motet.train.checkpoint.saving import CheckpointConfig, Checkpointer
from motet.train.export import gathered_weights
from motet.train.input.planned import StageNeeds, StepDecider, stages_of_examples
from motet.train.optimizers import OPTIMIZERS, name_of_optimizer
from motet.train.planned_job import PartConfig, build_part
from motet.train.run_folder import writing
from motet.train.world import World

_NUM_SAMPLED = 4096
"""The most values of an item by which ranks compare it."""


class ParallelMLLM:
    """The part of a model that this rank holds under a Plan, and the steps that it takes; made by `apply`.

    plan:      the Plan.
    model:     this rank's part; every parameter has its name in the whole model.
    optimizer: of this rank's trainable parameters. Its learning rate may be changed between steps, on all ranks alike.
    num_steps: steps taken so far, those before a checkpoint that was loaded included.

    Example, in a program that torchrun starts::

        parallel = motet.apply(mllm, "plan.json", lambda part: torch.optim.AdamW(part, 1e-4))
        parallel.load("checkpoints")  # goes on behind the newest one there, if there is any
        for batch in batches[parallel.num_steps :]:
            print(parallel.step(batch).loss)
        parallel.save("checkpoints")
        parallel.export("trained")  # trained/backbone and trained/encoders/image, as transformers reads them
    """

    def __init__(self, model: MLLM, plan: Plan, make_optimizer: Any, max_grad_norm: float | None, world: World) -> None:
        self.plan, self.model, self._world = plan, model, world
        self._layout = _without_weights(model)
        self._measured, self._num_tokens, self.num_steps = model.measured, model.backbone.text.table.num_embeddings, 0
        # Noise of generators is drawn by item, as dropout is.
        self._draws_by_item = drops_out(model) or bool(model.generators)
        self._seed = world.gather(torch.initial_seed())[0]
        with world.together():
            place = Place.of(plan, world.rank)
        part = PartConfig(lambda held: held.to(world.device), make_optimizer, max_grad_norm)
        self._needs = StageNeeds.of(place, backbone=model.backbone)
        self._shares_with = place.island, place.program_rank  # What the ranks have in common that share its work.
        is_shared = any(unit.tp * unit.cp > 1 for unit in plan.units)
        self._compared = self._needs.readers if is_shared else ()  # Encoders whose items' values must be the same.
        self._decide, self._decide_held = StepDecider(place), StepDecider(place, own_fills=True)
        mesh = build_mesh(world.device)
        self._step, self.optimizer = build_part(model, plan.model, place, part, mesh, world)
        self._weights = _weights(model)
        spans = [span for of_stage in self._step.spans.values() for span in of_stage]
        in_halves = any(span.begins_inside or span.ends_inside for span in spans)
        self._calls = OwnCalls(model, lambda block: not (in_halves and block.halves))
        self._buffers, self._are_checked = Buffers(model), False
        self._has_failed = False
        self._lines: dict[Path, list[str]] = {}  # Of each folder, resolved, the checkpoints that led here.

    @torch.inference_mode(False)
    def step(self, batch: Sequence[LoadedExample]) -> StepResult:
        """Forward, backward and optimizer of one step in the Plan's schedule. A collective.

        batch: all examples of the step, `plan.batch_size` of them, the same on all ranks in the same order. A rank
               computes on what its stages need of them.
        The model is put in train mode, as `motet train` and HF Trainer do; parts in which nothing learns stay in eval
        mode. Dropout and noise are drawn by the example's place in the batch, the number of the step, and torch's seed
        on rank 0; noise of modules of one's own by that seed, the step and the rank, alike on ranks that share
        products and on copies of an encoder. The loop's own generators stay as they are.
        The result has the loss of the whole step, the mean over its targets and, of each generator, `weight`
        times the mean over the rows of its items (`losses` has them apart), and the gradient norm before clipping.
        Raises JointUserError on all ranks for a batch that is not as it must be on any of them, and, behind the first
        step, for a buffer that it has changed (`train/changing_buffers.py`); UserError behind a step that has failed.
        """
        batches = self._dealt("step", batch, self._decide)
        self._step.held.updated()  # The loop may have changed weights, as one that evaluates their averages does.
        self.model.train()  # `from_pretrained` gives models in eval mode, and a loop may evaluate between steps.
        devices = [self._world.device] if self._world.device.type == "cuda" else []
        with self._passing(), self._autocast(), torch.random.fork_rng(devices):
            torch.manual_seed(step_seed(self._seed, self.num_steps, self._step.place.noise_rank))
            result = self._step.run(batches, self.num_steps)
        self.num_steps += 1
        if not self._are_checked:
            self._buffers.check(self._world)
            self._are_checked = True
        return result

    @torch.inference_mode(False)  # In a loop's own, weights that ranks share cannot be gathered.
    def evaluate(self, batch: Sequence[LoadedExample]) -> float:
        """The loss of a batch in eval mode, as of `StepResult.loss`, on every rank; nothing learns. A collective.

        batch: as of `step`, and so are errors.
        """
        batches = self._dealt("evaluate", batch, self._decide_held)
        self._step.held.updated()
        self.model.eval()
        with self._passing(), self._autocast(), torch.no_grad():
            loss_sum, num_targets, *made = self._step.evaluate(batches).tolist()
        loss = loss_sum / max(num_targets, 1)
        for (name, weight), of_items in zip(self._step.weights.items(), made, strict=True):
            num_rows = sum(int(part.lengths.items[name].length.sum()) for part in batches)
            loss += weight * of_items / max(num_rows, 1)
        return float(loss)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of the whole model by their names in it, on rank 0 and its CPU; {} on the others. A collective.

        A model that `motet.compose` makes anew takes them by `load_state_dict`. Files for transformers: `export`.
        """
        self._buffers.check(self._world)  # Not all modules have input in the first step.
        with self._world.together():
            self._check_weights()
        return gathered_weights(self.model, self._world)

    def export(self, directory: Path | str) -> None:
        """Write the whole model as directories that transformers reads (`models/export.py`). A collective.

        Raises UserError as `export_hf` does.
        """
        weights = self.state_dict()
        with self._world.together():
            if self._world.is_first:
                export_hf(self._layout, Path(directory), weights, card=f"{counted_words(self.num_steps, 'step')}.")

    def save(self, folder: Path | str, keep: int = 2) -> Path:
        """Write a checkpoint of weights and optimizer, by names and shapes of the whole model. A collective.

        folder: of the loop's checkpoints, on a disk that all ranks share. `motet checkpoints` lists it.
        keep:   how many of the latest stay. The path of the new one is returned.
        Raises UserError if it cannot be written, for an optimizer that is none of torch's in `[optimizer]`, and for
        one with dampening.
        """
        folder, step = Path(folder), self.num_steps
        self._buffers.check(self._world)
        with self._world.together():
            self._check_weights()
            name = self._optimizer_name("save")
            if keep < 1:
                raise UserError(f"save: keep is {keep}; it must be at least 1.")
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        world, line = self._world, self._lines.get(folder.resolve(), [])
        saver = Checkpointer(folder, CheckpointConfig(keep=keep), world.saving, line, world.launch)
        options = over_ranks(world.gather(options_of(self.model, self.optimizer)))
        progress = Progress(step, step * self.plan.batch_size, 0, self._seed, "", optimizer=name, options=options)
        saver.save(self.model, self.optimizer, progress)
        saver.wait()
        self._lines[folder.resolve()] = saver.line
        return folder / name_of(step)

    def load(self, path: Path | str) -> int:
        """Go on from a checkpoint that `save` wrote, perhaps under another Plan or on other ranks. A collective.

        path: of a checkpoint; or a folder of them, of which the newest whole one is taken, if there is any.
        Groups of the optimizer get the rates and other numbers that their weights had, as torch restores them: a
        scheduler goes on with its own `load_state_dict`. Returns the number of steps that were taken before. Raises
        UserError for a checkpoint that is damaged, or of another model, optimizer or grouping.
        """
        path = Path(path)
        with self._world.together():
            own, is_one = self._optimizer_name("load"), is_checkpoint(path)
        folder = path.parent if is_one else path
        start = choose_checkpoint(str(path) if is_one else "auto", folder, self._world, _say)
        if start is None:
            return self.num_steps
        if (other := start.state.optimizer) != own:
            raise JointUserError(f"load: {start.path} has the state of {other!r}, and the optimizer is {own!r}.")
        progress = load(start.path, self.model, self.optimizer, self._world.control, self._world.together)
        with self._world.together():
            restore_options(self.model, self.optimizer, progress.options)
        self._step.held.updated()
        self._buffers = Buffers(self.model)
        self.num_steps, self._seed = progress.step, progress.seed
        self._lines[folder.resolve()] = start.line
        return self.num_steps

    def _optimizer_name(self, what: str) -> str:
        if any(group.get("dampening") for group in self.optimizer.param_groups):
            raise UserError(
                f"{what}: the optimizer has dampening, without which torch takes the first step of each weight, and "
                "checkpoints do not say which weights have taken one: leave it out. `state_dict` has the weights."
            )
        if name := name_of_optimizer(self.optimizer):
            return name
        raise UserError(
            f"{what}: the state of {type(self.optimizer).__name__} is not known; checkpoints have that of torch's "
            f"{', '.join(kind.make.__name__ for kind in OPTIMIZERS.values())}. `state_dict` has the weights."
        )

    def _autocast(self) -> torch.autocast:
        """The loop's autocast, without its cache: the optimizer changes weights inside of it."""
        kind = self._world.device.type
        return torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """In the block, ranks send each other what they make; an exception leaves messages between them."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    def _dealt(self, what: str, batch: Sequence[LoadedExample], decide: StepDecider) -> list[RankBatch]:
        """This rank's part of a batch, by microbatch. what: the method, for errors, as of `step`. A collective."""
        if self._has_failed:  # At once, as others may still be in that step.
            raise UserError(
                f"{what}: a step or an evaluation before has failed, and messages of it may be left between ranks: "
                "build the model anew and apply it, and go on from a checkpoint by `load`."
            )
        failure, digest, values, batches = "", b"", b"", []
        unexpected: Exception | None = None
        try:
            _check_examples(batch)
            self._calls.check()
            self._check_weights()
            self._check_learns()
            if what == "step":
                self._check_autocast()
            lengths = lengths_of_batch(batch, self._measured)
            self._check_tokens(batch)
            digest, values = _digest(lengths, batch), _digest_of_values(batch, self._compared)
            batches = self._batches(batch, lengths, decide)
        except (UserError, ValueError) as error:
            failure = f"{what}: {error}"
        except Exception as error:  # Others must not wait for this rank.
            failure, unexpected = f"{what}: a rank failed with {type(error).__name__}: {error}", error
        of_ranks = self._world.gather((failure, digest, self._shares_with, values))
        if unexpected is not None:
            raise unexpected
        if failures := [each for each, *_ in of_ranks if each]:
            raise JointUserError(failures[0])
        if other := next((rank for rank, (_, each, *_) in enumerate(of_ranks) if each != of_ranks[0][1]), 0):
            raise JointUserError(
                f"{what}: rank {other} was given other examples than rank 0; each rank takes the whole step's batch."
            )
        first: dict[tuple[int, int], tuple[int, bytes]] = {}
        for rank, (*_, sharing, read) in enumerate(of_ranks):
            partner, expected = first.setdefault(sharing, (rank, read))
            if read != expected:
                raise JointUserError(
                    f"{what}: rank {rank} was given items with other values than rank {partner}, which share their "
                    "work under the plan: whatever is drawn of an item (a crop, noise) must be drawn alike."
                )
        return batches

    def _check_tokens(self, batch: Sequence[LoadedExample]) -> None:
        """Raise UserError for a token that has no embedding."""
        for number, example in enumerate(batch):
            tokens = example.sequence.tokens
            if len(unknown := tokens[(tokens < 0) | (tokens >= self._num_tokens)]):
                raise UserError(
                    f"example {number} has the token {unknown[0]}, and those of the model are 0 to "
                    f"{self._num_tokens - 1}; what stands for an item must be one of them, too"
                )

    def _check_weights(self) -> None:
        """Raise UserError if weights were replaced since passes and optimizer were made, and not changed in place."""
        now = _weights(self.model)
        for name in {**self._weights, **now}:
            if name not in now or name not in self._weights or not now[name].is_same(self._weights[name]):
                raise UserError(
                    f"{name} was replaced since motet.apply, and the plan's passes and the optimizer have what it was: "
                    "change weights in place, by weight.copy_(values) under torch.no_grad() or by load_state_dict "
                    "without assign, neither by a new parameter nor by weight.data = values"
                )

    def _check_learns(self) -> None:
        """Raise UserError if weights were frozen, or let learn, since passes and optimizer were made."""
        for name, weight in self._weights.items():
            if weight.parameter.requires_grad != weight.learns:
                raise UserError(
                    f"{name} {'no longer learns' if weight.learns else 'learns now'}, and the plan's passes are made "
                    "for what learned when motet.apply was called: freeze before it, and apply a whole model anew to "
                    "change"
                )

    def _check_autocast(self) -> None:
        """Raise UserError for autocast in float16, the default on CUDA."""
        kind = self._world.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise UserError(
                "autocast is in float16, in which small gradients become 0 without a scale of the loss, and steps of a "
                f'plan have none: take torch.autocast("{kind}", torch.bfloat16)'
            )

    def _batches(self, batch: Sequence[LoadedExample], lengths: BatchLengths, decide: StepDecider) -> list[RankBatch]:
        if len(batch) != self.plan.batch_size:
            raise UserError(
                f"a step of the plan takes {counted_words(self.plan.batch_size, 'example')}, not {len(batch)}"
            )
        return [self._microbatch(number, part, batch) for number, part in enumerate(decide(lengths).microbatches)]

    def _microbatch(self, number: int, part: DecidedMicrobatch, batch: Sequence[LoadedExample]) -> RankBatch:
        device, loaded = self._world.device, stages_of_examples(number, part, batch, self._needs)
        made = loaded.ready_for(device).to(device, non_blocking=True)
        if not self._draws_by_item:
            return made
        keys = example_keys(self._seed, self.num_steps, part.examples)
        return made.with_draws(keys, self._needs.replicas)


def _without_weights(model: MLLM) -> MLLM:
    """A copy of a whole model without memory for its weights, which are on meta."""
    tensors = [*model.parameters(), *model.buffers()]
    layout: MLLM = deepcopy(model, {id(tensor): _on_meta(tensor) for tensor in tensors})
    return layout


def _on_meta(tensor: Tensor) -> Tensor:
    on_meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(on_meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else on_meta


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


class _Weight(NamedTuple):
    """A weight of this rank. memory: what its values are in, of one of which ranks share parts; else it may change."""

    parameter: nn.Parameter
    learns: bool
    memory: tuple[torch.UntypedStorage, ...]

    def is_same(self, other: _Weight) -> bool:
        pairs = zip(self.memory, other.memory, strict=True)
        return self.parameter is other.parameter and all(own is theirs for own, theirs in pairs)


def _weights(model: nn.Module) -> dict[str, _Weight]:
    """Each weight by its name."""
    return {name: _Weight(each, each.requires_grad, _memory(each)) for name, each in model.named_parameters()}


def _memory(weight: nn.Parameter) -> tuple[torch.UntypedStorage, ...]:
    """Of a DTensor: its own, which an assignment to `data` replaces, and that of this rank's part, which stays then."""
    if not isinstance(weight, DTensor):
        return ()
    with torch.no_grad():
        return weight.untyped_storage(), weight.to_local().untyped_storage()


def _check_examples(batch: Sequence[LoadedExample]) -> None:
    """Raise UserError for what is no list of examples."""
    if not isinstance(batch, Sequence):
        raise UserError(f"a step takes a list of LoadedExample, not a {type(batch).__name__}")
    for number, example in enumerate(batch):
        if not isinstance(example, LoadedExample):
            raise UserError(f"example {number} is a {type(example).__name__}, and must be a LoadedExample")


def lengths_of_batch(batch: Sequence[LoadedExample], measured: Mapping[str, Measure]) -> BatchLengths:
    """Lengths of a batch. measured: the model's encoders and generators. Raises UserError for an item of no module."""
    phases = tuple(measured)
    for number, example in enumerate(batch):
        if unknown := set(example.sequence.media) - set(phases):
            raise UserError(
                f"example {number} has an item of {min(unknown)!r}; the model's encoders and generators are "
                f"{', '.join(phases)}"
            )
    return LoadedTables.read([tables_of(batch, phases, measured)], phases).lengths


def _digest(lengths: BatchLengths, batch: Sequence[LoadedExample]) -> bytes:
    """Of texts and sizes of all examples: what tells batches apart without reading the media.

    Their values may differ: each is read by the ranks alone that compute its first block.
    """
    digest = hashlib.blake2b(lengths.sequence.tobytes(), digest_size=16)
    for example in batch:
        text = example.sequence
        digest.update(repr(text.media).encode())
        for column in (text.tokens, text.targets, text.media_positions, text.grids, text.pieces, text.turns):
            digest.update(b"" if column is None else np.asarray(column, np.int64).tobytes())
        for item in example.media:
            digest.update(np.asarray(item.size, np.int64).tobytes())
    return digest.digest()


def _digest_of_values(batch: Sequence[LoadedExample], phases: Collection[str]) -> bytes:
    """Of a sample of the values of each item that a rank may read. phases: whose items those are."""
    digest = hashlib.blake2b(digest_size=16)
    for example in batch if phases else ():
        for phase, item in zip(example.sequence.media, example.media, strict=True):
            if phase in phases:
                values = np.asarray(item.values).reshape(-1)
                digest.update(np.ascontiguousarray(values[:: len(values) // _NUM_SAMPLED + 1]).tobytes())
    return digest.digest()
