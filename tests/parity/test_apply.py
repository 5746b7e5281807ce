"""`motet.apply` on two ranks: as one process trains, and what is refused on all ranks alike."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM, Qwen2Config, SiglipVisionModel

import motet
from dist.test_changing_buffers import Normed
from motet.core.errors import JointUserError, UserError
from motet.core.plan import Plan, Unit
from motet.cost.catalogue import cluster
from motet.dispatch import RankBatch
from motet.dropout import example_keys
from motet.models.divided import why_undivided
from motet.models.generator_build import build_generator
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from motet.models.spec import model_spec
from motet.planning import apply
from motet.train import world
from parity.planned import PlannedCase
from parity.test_loops import example_module
from parity.tiny import QFORMER, reference_step
from ranks import run_ranks

BESIDE = (Unit("image", ({"image": 2},)), Unit("backbone", ({"backbone": 2},), first_rank=1))
CHAIN = (Unit("all", ({"image": 1}, {"image": 1, "backbone": 2}), pp=2),)

TOGETHER = (Unit("all", ({"image": 2, "backbone": 2},), dp=2, zero=3),)


def build(seed=0):
    parts = example_module("hf_parts")
    torch.manual_seed(seed)
    return motet.compose(parts.language_model().double(), {"image": parts.vision_tower().double()})


def plan_of(units, model=None, batch_size=8, **options) -> Plan:
    model = model or model_spec(build())
    return Plan(model, cluster("h100", 1, 2), units, batch_size, 2, precision="fp64", **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def trained(rank, num_ranks, plan):
    losses, part = example_module("apply_plan").train(plan, torch.float64)
    return losses, {name: parameter.detach().numpy() for name, parameter in part.named_parameters()}


@pytest.fixture(scope="module")
def alone():
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for batch in example_module("hf_parts").batches():
        optimizer.zero_grad()
        losses.append(reference_step(model, batch))
        optimizer.step()
    return losses, {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


class OwnMlp(nn.Module):
    """An MLP that is no family's."""

    def __init__(self):
        super().__init__()
        self.widen, self.narrow = nn.Linear(32, 20), nn.Linear(20, 32)

    def forward(self, hidden):
        return self.narrow(torch.relu(self.widen(hidden)))


def with_own_mlp():
    parts = example_module("hf_parts")
    torch.manual_seed(0)
    text = parts.language_model()
    text.model.layers[1].mlp = OwnMlp()
    return motet.compose(text.double(), {"image": parts.vision_tower().double()})


def losses_with_own_mlp(rank, num_ranks, plan):
    parallel = motet.apply(with_own_mlp(), plan, sgd)
    return [parallel.step(batch).loss for batch in example_module("hf_parts").batches()[:3]]


def test_an_mlp_of_a_users_own_trains_as_one_process_does():
    model = with_own_mlp()
    spec = model_spec(model)
    parameters = sum(parameter.numel() for parameter in model.backbone.parameters())
    assert sum(layer.parameters for layer in spec.module("backbone").layers) == parameters
    optimizer, losses = sgd(model.parameters()), []
    for batch in example_module("hf_parts").batches()[:3]:
        optimizer.zero_grad()
        losses.append(reference_step(model, batch))
        optimizer.step()
    assert run_ranks(losses_with_own_mlp, 2, plan_of(TOGETHER, spec))[0] == pytest.approx(losses, rel=1e-10)
    stages = plan_of(CHAIN, spec, schedule="gpipe")
    assert run_ranks(losses_with_own_mlp, 2, stages)[1] == pytest.approx(losses, rel=1e-10)


def test_norms_whose_weights_are_computed_of_others_train():
    """One of Motet's in float64 would keep the weight that was computed first."""
    parts = example_module("hf_parts")
    torch.manual_seed(0)
    text = parts.language_model().double()
    register_parametrization(text.model.norm, "weight", nn.Tanh())
    model, batch = motet.compose(text, {}), parts.batches()[0][:3:3]
    losses, optimizer = [], sgd(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(reference_step(model, batch))
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


def test_what_no_family_has_in_its_layers_is_refused_by_name():
    """Each tensor-parallel rank would have a gradient of its own, of its rows alone."""
    model = with_own_mlp()
    assert why_undivided(model, "image") == ""
    assert why_undivided(model, "backbone").startswith("mlp.widen.weight of a layer is in no product or norm of")
    model.backbone.blocks[1].inner.self_attn = nn.Identity()
    said = "The attention of layer 1 of Qwen2ForCausalLM is a Identity without q_proj, k_proj, v_proj, o_proj: only"
    with pytest.raises(UserError, match=said):
        model_spec(model)


def losses_with_dropout(rank, num_ranks, plan, leave_in_eval=False, frozen=()):
    model = build()
    for name in frozen:
        model.encoders[name].requires_grad_(False)
    for module in model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.2)
    torch.manual_seed(7 + rank)
    model.train(not leave_in_eval)
    part, losses = motet.apply(model, plan, sgd), []
    for batch in example_module("hf_parts").batches():
        losses.append(part.step(batch).loss)
        part.model.train(not leave_in_eval)
    return losses


def drawn_in_a_step(rank, num_ranks, plan):
    """What a callback draws in a step, on each rank, and what the loop draws behind it."""
    model, drawn = build(), []

    def noisy(values, sizes):
        drawn.append(float(torch.rand(())))
        return values, sizes

    model.encoders["image"].before = noisy
    torch.manual_seed(7 + rank)
    motet.apply(model, plan, sgd).step(example_module("hf_parts").batches()[0])
    return drawn, float(torch.rand(()))


