"""Steps under a Plan against one process: a tiny model of HF blocks, Plans of every kind, and the comparison."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from motet.core.plan import Fill, Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.catalogue import cluster
from motet.dispatch import LoadedExample, RankBatch
from motet.dispatch.context import ContextConfig
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.dispatch.stage_batch import assemble_stages
from motet.dropout import example_keys
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.families.registry import BACKBONES, CROSS_BACKBONES
from motet.models.families.siglip import SiglipEncoder
from motet.models.families.whisper import WhisperEncoder
from motet.models.fused import NamedSlice, stored_names, with_whole
from motet.models.lora import LoraConfig, add_lora
from motet.models.mllm import MLLM
from motet.models.named_weights import weights_named
from motet.models.part import keep_spans, names_of_spans
from motet.models.projector import ProjectorConfig
from motet.models.spec import model_spec
from motet.models.whole.mllama import KeyProjector
from motet.runtime.held import HeldParameters, share_out_part
from motet.runtime.holders import sharing_groups
from motet.runtime.mesh import build_mesh
from motet.runtime.p2p import Lanes
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.sharded_state import SAME_TYPES, ComputeTypes
from motet.runtime.step import StepResult
from motet.runtime.unit_groups import UnitGroups
from motet.train.input.planned import StageNeeds, StepDecider
from motet.train.optimizer import OptimizerConfig, build_optimizer
from motet.train.planned_job import divide_part, holders_of, split_products
from parity.data_parallel_plans import DataParallelRun
from parity.going_on import gone_on
from parity.planned_generators import QUERIES, ROW_DIMS_MADE, SIZE_DIMS_MADE, with_generators
from parity.planned_parts import (
    INNER,
    SECOND,
    WholeMerge,
    again_with,
    has_second,
    read_twice,
    second_tower,
    with_parts,
)
from parity.random_fills import with_random_fills
from parity.tiny import CROSSING, draw_example, open_gates, reference_step
from parity.towers import NUM_KEYS, mllama_tower, qwen3_vl_tower, registry_tower, with_patches
from parity.updates import updates_on_rows
from peer_memory import opening_copies
from ranks import run_ranks

DIM, VOCABULARY = 16, 40
ROW_DIMS = {"image": 12, "audio": 5} | ROW_DIMS_MADE
SIZE_DIMS = {"image": 2, "audio": 1, SECOND: 2} | SIZE_DIMS_MADE
PHASES = ("image", "audio")
TOLERANCE, MIXED_TOLERANCE = 1e-10, 1e-5
LOOSEST, MIXED_LOOSEST = 1e-8, 1e-4
"""No model is held to less, whatever rounding makes of it. What a Plan does wrong is many orders above."""
NUM_SHIFTS, MARGIN = 4, 10
NUM_STEPS, NUM_STEPS_OF_TESTS = 3, 2
"""Steps that the fuzzer compares, and those of tests: what a step leaves to the next one, a second step shows."""
OPTIMIZER = OptimizerConfig(
    lr=1e-2,
    clip_norm=0.5,
    groups=(
        {"weights": ["*embed_tokens*", "*layers.1.*", "*.qkv_proj.weight"], "lr": 2e-2},
        {"weights": "encoders.*", "lr": 5e-3, "weight_decay": 0.4},
    ),
)


TOWERS_OF_PARTS = {
    "stacked": "whole qwen3_vl",
    "tiled": "tiled internvl",
    "lines": "raster clip",
    "keys": "mllama",
}
"""Part -> the tower whose images examples have."""
OF_FAMILY = {
    "gemma2": {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma3": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "head_dim": 4,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.3,
    },
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}


def build_hf_model(
    frozen: Sequence[str] = (),
    tied: bool = False,
    parts: Sequence[str] = (),
    num_layers: int = 3,
    family: str = "qwen2",
    lora: Sequence[str] = (),
    dropout: float = 0.0,
    made: Sequence[str] = (),
) -> MLLM:
    """The same parameters in every call.

    parts: as of `parity.planned_parts`. num_layers, family: of the backbone. dropout: of all that HF drops out.
    chunks: of tensor-parallel products, where messages do not hold up compute. copied: by copies between ranks.
    lora: parts with adapters, unless they are frozen; "backbone *_proj" has them in layers with such names alone.

    made: generators, as of `parity.planned_generators`.
    frozen: of "image", "audio", "backbone", "draw", "say"; of "image encoder", "audio encoder"; of "image block",
    "audio block", "backbone block", the second one alone; patterns of names with a *.
    """
    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "attn_implementation": ATTENTION}
    sizes["attention_dropout"] = dropout
    image = SiglipVisionConfig(num_hidden_layers=3, image_size=8, patch_size=2, vision_use_head=False, **sizes)
    audio = WhisperConfig(
        d_model=8,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=12,
        num_mel_bins=ROW_DIMS["audio"],
        max_source_positions=40,
        attn_implementation=ATTENTION,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
    )
    family = "mllama" if "keys" in parts else family
    of_family = (BACKBONES | CROSS_BACKBONES)[family]
    numbers = {"hidden_size": DIM, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    numbers |= {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "attn_implementation": ATTENTION}
    drops = {"gpt2": ("embd_pdrop", "attn_pdrop", "resid_pdrop"), "opt": ("dropout", "attention_dropout")}
    drops["mllama"] = ("dropout",)
    drops["phi3"] = ("resid_pdrop", "attention_dropout")
    numbers |= dict.fromkeys(drops.get(family, ("attention_dropout",)), dropout)
    inner = {"gpt2": {"n_inner": 24}, "opt": {"ffn_dim": 24}}
    numbers |= inner.get(family, {"intermediate_size": 24, "num_key_value_heads": 2})
    if family == "mllama":
        numbers |= CROSSING | {"cross_attention_layers": [1, num_layers - 1]}
    numbers |= OF_FAMILY.get(family, {})
    if "layer_types" in numbers:
        numbers["layer_types"] = numbers["layer_types"][:num_layers]
    backbone = of_family.config(**numbers)
    of_images: tuple[torch.nn.Module, Any] = SiglipEncoder(SiglipVisionModel(image)), ProjectorConfig()
    if "stacked" in parts:
        of_images = qwen3_vl_tower(8, DIM, list(INNER), depth=3)
    if "keys" in parts:
        of_images = mllama_tower(), KeyProjector(16, DIM, NUM_KEYS)
    if "lines" in parts:
        of_images = registry_tower("clip", depth=3), ProjectorConfig()
    if "tiled" in parts:
        of_images = registry_tower("internvl", depth=3), ProjectorConfig(downsample=4)
    towers = {"image": of_images, "audio": (WhisperEncoder(HFWhisperEncoder(audio)), ProjectorConfig(downsample=2))}
    if has_second(parts):
        towers = {"image": towers["image"], SECOND: (second_tower(sizes), ProjectorConfig()), "audio": towers["audio"]}
    encoders = {
        phase: with_parts(
            phase,
            tower,
            projector,
            parts,
            ROW_DIMS["image"],
            DIM,
            train_encoder=phase not in frozen and f"{phase} encoder" not in frozen,
            train_projector=phase not in frozen,
        )
        for phase, (tower, projector) in towers.items()
    }
    causal_lm = of_family.model(backbone).to(torch.float64)
    ahead = {"bidirectional": ("image",) if "ahead" in parts else (), "prefix": "prefix" in parts}
    ahead["queries"] = {name: QUERIES[name] for name in made if name in QUERIES}
    ahead["stacked"] = {"image": len(INNER)} if "stacked" in parts else {}
    ahead["keys"] = {"image": NUM_KEYS} if "keys" in parts else {}
    ahead["turns"] = [name for name in made if name not in QUERIES]
    ahead["merge"] = WholeMerge(DIM, dropout).to(torch.float64) if "merge" in parts else None
    model = MLLM(encoders, Backbone(causal_lm, train=BACKBONE not in frozen, again=again_with(parts), **ahead))
    open_gates(model.backbone)
    model = with_generators(model, made, frozen)
    targets = {name: (its or "*",) for name, _, its in (each.partition(" ") for each in lora)}
    learn = {name: its for name, its in targets.items() if not {name, f"{name} encoder"} & {*frozen}}
    add_lora(model, {name: LoraConfig(rank=3, targets=its, dropout=dropout) for name, its in learn.items()}, seed=1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("lora_B.weight"):  # It is zero otherwise, and A has no gradient.
                parameter += 0.1 * torch.randn_like(parameter)
    for name, module in {**encoders, BACKBONE: model.backbone}.items():
        if f"{name} block" in frozen:
            module.blocks[1].requires_grad_(False)
    for pattern in frozen:
        for parameter in weights_named(model, pattern, "frozen") if "*" in pattern else ():
            parameter.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # Biases are zero otherwise; that of keys has a gradient of rounding alone.
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@dataclass(frozen=True)
class PlannedCase:
    """A Plan by its units, and what it is run on.

    contents: media that examples have. blocking: whether messages hold up compute. caps: of microbatches.
    example_order: `order` of the Plan.
    fill_seed: of random fills of bubbles; -1: coarse ones. filling, fills: as in Plan.
    parts: of the model, as of `parity.planned_parts`.
    exchange, head_groups: how attention gets rows of other context-parallel ranks.
    lora: parts with adapters, made: generators, as of `build_hf_model`.
    nodes: how many ranks of the cluster come before those of the units, and how many a node has; 0: eight.
    has_large, has_long: as of `draw_example`, so that ranks that share images or sequences cut some.
    left_out: the share of examples that are found bad after the step was decided.
    is_mixed: passes compute in float32, and gradients are summed in float64, as parameters are stored.
    then:     goes on behind the first step, from its checkpoint: another Plan for the same model, examples and ranks.
    """

    units: tuple[Unit, ...]
    schedule: str = "1f1b"
    batch_size: int = 6
    microbatch_size: int = 1
    frozen: tuple[str, ...] = ()
    tied: bool = False
    num_layers: int = 3
    family: str = "qwen2"
    lora: tuple[str, ...] = ()
    dropout: float = 0.0
    contents: tuple[str, ...] = PHASES
    blocking: bool = False
    caps: dict[str, int] = field(default_factory=dict)
    balance: str = "off"
    deferred_warmup: bool = False
    example_order: str = "given"
    fill_seed: int = -1
    filling: str = "static"
    left_out: float = 0.0
    is_mixed: bool = False
    then: PlannedCase | None = None
    seed: int = 0
    parts: tuple[str, ...] = ()
    fills: tuple[Fill, ...] = ()
    made: tuple[str, ...] = ()
    exchange: str = "auto"
    chunks: int = 1
    copied: bool = False
    head_groups: int = 1
    optimizer: str = "adamw"
    has_large: bool = False
    has_long: bool = False
    nodes: tuple[int, int] = (0, 0)

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return max(unit.ranks.stop for unit in self.units)

    @property
    def built(self) -> tuple[tuple[str, ...], bool, tuple[str, ...], int, str, tuple[str, ...], float, tuple[str, ...]]:
        """Arguments of `build_hf_model`."""
        return self.frozen, self.tied, self.parts, self.num_layers, self.family, self.lora, self.dropout, self.made

    @property
    def drawn_by(self) -> tuple[tuple[str, Any], ...]:
        """The fields by which its examples are drawn, for a model, with their values."""
        names = ("contents", "batch_size", "left_out", "seed", "has_large", "has_long")
        return tuple((name, getattr(self, name)) for name in names)

    def plan(self) -> Plan:
        """The Plan of the tiny model."""
        where = cluster("h100", num_nodes=1)
        peaks = {**where.device.peak_flops, "fp64": 6.7e13}
        pieces = 1 if self.blocking else self.chunks
        device = replace(where.device, peak_flops=peaks, overlaps=not self.blocking)
        before, per_node = self.nodes
        if per_node:
            where = replace(where, num_nodes=-(-(before + self.num_ranks) // per_node), ranks_per_node=per_node)
        units = tuple(replace(unit, first_rank=unit.first_rank + before) for unit in self.units)
        transport = "copy_engines" if self.copied else "collectives"
        where = replace(where, device=device, tensor_pieces=pieces, tensor_transport=transport)
        spec = _spec(*self.built)
        sizes = self.batch_size, self.microbatch_size
        options = {"microbatch_caps": self.caps, "balance": self.balance, "deferred_warmup": self.deferred_warmup}
        options |= {"order": self.example_order, "filling": self.filling, "fills": self.fills}
        precision = "fp32" if self.is_mixed else "fp64"
        plan = Plan(spec, where, units, *sizes, self.schedule, precision=precision, **options)
        return plan if self.fill_seed < 0 else with_random_fills(plan, self.fill_seed)

    def examples(self, step: int) -> list[LoadedExample]:
        """Of very different lengths; about a third are text only, and the first microbatch has no image."""
        rng = np.random.default_rng((self.seed, step))
        contents = (*self.contents, *self.made)
        media = [tuple(rng.choice(contents, rng.integers(0, 4))) if contents else () for _ in range(99)]
        media = [tuple(map(str, each)) for each in media[: self.batch_size]]
        media[0] = tuple(name for name in media[0] if name != "image")
        examples = [draw_example(rng, each, ROW_DIMS, self.has_large, self.has_long) for each in media]
        for part, tower in (
            ("stacked", "whole qwen3_vl"),
            ("tiled", "tiled internvl"),
            ("lines", "raster clip"),
            ("keys", "mllama"),
        ):
            if part in self.parts:
                examples = [with_patches(example, self.seed, tower) for example in examples]
        return [read_twice(example, self.parts) for example in examples] if has_second(self.parts) else examples

    def model(self) -> MLLM:
        """The whole model, to be changed."""
        return _copied(_whole_model(*self.built))

    def kept(self, step: int) -> np.ndarray:
        """The examples that are not left out, bool [batch_size]."""
        return np.random.default_rng((self.seed, step, 1)).random(self.batch_size) >= self.left_out


def _copied(model: MLLM) -> MLLM:
    """A deep copy, in two fifths of the time: most of what modules have is empty tables of hooks."""

    def copied(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        memo[id(module)] = new = module.__class__.__new__(module.__class__)
        for name, value in vars(module).items():
            is_empty = type(value) in (dict, OrderedDict) and not value
            vars(new)[name] = value.copy() if is_empty else deepcopy(value, memo)
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "__deepcopy__", copied, raising=False)
        return deepcopy(model)


@cache
def _spec(*model: Any) -> ModelSpec:
    return model_spec(_whole_model(*model))


def run_planned(
    case: PlannedCase,
    num_steps: int = NUM_STEPS,
    stored: torch.dtype = torch.float64,
    types: ComputeTypes = SAME_TYPES,
    evaluated: list[float] | None = None,
    is_whole: bool = True,
) -> tuple[list[StepResult], dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """Steps on this rank: results; weights after the last, and its gradients (clipped), by name.

    stored: dtype of parameters and optimizer. types: those of passes. evaluated: gets the loss of the last step's
    examples, as if they were held out, right before that step. is_whole: whether tensors are whole, or as this rank
    holds them.
    """
    run, whole, results = run_of(case, stored, types), _whole_model(*case.built), []
    if case.then is not None:
        results.append(run.step.run(run.batches(0, whole), 0))
        case, before = case.then, run.step
        run = run_of(case, stored, types)
        gone_on(before, run.step)
    for number in range(len(results), num_steps):
        batches = run.batches(number, whole)
        if evaluated is not None and number == num_steps - 1 and isinstance(run.step, PlannedStep):
            evaluated.append(_mean_loss(run.step.evaluate(batches).tolist(), batches, run.step.weights))
        results.append(run.step.run(batches, number))
    parameters = _stored_parameters(run.step.model)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    if not is_whole:
        return results, weights, gradients
    tables = ({name: _whole(tensor) for name, tensor in table.items()} for table in (weights, gradients))
    return results, *map(with_whole, tables)


def _mean_loss(totals: Sequence[float], batches: Sequence[RankBatch], weights: Mapping[str, float]) -> float:
    """The loss of all, from what `PlannedStep.evaluate` gives."""
    loss_sum, num_targets, *loss_sums = totals
    rows = [max(sum(int(b.lengths.items[name].length.sum()) for b in batches), 1) for name in weights]
    return loss_sum / max(num_targets, 1) + sum(
        weight * loss / count for weight, loss, count in zip(weights.values(), loss_sums, rows, strict=True)
    )


def _stored_parameters(model: MLLM) -> dict[str, torch.nn.Parameter]:
    """By the keys of checkpoints: a name, or rows of a whole parameter."""
    keys = stored_names(model)
    return {keys[name]: parameter for name, parameter in model.named_parameters()}


def _part_of(table: Mapping[str, torch.Tensor | None], key: str) -> torch.Tensor | None:
    if (part := NamedSlice.of(key)) is None:
        return table[key]
    whole = table[part.name]
    return None if whole is None else part.within(whole)


@lru_cache(maxsize=256)
def _names(built: tuple[Any, ...], spans: tuple[tuple[str, tuple[int, int]], ...]) -> set[str]:
    return names_of_spans(_whole_model(*built), dict(spans))


@lru_cache(maxsize=8)
def _whole_model(*model: Any) -> MLLM:
    """A model that nobody changes."""
    return build_hf_model(*model)


class StagesRun:
    """A case whose Plan has stages, on this rank. A collective."""

    def __init__(self, case: PlannedCase, stored: torch.dtype, types: ComputeTypes) -> None:
        self._case, self.step = case, build_step(case, stored, types)
        held = {
            name if (part := NamedSlice.of(name)) is None else part.name for name in _stored_parameters(self.step.model)
        }
        spans = self.step.place.stage_spans
        assert held == {name for each in spans for name in _names(case.built, tuple(each.items()))}
        self._decide = StepDecider(self.step.place, case.plan())

    def batches(self, number: int, whole: MLLM) -> list[RankBatch]:
        """The microbatches of a step. whole: the model as one process has it."""
        return batches_of(self._case, self.step.place, whole, number, self._decide, self.step)


def run_of(case: PlannedCase, stored: torch.dtype, types: ComputeTypes) -> StagesRun | DataParallelRun:
    """How a case runs on this rank. A collective. Arguments: as of `run_planned`."""
    if case.schedule == "data_parallel":
        return DataParallelRun(case, optimizer_named(case.optimizer), rank_device(), stored)
    return StagesRun(case, stored, types)


def build_step(case: PlannedCase, stored: torch.dtype = torch.float64, types: ComputeTypes = SAME_TYPES) -> PlannedStep:
    """The step of this rank, on its part of the model. A collective. Arguments: as above."""
    rank, device, plan = dist.get_rank(), rank_device(), case.plan()
    model, place = case.model(), Place.of(plan.closed_up, rank)
    split_products(model, place.program)
    holders, weights = holders_of(model, place.program), {name: each.weight for name, each in model.generators.items()}
    keep_spans(model.to(device, stored), *place.stage_spans)
    model.train()  # As the trainer does.
    unit_groups = UnitGroups.of(place)
    groups = {**unit_groups.by_ranks(place), **sharing_groups(place.program, holders.values())}
    if plan.copies_pieces:
        unit_groups.copy(opening_copies(device))
    divide_part(model, place, unit_groups)
    share_out_part(model, place, holders, groups, device, types)
    held = HeldParameters(model, place, holders, groups, types)
    lanes = Lanes(place.pairs, rank, device)
    lanes.connect()
    optimizer = build_optimizer(model, optimizer_named(case.optimizer))
    return PlannedStep(
        model, plan.model, place, lanes, build_mesh(device), held, unit_groups, optimizer,
        weights=weights, max_grad_norm=OPTIMIZER.clip_norm,
    )  # fmt: skip


def optimizer_named(name: str) -> OptimizerConfig:
    """`OPTIMIZER` as another one of torch; a momentum where it may have one."""
    given = OPTIMIZER.model_dump(include={"lr", "clip_norm", "groups"}) | {"name": name, "weight_decay": 0.1}
    return OptimizerConfig(**given, **({"momentum": 0.8} if name == "rmsprop" else {}))


def rank_device() -> torch.device:
    """What this rank computes on: its GPU if ranks have NCCL, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend() else torch.device("cpu")


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """On the CPU. A collective of the ranks that share the tensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return None if whole is None else whole.cpu()


def batches_of(
    case: PlannedCase,
    place: Place,
    model: MLLM,
    step: int,
    decide: StepDecider | None = None,
    preparing: PlannedStep | None = None,
) -> list[RankBatch]:
    """The microbatches of a step, as far as this rank needs them. decide: that of the place, by default a new one.

    preparing: makes what attention will ask for, as the trainer does where it loads; None: nobody does.
    """
    examples, phases = case.examples(step), tuple(model.measured)
    lengths = LoadedTables.read([tables_of(examples, phases, model.measured)], phases).lengths
    context = ContextConfig(exchange=case.exchange, head_groups=case.head_groups)
    needs = StageNeeds.of(place, context, model.backbone)
    batches, all_kept = [], case.kept(step)
    for number, part in enumerate((decide or StepDecider(place))(lengths).microbatches):
        kept = all_kept[part.examples]
        decision, lengths = part.decision.keep(kept, part.lengths), part.lengths.keep(kept)
        chosen = [examples[number] for number in part.examples[kept]]
        items = {p: [m for e in chosen for q, m in zip(e.sequence.media, e.media) if q == p] for p in phases}
        taken = {
            phase: [items[phase][i] for i in decision.items_on(phase, replica)]
            for phase, replica in place.replicas.items()
            if needs.reads(phase, number, part.decision.program)
        }
        wide = next((dims for part, dims in (("stacked", 3), ("lines", 4)) if part in case.parts), SIZE_DIMS["image"])
        dims = SIZE_DIMS | {"image": wide}
        sizes = {p: np.array([m.size for m in items[p]], np.int64).reshape(-1, dims[p]) for p in phases}
        sequences = None
        if needs.tokens:
            sequences = [chosen[i].sequence for i in decision.sequences_on(place.replicas[BACKBONE])]
        every = {number: example.sequence for number, example in enumerate(chosen)}
        batch = assemble_stages(decision, lengths, place.replicas, sequences, taken, sizes, needs.context, every)
        if case.dropout or case.made:
            batch = batch.with_draws(example_keys(case.seed, step, part.examples[kept]), place.replicas)
        if preparing is not None:
            batch = preparing.prepared(batch, preparing.like.dtype)
        batches.append(batch.to(rank_device(), dtype=torch.float64))
    return batches


Expected = tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, torch.Tensor | None]]
"""(loss, norm) of each step in one process; weights after the last, and its gradients, clipped."""


def expected(case: PlannedCase, num_steps: int = NUM_STEPS) -> Expected:
    """What one process computes. Of cases with the same model and examples, it does so once."""
    return _expected(case.built, case.drawn_by, case.optimizer, num_steps)


@lru_cache(maxsize=32)
def _expected(
    built: tuple[Any, ...], drawn_by: tuple[tuple[str, Any], ...], optimizer: str, num_steps: int
) -> Expected:
    *_, parts, _, _, _, dropout, made = built
    case = PlannedCase((), parts=parts, made=made, optimizer=optimizer, **dict(drawn_by))
    return in_one_process(case, _copied(_whole_model(*built)), num_steps, has_draws=bool(dropout or made))


def in_one_process(case: PlannedCase, model: MLLM, num_steps: int, has_draws: bool) -> Expected:
    """What this model becomes on a case's examples, without its Plan. has_draws: whether something drops out."""
    optimizer = build_optimizer(model, optimizer_named(case.optimizer))
    figures = []
    for number in range(num_steps):
        optimizer.zero_grad()
        kept, examples = np.flatnonzero(case.kept(number)), case.examples(number)
        keys = example_keys(case.seed, number, kept) if has_draws else None
        loss = reference_step(model, [examples[index] for index in kept], keys=keys)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient *= min(1.0, OPTIMIZER.clip_norm / max(norm, 1e-9))
        figures.append((loss, norm))
        optimizer.step()
    return (
        figures,
        {name: p.detach() for name, p in model.named_parameters()},
        {name: p.grad for name, p in model.named_parameters()},
    )


