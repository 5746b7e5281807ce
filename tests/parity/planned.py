"""Steps under a Plan against one process: a tiny model of HF blocks, Plans of every kind, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from motet.core.plan import Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.catalogue import cluster
from motet.dispatch import LoadedExample, RankBatch
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.dispatch.stage_batch import assemble_stages
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.families.siglip import SiglipEncoder
from motet.models.families.whisper import WhisperEncoder
from motet.models.mllm import MLLM
from motet.models.part import keep_spans, names_of_spans
from motet.models.projector import ProjectorConfig
from motet.models.spec import model_spec
from motet.runtime.held import HeldParameters, share_out_part
from motet.runtime.holders import sharing_groups
from motet.runtime.mesh import build_mesh
from motet.runtime.p2p import Lanes
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.sharded_state import SAME_TYPES, ComputeTypes
from motet.runtime.step import StepResult
from motet.train.input.planned import StageNeeds, StepDecider
from motet.train.optimizer import OptimizerConfig, build_optimizer
from motet.train.planned_job import holders_of
from parity.planned_parts import SECOND, again_with, has_second, read_twice, second_tower, with_parts
from parity.random_fills import with_random_fills
from parity.tiny import draw_example, reference_step
from ranks import run_ranks

DIM, VOCABULARY = 16, 40
ROW_DIMS = {"image": 12, "audio": 5}
SIZE_DIMS = {"image": 2, "audio": 1, SECOND: 2}
PHASES = tuple(ROW_DIMS)
TOLERANCE = 1e-10
NUM_STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_norm=0.5)


def build_hf_model(frozen: Sequence[str] = (), tied: bool = False, parts: Sequence[str] = ()) -> MLLM:
    """The same parameters in every call. frozen: of "image encoder", "image", "audio", "backbone".

    parts: as of `parity.planned_parts`.
    """
    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "attn_implementation": ATTENTION}
    image = SiglipVisionConfig(num_hidden_layers=3, image_size=8, patch_size=2, vision_use_head=False, **sizes)
    audio = WhisperConfig(
        d_model=8,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=12,
        num_mel_bins=ROW_DIMS["audio"],
        max_source_positions=40,
        attn_implementation=ATTENTION,
    )
    backbone = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attn_implementation=ATTENTION,
    )
    towers = {
        "image": (SiglipEncoder(SiglipVisionModel(image)), 1),
        "audio": (WhisperEncoder(HFWhisperEncoder(audio)), 2),
    }
    if has_second(parts):
        towers = {"image": towers["image"], SECOND: (second_tower(sizes), 1), "audio": towers["audio"]}
    encoders = {
        phase: with_parts(
            phase,
            tower,
            ProjectorConfig(downsample=downsample),
            parts,
            ROW_DIMS["image"],
            DIM,
            train_encoder=phase not in frozen and f"{phase} encoder" not in frozen,
            train_projector=phase not in frozen,
        )
        for phase, (tower, downsample) in towers.items()
    }
    causal_lm = Qwen2ForCausalLM(backbone).to(torch.float64)
    model = MLLM(encoders, Backbone(causal_lm, train=BACKBONE not in frozen, again=again_with(parts)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # Biases are zero otherwise; that of keys has a gradient of rounding alone.
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@dataclass(frozen=True)
class PlannedCase:
    """A Plan by its units, and what it is run on.

    contents: media that examples have. blocking: whether messages hold up compute. caps: of microbatches.
    example_order: `order` of the Plan; the fuzzer's stored cases have none.
    fill_seed: of random fills of bubbles; -1: coarse ones. filling: as in Plan.
    parts: of the model, as of `parity.planned_parts`.
    """

    units: tuple[Unit, ...]
    schedule: str = "1f1b"
    batch_size: int = 6
    microbatch_size: int = 1
    frozen: tuple[str, ...] = ()
    tied: bool = False
    contents: tuple[str, ...] = PHASES
    blocking: bool = False
    caps: dict[str, int] = field(default_factory=dict)
    balance: str = "off"
    deferred_warmup: bool = False
    example_order: str = "given"
    fill_seed: int = -1
    filling: str = "static"
    seed: int = 0
    parts: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return max(unit.ranks.stop for unit in self.units)

    def plan(self) -> Plan:
        """The Plan of the tiny model."""
        where = cluster("h100", num_nodes=1)
        peaks = {**where.device.peak_flops, "fp64": 6.7e13}
        where = replace(where, device=replace(where.device, peak_flops=peaks, overlaps=not self.blocking))
        spec = _spec(self.frozen, self.tied, self.parts)
        sizes = self.batch_size, self.microbatch_size
        options = {"microbatch_caps": self.caps, "balance": self.balance, "deferred_warmup": self.deferred_warmup}
        options |= {"order": self.example_order, "filling": self.filling}
        plan = Plan(spec, where, self.units, *sizes, self.schedule, precision="fp64", **options)
        return plan if self.fill_seed < 0 else with_random_fills(plan, self.fill_seed)

    def examples(self, step: int) -> list[LoadedExample]:
        """Of very different lengths; about a third are text only, and the first microbatch has no image."""
        rng = np.random.default_rng((self.seed, step))
        media = [tuple(rng.choice(self.contents, rng.integers(0, 4))) if self.contents else () for _ in range(99)]
        media = [tuple(map(str, each)) for each in media[: self.batch_size]]
        media[0] = tuple(name for name in media[0] if name != "image")
        examples = [draw_example(rng, each, ROW_DIMS) for each in media]
        return [read_twice(example, self.parts) for example in examples] if has_second(self.parts) else examples

    def model(self) -> MLLM:
        """The whole model."""
        return build_hf_model(self.frozen, self.tied, self.parts)


@cache
def _spec(frozen: tuple[str, ...], tied: bool, parts: tuple[str, ...]) -> ModelSpec:
    return model_spec(build_hf_model(frozen, tied, parts))


def run_planned(
    case: PlannedCase,
    num_steps: int = NUM_STEPS,
    stored: torch.dtype = torch.float64,
    types: ComputeTypes = SAME_TYPES,
    evaluated: list[float] | None = None,
) -> tuple[list[StepResult], dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """Steps on this rank: results; weights after the last, and its gradients (clipped), by name.

    stored: dtype of parameters and optimizer. types: those of passes. evaluated: gets the loss of the last step's
    examples, as if they were held out, right before that step.
    """
    step, whole = build_step(case, stored, types), case.model()
    parameters = dict(step.model.named_parameters())
    assert parameters.keys() == {name for spans in step.place.stage_spans for name in names_of_spans(whole, spans)}
    results = []
    for number in range(num_steps):
        batches = batches_of(case, step.place, whole, number)
        if evaluated is not None and number == num_steps - 1:
            loss_sum, num_targets = step.evaluate(batches).tolist()
            evaluated.append(loss_sum / max(num_targets, 1))
        results.append(step.run(batches, number))
    weights = {name: _whole(parameter.detach()) for name, parameter in parameters.items()}
    return results, weights, {name: _whole(parameter.grad) for name, parameter in parameters.items()}


def build_step(case: PlannedCase, stored: torch.dtype = torch.float64, types: ComputeTypes = SAME_TYPES) -> PlannedStep:
    """The step of this rank, on its part of the model. A collective. Arguments: as above."""
    rank, device, plan = dist.get_rank(), rank_device(), case.plan()
    model, place = case.model(), Place.of(plan, rank)
    holders = holders_of(model, place.program)
    keep_spans(model.to(device, stored), *place.stage_spans)
    groups = sharing_groups(place.program, holders.values())
    share_out_part(model, place, holders, groups, device, types)
    held = HeldParameters(model, place, holders, groups, types)
    lanes = Lanes(place.pairs, rank, device)
    lanes.connect()
    optimizer = build_optimizer(model, OPTIMIZER)
    return PlannedStep(
        model, plan.model, place, lanes, build_mesh(device), held, optimizer,
        max_grad_norm=OPTIMIZER.clip_norm,
    )  # fmt: skip


def rank_device() -> torch.device:
    """What this rank computes on: its GPU if ranks have NCCL, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend() else torch.device("cpu")


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """On the CPU. A collective of the ranks that share the tensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return None if whole is None else whole.cpu()


def batches_of(case: PlannedCase, place: Place, model: MLLM, step: int) -> list[RankBatch]:
    """The microbatches of a step, as far as this rank needs them."""
    examples, plan, phases = case.examples(step), place.program.layout.plan, tuple(model.encoders)
    lengths = LoadedTables.read([tables_of(examples, phases, model.encoders)], phases).lengths
    needs = StageNeeds.of(place.replicas, place.stages.values(), plan.model)
    batches = []
    for number, part in enumerate(StepDecider(place)(lengths).microbatches):
        chosen = [examples[number] for number in part.examples]
        items = {p: [m for e in chosen for q, m in zip(e.sequence.media, e.media) if q == p] for p in phases}
        taken = {
            phase: [items[phase][i] for i in part.decision.assignments[phase].on_rank(replica)]
            for phase, replica in place.replicas.items()
            if needs.reads(phase, number, part.decision.program)
        }
        sizes = {p: np.array([m.size for m in items[p]], np.int64).reshape(-1, SIZE_DIMS[p]) for p in phases}
        sequences = None
        if needs.tokens:
            sequences = [chosen[i].sequence for i in part.decision.backbone.on_rank(place.replicas[BACKBONE])]
        batch = assemble_stages(part.decision, part.lengths, place.replicas, sequences, taken, sizes)
        batches.append(batch.to(rank_device(), dtype=torch.float64))
    return batches


def expected(case: PlannedCase) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, object]]:
    """(loss, norm) of each step in one process; weights after the last, and its gradients, clipped."""
    model = case.model()
    optimizer = build_optimizer(model, OPTIMIZER)
    figures = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = reference_step(model, case.examples(number))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient *= min(1.0, OPTIMIZER.clip_norm / norm)
        figures.append((loss, norm))
        optimizer.step()
    return (
        figures,
        {name: p.detach() for name, p in model.named_parameters()},
        {name: p.grad for name, p in model.named_parameters()},
    )


def check_planned(rank: int, num_ranks: int, cases: Sequence[PlannedCase]) -> list[str]:
    """What differs from one process, on this rank. A collective."""
    wrong = []
    for case in cases:
        wrong += [f"{case}: rank {rank}: {line}" for line in differences(errors_of(case))]
        dist.barrier()
    return wrong


def assert_planned(num_ranks: int, cases: Sequence[PlannedCase], *, on_gpus: bool = False) -> None:
    """Assert that no case differs from one process on any of `num_ranks` new ranks. on_gpus: as in `run_ranks`."""
    wrong = [line for of_rank in run_ranks(check_planned, num_ranks, cases, on_gpus=on_gpus) for line in of_rank]
    assert not wrong, "\n".join(wrong)


def differences(errors: Mapping[str, float]) -> list[str]:
    """The errors above TOLERANCE, in words."""
    return [f"{name} is off by {error:g}" for name, error in errors.items() if not error <= TOLERANCE]


def errors_of(case: PlannedCase) -> dict[str, float]:
    """How far this rank's losses, norms, weights and gradients are from one process, as shares of it. A collective."""
    evaluated: list[float] = []
    results, weights, gradients = run_planned(case, evaluated=evaluated)
    wanted = [expected(case) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wanted)
    figures, expected_weights, expected_gradients = wanted[0]
    last = figures[-1][0]
    errors = {"evaluated loss": abs(evaluated[0] - last) / max(abs(last), 1e-9)}
    for number, (result, (loss, norm)) in enumerate(zip(results, figures)):
        errors[f"loss {number}"] = abs(result.loss - loss) / max(abs(loss), 1e-9)
        errors[f"norm {number}"] = abs(result.grad_norm - norm) / max(abs(norm), 1e-9)
    for name, weight in weights.items():
        errors[f"weight {name}"] = _error(weight, expected_weights[name])
        gradient, other = gradients[name], expected_gradients[name]
        if (gradient is None) != (other is None):
            errors[f"gradient of {name} ({gradient is None} instead of {other is None}: none)"] = math.inf
        elif gradient is not None:
            errors[f"gradient of {name}"] = _error(gradient, other)
    return errors


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    largest = wanted.abs().max().item()
    return (found - wanted).abs().max().item() / (largest if largest > 1e-15 else 1.0)