def test_ranks_that_share_products_draw_noise_alike():
    units = (Unit("image", ({"image": 2},), tp=2, zero=0), Unit("backbone", ({"backbone": 2},), first_rank=2))
    plan = plan_of(units, schedule="gpipe")
    plan = replace(plan, cluster=replace(plan.cluster, ranks_per_node=3))
    (first, own), (other, others_own), _ = run_ranks(drawn_in_a_step, 3, plan)
    assert first == other and len(set(first)) == len(first) > 0
    assert own == float(torch.rand((), generator=torch.Generator().manual_seed(7))) != others_own


def test_every_plan_drops_out_the_same(alone):
    beside, chain = (
        run_ranks(losses_with_dropout, 2, plan_of(units, schedule="gpipe"))[0] for units in (BESIDE, CHAIN)
    )
    assert beside == pytest.approx(chain, rel=1e-10)
    assert beside[0] != pytest.approx(alone[0][0], rel=1e-6)


@pytest.mark.parametrize("frozen", [(), ("image",)])
def test_a_step_trains_models_that_were_read_or_evaluated_in_eval_mode(frozen):
    model = build()
    for name in frozen:
        model.encoders[name].requires_grad_(False)
    plan = plan_of(BESIDE, model_spec(model), schedule="gpipe")
    trained, left = (run_ranks(losses_with_dropout, 2, plan, in_eval, frozen)[0] for in_eval in (False, True))
    assert left == trained


def losses_with_hooks(rank, num_ranks, plan, drop):
    """Losses where hooks change what layers of the tower return, and so rare masks are drawn that none drops anything.

    With them what is said against cutting these layers into halves.
    """
    model, losses = build(), []
    for block in model.encoders["image"].blocks[:2]:
        block.inner.register_forward_hook(lambda module, args, output: 2 * output)
        block.inner.self_attn.dropout = drop
    part = motet.apply(model, plan, sgd)
    losses = [part.step(batch).loss for batch in example_module("hf_parts").batches()[:2]]
    return losses, [encoder.unhalvable for encoder in part.model.encoders.values() if encoder is not None]


def test_hooks_on_layers_run_where_masks_are_drawn():
    """Layers run as their halves there, as they do in bubbles, which call what is in them."""
    (dropped, why), _ = run_ranks(losses_with_hooks, 2, plan_of(BESIDE), 1e-13)
    assert dropped == pytest.approx(run_ranks(losses_with_hooks, 2, plan_of(BESIDE), 0.0)[0][0], rel=1e-9)
    assert why == ["a layer has a hook or a forward of its own"]


def steps_in_autocast(rank, num_ranks, plan, enabled):
    parallel = motet.apply(build().float(), plan, sgd)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return [(step.loss, step.grad_norm) for step in map(parallel.step, example_module("hf_parts").batches()[:3])]


def test_messages_have_the_type_of_weights_under_autocast():
    """Rows of an encoder are in bfloat16 there. An autocast around all steps keeps no weights of the first."""
    plan = replace(plan_of(BESIDE, model_spec(build()), schedule="gpipe"), precision="fp32")
    beside, chain, exact = (
        run_ranks(steps_in_autocast, 2, replace(plan, units=units), enabled)[0]
        for units, enabled in ((BESIDE, True), (CHAIN, True), (BESIDE, False))
    )
    for step, (found, alike, expected) in enumerate(zip(beside, chain, exact)):
        assert found == pytest.approx(alike, rel=1e-5), step
        assert found == pytest.approx(expected, rel=0.03) and found != expected


@pytest.mark.parametrize("plan", ["degrees", "beside", "chain"])
def test_the_example_trains_as_one_process_does(plan, alone):
    given = {"beside": plan_of(BESIDE), "chain": plan_of(CHAIN, schedule="gpipe")}.get(
        plan, example_module("apply_plan").DEGREES
    )
    results = run_ranks(trained, 2, given)
    names = set()
    for losses, part in results:
        assert losses == pytest.approx(alone[0], rel=1e-10)
        names |= part.keys()
        for name, weight in part.items():
            if "k_proj.bias" not in name:  # Its gradient is zero but for rounding, of which AdamW makes a step.
                assert weight == pytest.approx(alone[1][name], rel=0, abs=1e-10), name
    assert names == alone[1].keys() and not set(results[0][1]) & set(results[1][1])


def steps_from_checkpoint(rank, num_ranks, plan, folder, first, stop):
    """Steps of the example's loop behind the newest checkpoint of a folder: (losses, loss of the first batch in eval
    mode, whole weights, where they were saved)."""
    batches = example_module("hf_parts").batches()
    parallel = motet.apply(build(seed=first), plan, lambda part: torch.optim.AdamW(part, 1e-2))
    assert parallel.load(os.path.relpath(folder)) == parallel.num_steps == first
    losses = [parallel.step(batch).loss for batch in batches[first:stop]]
    held = parallel.evaluate(batches[0])
    path = parallel.save(folder)
    assert parallel.save(folder) == path  # As a loop does that also saves at its end.
    parallel.export(path / "export")
    weights = {name: weight.numpy() for name, weight in parallel.state_dict().items()}
    return losses, held, weights, path