def in_numpy(figures: Expected) -> tuple[Any, ...]:
    """What `expected` gives with arrays for tensors: torch writes each tensor as a file of its own."""
    losses, *tables = figures
    return losses, *({name: t if t is None else t.numpy() for name, t in table.items()} for table in tables)


def in_tensors(figures: tuple[Any, ...]) -> Expected:
    """What `in_numpy` was given."""
    losses, *tables = figures
    weights, gradients = (
        {name: array if array is None else torch.from_numpy(array) for name, array in table.items()} for table in tables
    )
    return losses, weights, gradients


def check_planned(rank: int, num_ranks: int, cases: Sequence[PlannedCase], is_torchs: bool = False) -> list[str]:
    """What differs from one process, on this rank. A collective. is_torchs: as in `assert_planned`."""
    wrong = []
    for case in cases:
        num_steps = NUM_STEPS_OF_TESTS if case.then is None else NUM_STEPS
        with nullcontext() if is_torchs else updates_on_rows():
            errors = errors_of(case, num_steps)
        tolerance = tolerance_of(case, errors, num_steps)
        wrong += [f"{case}: rank {rank}: {line}" for line in differences(errors, tolerance)]
        dist.barrier()
    return wrong


def assert_planned(
    num_ranks: int, cases: Sequence[PlannedCase], *, is_torchs: bool = False, on_gpus: bool = False
) -> None:
    """Assert that no case differs from one process on any of `num_ranks` new ranks.

    is_torchs: whether optimizers update DTensors as torch lets them, not by `updates_on_rows`. on_gpus: as in
    `run_ranks`.
    """
    found = run_ranks(check_planned, num_ranks, cases, is_torchs, on_gpus=on_gpus)
    wrong = [line for of_rank in found for line in of_rank]
    assert not wrong, "\n".join(wrong)