@pytest.mark.parametrize("plans", [(BESIDE, CHAIN), pytest.param((TOGETHER, BESIDE, TOGETHER), marks=pytest.mark.slow)])
def test_a_loop_goes_on_under_another_plan_and_gives_its_weights_back(plans, alone, tmp_path):
    """From a checkpoint to the same losses as of one process; the weights are those that the whole model takes."""
    losses, per_plan = [], 6 // len(plans)
    for number, units in enumerate(plans):
        first, stop = number * per_plan, (number + 1) * per_plan
        results = run_ranks(steps_from_checkpoint, 2, plan_of(units), str(tmp_path), first, stop)
        losses += results[0][0]
        assert results[0][:2] == results[1][:2] and not results[1][2]
        assert results[0][3].name == f"step-{stop:08d}" and results[0][3].is_dir()
        assert not list(tmp_path.glob("*.superseded"))
    assert losses == pytest.approx(alone[0], rel=1e-10)
    model, weights = build(), {name: torch.from_numpy(weight) for name, weight in results[0][2].items()}
    model.load_state_dict(weights)
    for name, weight in model.named_parameters():
        if "k_proj.bias" not in name:  # As above.
            assert weight.detach().numpy() == pytest.approx(alone[1][name], rel=0, abs=1e-10), name
    held = reference_step(model, example_module("hf_parts").batches()[0])
    assert results[0][1] == pytest.approx(held, rel=1e-10)
    export = results[0][3] / "export"
    llm = AutoModelForCausalLM.from_pretrained(export / "backbone")
    tower = SiglipVisionModel.from_pretrained(export / "encoders" / "image")
    read = motet.compose(llm, {"image": tower}).state_dict()
    parts = {name for name in weights if not name.startswith("encoders.image.projector.")}
    assert all(torch.equal(read[name], weights[name]) for name in parts) and parts < weights.keys()


def scheduled(make, learns):
    """An optimizer of two groups, and a scheduler that multiplies what the rates are at the time."""
    matrices, others = ([weight for weight in learns if (weight.ndim > 1) == is_matrix] for is_matrix in (True, False))
    return make([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 5e-2}], 1e-2)


def steps_on_schedule(rank, num_ranks, plan, folder, state, stop):
    """(losses up to step `stop`, the scheduler's state) behind the newest checkpoint of a folder; saves another."""
    parallel = motet.apply(build(), plan, partial(scheduled, torch.optim.AdamW))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(parallel.optimizer, 0.5)
    if parallel.load(folder):
        scheduler.load_state_dict(state)
    losses = []
    for batch in example_module("hf_parts").batches()[parallel.num_steps : stop]:
        losses.append(parallel.step(batch).loss)
        scheduler.step()
    parallel.save(folder)
    return losses, scheduler.state_dict()


def test_rates_go_on_from_a_checkpoint_under_another_plan(tmp_path):
    """As torch's optimizers restore them: most schedulers of torch multiply the rate that they find."""
    model, expected, losses, state = build(), [], [], None
    optimizer = scheduled(torch.optim.AdamW, list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batch in example_module("hf_parts").batches()[:4]:
        optimizer.zero_grad()
        expected.append(reference_step(model, batch))
        optimizer.step()
        scheduler.step()
    for units, stop in ((TOGETHER, 2), (BESIDE, 4)):
        ((found, state), _) = run_ranks(steps_on_schedule, 2, plan_of(units), str(tmp_path), state, stop)
        losses += found
    assert losses == pytest.approx(expected, rel=1e-10)


def not_saved(rank, num_ranks, folder):
    """The sentences on states that no checkpoint has, or another optimizer wrote, and on an export in the way."""
    plan, sentences = plan_of(BESIDE), []
    for make, does in (
        (torch.optim.Rprop, lambda parallel: parallel.save(folder)),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.1), lambda parallel: parallel.save(folder)),
        (torch.optim.SGD, lambda parallel: parallel.save(folder, keep=0)),
        (torch.optim.SGD, lambda parallel: [parallel.save(folder)]),
        (torch.optim.AdamW, lambda parallel: parallel.load(folder)),
        (torch.optim.SGD, lambda parallel: parallel.load(f"{folder}/nothing") or parallel.export(folder)),
    ):
        try:
            does(motet.apply(build(), plan, make))
        except JointUserError as error:
            sentences.append(str(error))
    return sentences


@pytest.mark.slow
def test_what_cannot_be_saved_or_loaded_is_one_sentence_on_all_ranks(tmp_path):
    for unknown, dampened, none_kept, other, in_the_way in run_ranks(not_saved, 2, str(tmp_path)):
        assert none_kept == "save: keep is 0; it must be at least 1."
        assert unknown.startswith(
            "save: the state of Rprop is not known; checkpoints have that of torch's AdamW, Adam,"
        )
        assert dampened.startswith("save: the optimizer has dampening, without which torch takes the first step")
        assert other == f"load: {tmp_path}/step-00000000 has the state of 'sgd', and the optimizer is 'adamw'."
        assert in_the_way.startswith(f"{tmp_path} exists and is no export")


def test_a_file_of_a_plan_and_a_frozen_encoder_train(tmp_path):
    from motet.core.plan_file import write_plan

    model = build()
    model.encoders["image"].requires_grad_(False)
    write_plan(replace(plan_of(BESIDE), model=model_spec(model)), tmp_path / "plan.json")
    model.train()
    expected = reference_step(model, example_module("hf_parts").batches()[0])
    assert run_ranks(step_frozen, 2, str(tmp_path / "plan.json")) == pytest.approx([expected] * 2, rel=1e-10)


def step_frozen(rank, num_ranks, plan):
    parts = example_module("hf_parts")
    model = build()
    model.encoders["image"].requires_grad_(False)
    return motet.apply(model, plan, sgd).step(parts.batches()[0]).loss


PARTS = {"rows": ("rows", "queries", "again"), "sum": ("sum", "tiles")}
STAGES = {
    "rows": ({"image": 3}, {"image": 1, "second": 3, "audio": 3, "backbone": 3}),
    "sum": ({"image": 2}, {"image": 1, "second": 2, "audio": 2, "backbone": 3}),
}


def losses_with_parts(rank, num_ranks, parts, plan):
    case = PlannedCase((), parts=parts)
    parallel = motet.apply(case.model(), plan, sgd)
    return [parallel.step(case.examples(step)).loss for step in range(3)]


@pytest.mark.parametrize("parts", PARTS)
def test_models_with_queries_callbacks_and_two_readers_train_as_one_process_does(parts):
    case = PlannedCase((Unit("all", STAGES[parts], pp=2),), parts=PARTS[parts])
    plan, model, expected = plan_of(case.units, model=case.plan().model, batch_size=6), case.model(), []
    optimizer = sgd([weight for weight in model.parameters() if weight.requires_grad])
    for step in range(3):
        optimizer.zero_grad()
        expected.append(reference_step(model, case.examples(step)))
        optimizer.step()
    assert run_ranks(losses_with_parts, 2, PARTS[parts], plan) == [pytest.approx(expected, rel=1e-10)] * 2


def trained_generators(rank, num_ranks, plan):
    results, part = example_module("apply_generator").train(plan, torch.float64)
    weights = {name: whole(parameter.detach()).numpy() for name, parameter in part.named_parameters()}
    return [(result.loss, result.losses) for result in results], weights