def differences(errors: Mapping[str, float], tolerance: float) -> list[str]:
    """The errors above the tolerance, in words."""
    return [f"{name} is off by {error:g}" for name, error in errors.items() if not error <= tolerance]


def tolerance_of(case: PlannedCase, errors: Mapping[str, float], num_steps: int = NUM_STEPS) -> float:
    """The largest error, as a share, that a Plan may have on the model and the examples of a case. A collective.

    TOLERANCE, or what rounding makes of the model, which is measured only where that decides. At most LOOSEST. In mixed
    precision, those of its own.

    errors: those of this rank.
    """
    least, most = (MIXED_TOLERANCE, MIXED_LOOSEST) if case.is_mixed else (TOLERANCE, LOOSEST)
    largest = torch.tensor(
        max((math.inf if math.isnan(error) else error for error in errors.values()), default=0.0), dtype=torch.float64
    )
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if largest <= least or largest > most:
        return least
    source = case.seed % dist.get_world_size()  # It has the reference.
    tolerance = torch.tensor(rounding_of(case, num_steps) if dist.get_rank() == source else 0.0, dtype=torch.float64)
    dist.broadcast(tolerance, source)
    return min(max(least, tolerance.item()), most)


def rounding_of(case: PlannedCase, num_steps: int = NUM_STEPS) -> float:
    """MARGIN times what one process is off by if its weights are shifted by their last bit, up or down at random.

    In mixed precision it is the last bit of the type in which passes compute. The largest of NUM_SHIFTS times. AdamW
    makes a step of its own size of any gradient, so that a model with one that is nearly zero multiplies what was
    rounded.
    """
    return MARGIN * max(_shifted(case, seed, num_steps) for seed in range(NUM_SHIFTS))