def whole(weight):
    """A weight of which the Plan that was found may give a rank a part."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def test_a_model_with_a_generator_trains_as_one_process_does():
    example, losses = example_module("apply_generator"), []
    model = example.build(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number, batch in enumerate(example.batches()):
        optimizer.zero_grad()
        losses.append(reference_step(model, batch, keys=example_keys(1, number, np.arange(len(batch)))))
        optimizer.step()
    weights, names = dict(model.named_parameters()), set()
    for steps, part in run_ranks(trained_generators, 2, example.DEGREES):
        assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-10)
        assert all(loss == pytest.approx(apart["backbone"] + apart["draw"]) for loss, apart in steps)
        names |= part.keys()
        for name, weight in part.items():
            if "k_proj.bias" not in name:  # As above.
                assert weight == pytest.approx(weights[name].detach().numpy(), rel=0, abs=1e-10), name
    assert names == weights.keys() and "backbone.queries.draw" in names


def optimizers_made(rank, num_ranks, plan):
    """The kinds of parameters given, what the group says then, and the sentence on one that updates all at once."""
    given = []

    def adamw(parameters, **options):
        given.extend(parameter.ndim for parameter in parameters)
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": others}], 1e-2, **options)

    model = build()
    model.backbone.requires_grad_(False)
    parallel, sentence = motet.apply(model, plan, adamw), ""
    parallel.step(example_module("hf_parts").batches()[0])
    try:
        model = build()
        model.backbone.requires_grad_(False)
        motet.apply(model, plan, lambda part: adamw(part, foreach=True))
    except JointUserError as error:
        sentence = str(error)
    return given, [group["foreach"] for group in parallel.optimizer.param_groups], sentence


def test_an_optimizer_of_shared_and_whole_weights_updates_one_by_one():
    """torch updates no DTensor and other tensors at once, as it does on GPUs by default. A rank may be frozen."""
    model = build()
    model.backbone.requires_grad_(False)
    units = (Unit("image", ({"image": 2},), tp=2, zero=0), Unit("backbone", ({"backbone": 2},), first_rank=2))
    plan = plan_of(units, model_spec(model), schedule="gpipe")
    plan = replace(plan, cluster=cluster("h100", 1, 3))
    *sharing, (given, frozen, said) = run_ranks(optimizers_made, 3, plan)
    for _, foreach, sentence in sharing:
        assert False in foreach and sentence.startswith("motet.apply: the optimizer has foreach = True, and under")
    assert given[0] == 1 and frozen == [None, None] and said == sharing[0][2]


MISTAKES = {
    "weights": "has other weights than rank",
    "examples": "step: rank 1 was given other examples than rank 0",
    "targets": "step: rank 1 was given other examples than rank 0",
    "types": "weights are of several types (encoders.image.",
    "device": "is on 'meta', and the process group sends from 'cpu': make the group by",
    "fewer examples": "step: a step of the plan takes 8 examples, not 7",
    "ranks": "The plan is for 3 ranks, and 2 run",
    "precision": "the plan computes in fp64, and the model is in fp32.",
    "tensor parallelism": "unit 'all': tp is 2, and 'backbone' has 1 head of keys and values; tp must divide them",
    "data parallelism": "data parallelism alone; motet.dispatch.prefetched is for that",
    "degrees": "of tp, cp, pp, dp and ep, whole numbers from 1; image.stages is not.",
    "no degrees": "whole numbers from 1; NoneType is not.",
    "no plan": "image is pinned to pp = 3; it must be 1 to 2, its blocks.",
    "no batch": "give batch=",
    "unfrozen": "step: encoders.image.encoder.model.embeddings.patch_embedding.weight no longer learns, and the plan's",
    "checkpointing": "draw other masks where transformers' gradient checkpointing runs them again",
    "checkpointing of parts": "would have other rows where transformers' gradient checkpointing runs them again",
    "common weights": "motet.apply: 'image' and 'other' have weights in common, which would be on different ranks",
    "wrapped": "motet.apply: the model is DataParallel; give what motet.compose makes",
    "clipped below 0": "motet.apply: max_grad_norm is -1.0; it must be above 0",
    "other weights": "the optimizer has a weight that is none of this rank's: make it of the list",
    "closure": "motet.apply: LBFGS takes several losses in a step",
    "hook": "motet.apply: backbone.causal_lm.lm_head.weight has a hook on its gradient",
    "module hook": "motet.apply: backbone.causal_lm has a hook on its forward or backward pass, or a forward of",
    "hook on what is read": "motet.apply: encoders.image.encoder.model.embeddings.patch_embedding has a hook on its",
    "forward": "motet.apply: encoders.image.encoder.model.encoder has a hook on its forward or backward pass, or a",
    "pruned": "q_proj.weight is computed of other weights before each call (torch.nn.utils.prune, or its older",
    "by frequency": "embed_tokens has scale_grad_by_freq, by which results depend on how a batch is divided: leave it",
    "longest rows": "embeddings.position_embedding has max_norm, by which results depend on how a batch is divided",
    "buffers": "has other buffers than rank",
    "adapter": "model.layers.0.inner.self_attn.q_proj is an adapter of peft",
    "float16": "step: autocast is in float16, in which small gradients become 0",
    "part": "motet.apply: the model is a part already",
    "whole matrices": "motet.apply: Adafactor keeps means over rows and columns of whole matrices, and under this plan",
    "masks": "motet.apply: Rprop updates elements that it chooses by masks, and under this plan ranks share weights",
    "norms of weights": "motet.apply: Normalised updates a weight by gradients of other elements, and under this plan",
    "a norm of all": "motet.apply: Normalised updates a weight by gradients of other weights, and under this plan",
    "token": "step: example 1 has the token -200, and those of the model are 0 to",
    "no list": "step: a step takes a list of LoadedExample, not a list_iterator",
    "no example": "step: example 3 is a NoneType, and must be a LoadedExample",
    "phase": "step: example 1 has an item of 'video'; the model's encoders and generators are image",
}
PLANS = {
    "ranks": Unit("all", ({"image": 2}, {"backbone": 1}, {"backbone": 1}), pp=3),
    "tensor parallelism": Unit("all", ({"image": 2, "backbone": 2},), tp=2),
    "checkpointing of parts": Unit("all", ({"image": 2, "backbone": 2},), tp=2),
    "data parallelism": Unit("all", ({"image": 2, "backbone": 2},), dp=2, zero=0),
}
DEGREES = {
    "no degrees": None,
    "degrees": {"image": {"pp": 1, "stages": 2}},
    "no plan": {"image": {"pp": 3}},
    "no batch": {"image": {"pp": 1}},
}


class Normalised(torch.optim.SGD):
    """Divides gradients by their norm: of each weight, or of all of them."""

    def __init__(self, weights, of_all):
        super().__init__(weights, 0.1)
        self.of_all = of_all

    def step(self, closure=None):
        given = [weight for group in self.param_groups for weight in group["params"]]
        nn.utils.clip_grad_norm_(given, 1.0) if self.of_all else [nn.utils.clip_grad_norm_([it], 1.0) for it in given]
        super().step()


OPTIMIZERS = {
    "masks": torch.optim.Rprop,
    "norms of weights": partial(Normalised, of_all=False),
    "a norm of all": partial(Normalised, of_all=True),
    "other weights": lambda part: sgd([nn.Parameter(weight.detach().clone()) for weight in part]),
    "closure": torch.optim.LBFGS,
    "whole matrices": torch.optim.Adafactor,
}


def stepped(model, plan, batch, planned_for, learns, make=sgd, max_grad_norm=None):
    """One step. learns: False freezes the weights of rank 0 before it."""
    parallel = motet.apply(model, plan, make, batch=planned_for, max_grad_norm=max_grad_norm)
    if not learns and dist.get_rank() == 0:
        parallel.model.requires_grad_(False)
    parallel.step(batch)


def refused(rank, num_ranks):
    """The sentence of each mistake, on this rank."""
    batches, sentences = example_module("hf_parts").batches(), {}
    for what in MISTAKES:
        plan, model, batch = plan_of(BESIDE), build(seed=rank if what == "weights" else 0), batches[0]
        if what in PLANS:
            plan = replace(
                plan, units=(PLANS[what],), schedule="data_parallel" if what == "data parallelism" else "1f1b"
            )
        plan = DEGREES.get(what, plan)
        if what == "precision":
            model = model.float()
        elif what == "examples" and rank:
            batch = batches[1]
        elif what == "targets" and rank:
            batch = [replace(each, sequence=replace(each.sequence, targets=~each.sequence.targets)) for each in batch]
        elif what == "types":
            model.encoders.float()
        elif what == "device":
            model.encoders.to("meta")
        elif what == "fewer examples" and rank:
            batch = batch[:-1]
        elif what == "no list" and rank:
            batch = iter(batch)
        elif what == "no example" and rank:
            batch = [*batch[:3], None, *batch[4:]]
        elif what == "phase":
            text = replace(batch[1].sequence, media=("video",) * len(batch[1].media))
            batch = [batch[0], replace(batch[1], sequence=text), *batch[2:]]
        elif what == "token":
            tokens = np.full_like(batch[1].sequence.tokens, -200)
            batch = [batch[0], replace(batch[1], sequence=replace(batch[1].sequence, tokens=tokens)), *batch[2:]]
        elif what == "checkpointing":
            layers = model.backbone.causal_lm.model.layers
            for layer in layers:
                layer.gradient_checkpointing, layer.self_attn.attention_dropout = True, 0.1
        elif what == "checkpointing of parts":
            model.backbone.causal_lm.gradient_checkpointing_enable()
        elif what == "common weights":
            model.encoders["other"] = model.encoders["image"]
        elif what == "wrapped":
            model = nn.DataParallel(model)
        elif what == "hook":
            model.backbone.causal_lm.lm_head.weight.register_hook(lambda gradient: gradient * 0)
        elif what == "module hook":
            model.backbone.causal_lm.model.layers[0].register_forward_hook(lambda *_: None)
            model.backbone.causal_lm.register_forward_hook(lambda *_: None)
        elif what == "hook on what is read":
            model.backbone.causal_lm.model.embed_tokens.register_forward_hook(lambda *_: None)  # It is called.
            model.encoders["image"].encoder.model.embeddings.patch_embedding.register_forward_hook(lambda *_: None)
        elif what == "forward":
            model.encoders["image"].encoder.model.encoder.forward = print
        elif what == "pruned":
            prune.l1_unstructured(model.backbone.blocks[1].inner.self_attn.q_proj, "weight", 0.5)
        elif what == "by frequency":
            model.backbone.causal_lm.model.embed_tokens.scale_grad_by_freq = True
        elif what == "longest rows":
            model.encoders["image"].encoder.model.embeddings.position_embedding.max_norm = 0.5
        elif what == "buffers":
            model.backbone.causal_lm.model.rotary_emb.inv_freq.mul_(1 + rank)
        elif what == "adapter":
            inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model.backbone.causal_lm)
        elif what == "float16":
            model, plan = model.float(), replace(plan, precision="fp32")
        elif what in ("part", "whole matrices", "masks", "norms of weights"):
            plan = replace(plan, units=TOGETHER)
        if what == "part":
            motet.apply(model, plan, sgd)
        planned_for, learns = None if what == "no batch" else batch, what != "unfrozen"
        options = OPTIMIZERS.get(what, sgd), -1.0 if what == "clipped below 0" else None
        with (
            pytest.raises(JointUserError) as error,
            torch.autocast("cpu", torch.float16, enabled=what == "float16"),
        ):
            stepped(model, plan, batch, planned_for, learns, *options)
        sentences[what] = str(error.value)
        dist.barrier()
    return sentences


def losses_beside_other_weights(rank, num_ranks, plan):
    """(held-out loss of half the weights, of the weights, loss of a step), with others than the step's in between."""
    batches, parallel = example_module("hf_parts").batches(), motet.apply(build(), plan, sgd)
    kept = [weight.detach().clone() for weight in parallel.model.parameters()]
    with torch.no_grad():
        for weight in parallel.model.parameters():
            weight.mul_(0.5)
    with torch.inference_mode():
        halved = parallel.evaluate(batches[0])
    with torch.no_grad():
        for weight, own in zip(parallel.model.parameters(), kept):
            weight.copy_(own)
    held = parallel.evaluate(batches[0])
    with torch.inference_mode():
        return halved, held, parallel.step(batches[1]).loss


def test_a_loop_may_change_weights_as_where_it_evaluates_their_averages():
    model, batches = build(), example_module("hf_parts").batches()
    kept, step = (reference_step(model, batch) for batch in batches[:2])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    expected = pytest.approx((reference_step(model, batches[0]), kept, step), rel=1e-10)
    sharing = (replace(TOGETHER[0], zero=1),)
    assert run_ranks(losses_beside_other_weights, 2, plan_of(sharing)) == [expected] * 2


def steps_behind_a_failure(rank, num_ranks, plan, evaluates):
    """The sentences on what follows a step, or an evaluation, that fails on all ranks between its messages."""
    batches, parallel, sentences = example_module("hf_parts").batches(), motet.apply(build(), plan, sgd), []
    held = parallel.model.backbone if rank else parallel.model.encoders["image"]
    passes = []

    def fail(*_):
        passes.append(1)
        if len(passes) == 2 - rank:  # The first rank has sent what the second does not get.
            raise ZeroDivisionError

    held.blocks[0].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        parallel.evaluate(batches[0]) if evaluates else parallel.step(batches[0])
    for goes_on in (parallel.step, parallel.evaluate):
        with pytest.raises(UserError) as error:
            goes_on(batches[1])
        sentences.append(str(error.value))
    return sentences


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loop_that_goes_on_behind_a_failed_step_is_told(evaluates):
    """Messages of that step were taken for those of the next one, or waited for."""
    for of_step, held in run_ranks(steps_behind_a_failure, 2, plan_of(BESIDE, schedule="gpipe"), evaluates):
        assert of_step.startswith("step: a step or an evaluation before has failed, and messages of it may be left")
        assert held.startswith("evaluate: a step or")


def copies(rank, num_ranks, plan):
    """How a step's microbatches go to the device: (asked for pinned memory, did not block), each."""
    found, to = [], RankBatch.to
    with (
        mock.patch.object(RankBatch, "ready_for", lambda batch, device: replace(batch, recompute={"backbone": 0})),
        mock.patch.object(
            RankBatch, "to", lambda batch, *where, **how: found.append((batch, how)) or to(batch, *where)
        ),
    ):
        motet.apply(build(), plan, sgd).step(example_module("hf_parts").batches()[0])
    return [(batch.recompute is not None, how) for batch, how in found]


def test_batches_are_copied_from_pinned_memory():
    for found in run_ranks(copies, 2, plan_of(TOGETHER)):
        assert found and all(each == (True, {"non_blocking": True}) for each in found)