def _shifted(case: PlannedCase, seed: int, num_steps: int) -> float:
    num_steps = 1 if case.is_mixed else num_steps
    figures, *tables = expected(case, num_steps)
    model, generator = case.model(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) - 1
            parameter *= 1 + signs * torch.finfo(torch.float32 if case.is_mixed else parameter.dtype).eps
    found, *others = in_one_process(case, model, num_steps, has_draws=bool(case.dropout or case.made))
    errors = [share_off(*pair) for of_step in zip(found, figures) for pair in zip(*of_step)]
    largest = _largest_of(tables[1]) if case.is_mixed else None
    for table, wanted in list(zip(others, tables))[case.is_mixed :]:
        errors += [largest_error(table[name], tensor, largest) for name, tensor in wanted.items() if tensor is not None]
    return max(errors)


def errors_of(case: PlannedCase, num_steps: int = NUM_STEPS) -> dict[str, float]:
    """How far this rank's losses, norms, weights and gradients are from one process, as shares of it. A collective.

    In mixed precision, of one step, and gradients as shares of the largest of all: AdamW makes steps of the same size
    from any gradient, so that weights differ where a gradient is rounding alone.
    """
    evaluated: list[float] = []
    num_steps, types = (1, ComputeTypes(torch.float32, torch.float64)) if case.is_mixed else (num_steps, SAME_TYPES)
    results, weights, gradients = run_planned(case, num_steps, types=types, evaluated=evaluated, is_whole=False)
    source = case.seed % dist.get_world_size()  # Ranks compute references in turn.
    sent = [in_numpy(expected(case, num_steps)) if dist.get_rank() == source else None]
    dist.broadcast_object_list(sent, source)
    figures, expected_weights, expected_gradients = in_tensors(sent[0])
    last = figures[-1][0]
    errors = {"evaluated loss": share_off(evaluated[0], last)} if evaluated else {}
    for number, (result, (loss, norm)) in enumerate(zip(results, figures, strict=True)):
        errors[f"loss {number}"] = share_off(result.loss, loss)
        errors[f"norm {number}"] = share_off(result.grad_norm, norm)
    largest = _largest_of(expected_gradients)
    for name, weight in weights.items():
        if not case.is_mixed:
            errors[f"weight {name}"] = largest_error(weight, _part_of(expected_weights, name))
        gradient, other = gradients[name], _part_of(expected_gradients, name)
        if (gradient is None) != (other is None):
            errors[f"gradient of {name} ({gradient is None} instead of {other is None}: none)"] = math.inf
        elif gradient is not None:
            errors[f"gradient of {name}"] = largest_error(gradient, other, largest if case.is_mixed else None)
    return errors


def share_off(found: float, wanted: float) -> float:
    """How far a number is off, as a share of what it should be."""
    return abs(found - wanted) / max(abs(wanted), 1e-9)


def largest_error(found: torch.Tensor, wanted: torch.Tensor, largest: float | None = None) -> float:
    """The largest difference, as a share of the largest number, by default of `wanted`. Of a DTensor: in this part."""
    largest = _largest(wanted) if largest is None else largest
    if isinstance(found, DTensor):
        mesh = found.device_mesh
        for axis, placement in enumerate(found.placements):
            if placement.is_shard():
                parts = wanted.chunk(mesh.size(axis), placement.dim)
                rank = mesh.get_local_rank(axis)
                wanted = parts[rank] if rank < len(parts) else wanted.narrow(placement.dim, 0, 0)
        found = found.to_local()
        assert found.shape == wanted.shape
    return _largest(found.cpu() - wanted) / (largest if largest > 1e-15 else 1.0)


def _largest_of(gradients: Mapping[str, torch.Tensor | None]) -> float:
    return max((_largest(gradient) for gradient in gradients.values() if gradient is not None), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