def replaced(rank, num_ranks, plan):
    """The sentence on a step behind each way to give rank 1 other weights, and on a checkpoint then."""
    batch, sentences = example_module("hf_parts").batches()[0], []
    for change in (
        lambda part, weight: part.load_state_dict(
            {key: it.clone() for key, it in part.state_dict().items()}, assign=True
        ),
        lambda part, weight: setattr(part.backbone.causal_lm.lm_head, "weight", nn.Parameter(weight.detach().clone())),
        lambda part, weight: setattr(weight, "data", weight.data / 2),
    ):
        parallel = motet.apply(build(), plan, sgd)
        first = parallel.step(batch).loss
        if rank == 1:
            change(parallel.model, parallel.model.backbone.causal_lm.lm_head.weight)
        try:
            sentences.append(parallel.step(batch).loss < first)
        except JointUserError as error:
            sentences.append(str(error))
            with pytest.raises(JointUserError, match="was replaced since"):
                parallel.state_dict()
    return sentences


def build_divisible():
    """A model whose heads two ranks share."""
    parts = example_module("hf_parts")
    with mock.patch.object(parts, "Qwen2Config", lambda **sizes: Qwen2Config(**sizes | {"num_key_value_heads": 2})):
        torch.manual_seed(0)
        return motet.compose(parts.language_model().double(), {"image": parts.vision_tower().double()})


def set_behind(rank, num_ranks, plan):
    """The sentence on a step behind each thing that rank 1 has set on its part; the losses with a hook on a block."""
    batch, sentences = example_module("hf_parts").batches()[0], []
    for change in (
        lambda lm: lm.lm_head.weight.register_hook(lambda gradient: 2 * gradient),
        lambda lm: lm.model.norm.register_forward_hook(lambda module, args, output: 2 * output),
        lambda lm: setattr(lm.model.layers[1].inner.mlp.down_proj, "forward", print),
        lambda lm: parametrizations.weight_norm(lm.lm_head),
    ):
        parallel = motet.apply(build_divisible(), plan, sgd)
        parallel.step(batch)
        if rank == 1:
            change(parallel.model.backbone.causal_lm)
        with pytest.raises(JointUserError) as error:
            parallel.step(batch)
        sentences.append(str(error.value))
    parallel, called = motet.apply(build_divisible(), plan, sgd), []
    for block in parallel.model.backbone.blocks:
        block.register_forward_hook(lambda *_: called.append(1)).remove()
        block.register_forward_hook(lambda *_: called.append(1))
    return sentences, parallel.step(batch).loss, len(called) > 0


@pytest.mark.parametrize("units", [TOGETHER, (Unit("all", ({"image": 2, "backbone": 2},), tp=2),)])
def test_what_is_set_on_a_part_is_refused_on_all_ranks_but_on_blocks(units):
    """It did not run, or on a part of the rows or of the products, and computed something else without a word."""
    found = run_ranks(set_behind, 2, plan_of(units, model_spec(build_divisible())))
    loss = reference_step(build_divisible(), example_module("hf_parts").batches()[0])
    assert found[0][0] == found[1][0]
    of_weight, *others = found[0][0]
    assert of_weight == (
        "step: backbone.causal_lm.lm_head.weight has a hook on its gradient, which a plan may compute elsewhere, in "
        "parts and by microbatches: remove it."
    )
    names = ("model.norm", "model.layers.1.inner.mlp.down_proj", "lm_head")
    for name, sentence in zip(names, others, strict=True):
        assert sentence.startswith(f"step: backbone.causal_lm.{name} was given a hook, a forward or a parametrization ")
    assert [each[1:] for each in found] == [(pytest.approx(loss, rel=1e-9), True)] * 2


@pytest.mark.parametrize("units", [(replace(TOGETHER[0], zero=1),), BESIDE])
def test_weights_that_were_replaced_are_refused_on_all_ranks(units):
    """Passes and optimizer would go on with what they were, which of whole weights an assignment to `data` changes."""
    for assigned, other, data in run_ranks(replaced, 2, plan_of(units)):
        assert "weight was replaced since motet.apply, and the plan's passes and the optimizer have" in assigned
        assert other.startswith("step: backbone.causal_lm.lm_head.weight was replaced since motet.apply")
        assert data is True if units == BESIDE else data == other


def step_on_own_noise(rank, num_ranks, plan):
    """The loss of a step on items to which each rank adds what it draws, or the sentence on them."""
    batch = [
        replace(example, media=tuple(replace(item, values=item.values + rank) for item in example.media))
        for example in example_module("hf_parts").batches()[0]
    ]
    try:
        return motet.apply(build(), plan, sgd).step(batch).loss
    except JointUserError as error:
        return str(error)


def test_ranks_that_share_an_item_must_have_it_alike():
    """Others may draw crops and noise of their own: each item is read by one of them."""
    sharing = (Unit("all", ({"image": 2, "backbone": 2},), cp=2, zero=0),)
    for said in run_ranks(step_on_own_noise, 2, plan_of(sharing)):
        assert said.startswith("step: rank 1 was given items with other values than rank 0, which share their work")
    first, second = run_ranks(step_on_own_noise, 2, plan_of(BESIDE))
    assert first == second > 0


def normed():
    """The example's model with an encoder that has statistics of what it was given."""
    parts = example_module("hf_parts")
    torch.manual_seed(0)
    projector = build_projector(8, 32, ProjectorConfig(kind="linear"))
    image = ModalityModule(Normed(3 * parts.PATCH**2), projector)
    return motet.compose(parts.language_model().double(), {"image": image.double()})


def sentence_on_statistics(rank, num_ranks, plan):
    with pytest.raises(JointUserError) as error:
        motet.apply(normed(), plan, sgd).step(example_module("hf_parts").batches()[0])
    return str(error.value)


def test_statistics_that_follow_what_a_rank_computes_are_refused():
    """A step of one process has those of all items; ranks would differ in them, and save those of one."""
    model = model_spec(normed())
    units = (Unit("all", (dict(model.num_blocks),), dp=2, zero=3),)
    for said in run_ranks(sentence_on_statistics, 2, plan_of(units, model)):
        assert said.startswith("The buffer encoders.image.encoder.batch_norm.running_mean changes as the model trains")


def test_mistakes_are_one_sentence_on_all_ranks():
    for sentences in run_ranks(refused, 2):
        for what, said in MISTAKES.items():
            assert said in sentences[what] and "\n" not in sentences[what]


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_that_sends_from_gpus_by_any_name_trains_there(monkeypatch, backends):
    """`init_process_group()` without a name has both, and "undefined" as the name of its backend."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(world, "new_group", lambda backend: None)
    monkeypatch.setattr(world, "_on_even_nodes", lambda found, local: found)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert world.borrowed_world().device == torch.device("cuda", 3)


def test_it_needs_a_process_group():
    with pytest.raises(UserError, match="init_process_group"):
        motet.apply(build(), plan_of(BESIDE), sgd)


def test_weights_of_nan_are_not_others_on_the_same_rank():
    model = build()
    with torch.no_grad():
        model.backbone.causal_lm.lm_head.weight[0] = torch.nan
    alike = SimpleNamespace(rank=0, gather=lambda sums: [pickle.loads(pickle.dumps(sums))] * 2)
    apply._check_same_weights(model, alike)


def test_a_projector_of_any_kind_is_composed():
    parts = example_module("hf_parts")
    projector = ProjectorConfig(kind="qformer", queries=3, config=QFORMER)
    model = motet.compose(
        parts.language_model().double(), {"image": parts.vision_tower().double()}, {"image": projector}
    )
    batch = parts.batches()[0][:2]
    assert model_spec(model).num_blocks["image"] == 3 and reference_step(model, batch) > 0
    assert next(model.encoders["image"].projector.parameters()).dtype == torch.float64


def test_models_that_motet_does_not_compute_are_refused():
    from transformers import BloomConfig, BloomForCausalLM

    parts = example_module("hf_parts")
    small = BloomForCausalLM(BloomConfig(n_layer=1, n_head=2, hidden_size=8, vocab_size=9))
    with pytest.raises(UserError, match="BloomForCausalLM is no backbone"):
        motet.compose(small, {})
    with pytest.raises(UserError, match="is no encoder that Motet knows as 'image'"):
        motet.compose(parts.language_model(), {"image": small})
    with pytest.raises(UserError, match="projector for 'audio', and no such encoder"):
        motet.compose(parts.language_model(), {}, {"audio": None})
    image = {"image": parts.vision_tower()}
    with pytest.raises(UserError, match=r"of 'image' is a dict; make it a motet\.models\.projector\.ProjectorConfig"):
        motet.compose(parts.language_model(), image, {"image": {"kind": "linear"}})
    with pytest.raises(UserError, match=r"of 'draw' is a dict; make it a motet\.models\.generator_config\.GeneratorC"):
        motet.compose(parts.language_model(), {}, generators={"draw": {"family": "dit"}})
    with pytest.raises(UserError, match="'backbone' cannot name an encoder"):
        motet.compose(parts.language_model(), {"backbone": parts.vision_tower()})
    hooked = parts.language_model()
    hooked.register_forward_pre_hook(lambda *_: None)
    own, compiled = parts.language_model(), parts.language_model()
    own.forward = print
    compiled.compile(backend="eager")
    for changed in (hooked, own, compiled):
        with pytest.raises(
            UserError, match="Qwen2ForCausalLM has a hook on its forward or backward pass, a forward of its own, or is"
        ):
            motet.compose(changed, {})
    wrapped, tower = parts.language_model(), parts.vision_tower()
    wrapped.model.layers[0].mlp = torch.compile(wrapped.model.layers[0].mlp, backend="eager")
    with pytest.raises(
        UserError, match=r"model\.layers\.0\.mlp of the Qwen2ForCausalLM is what torch\.compile returns"
    ):
        motet.compose(wrapped, {})
    tower.encoder.layers[0] = torch.compile(tower.encoder.layers[0], backend="eager")
    with pytest.raises(UserError, match=r"layers\.0 of the SiglipVisionModel is what torch\.compile returns"):
        motet.compose(parts.language_model(), {"image": tower})
    narrow = ModalityModule(Normed(8), build_projector(8, 16, ProjectorConfig(kind="linear")))
    with pytest.raises(UserError, match="projector of 'image' makes rows of 16 values; the backbone takes rows of 32"):
        motet.compose(parts.language_model(), {"image": narrow})
    draw = example_module("apply_generator").DRAW
    with pytest.raises(UserError, match="'backbone' cannot name a generator"):
        motet.compose(parts.language_model(), {}, generators={"backbone": draw})
    with pytest.raises(UserError, match="'image' names an encoder and a generator"):
        motet.compose(parts.language_model(), {"image": parts.vision_tower()}, generators={"image": draw})
    with pytest.raises(
        UserError, match="The output projector of 'draw' reads rows of 8 values; the backbone's have 32"
    ):
        motet.compose(
            parts.language_model(), {}, generators={"draw": build_generator("draw", draw, 8, torch.float32, 0)}
        )
