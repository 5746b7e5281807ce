"""Operations of a step, as MFU and HFU count them, against torch's counter on the ranks that execute it.

The counter knows of no mask, so all pairs of causal attention count here.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dist.test_absent import IMAGE, IMG, TRANSFORMER, draw
from motet.assign.step import joined
from motet.core.plan import Plan, Unit
from motet.core.workload import home_ranks
from motet.cost.flops import batch_flops
from motet.dispatch import ItemExchange, assemble
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm
from motet.models.spec import model_spec
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.schedule import planned
from motet.simulate.predict.predict import predict_assigned
from parity.test_gradients import Case, orchestrator_of
from parity.tiny import VOCABULARY
from ranks import run_ranks
from unit.models.test_flops import all_pairs
from unit.simulate.jobs import Linear, cluster

MICROBATCHES = (((IMG,), (), (IMG, IMG), ()), ((), ()), ((IMG,), ()))
"""Examples by the media that they have; the second microbatch has none."""


def counted(rank, num_ranks, microbatches, backbone, freeze, recompute):
    """(operations of all ranks, model, lengths and assignments of the microbatches) of a step."""
    mesh, config = build_mesh(torch.device("cpu")), FSDPConfig(recompute=recompute)
    parts = ModelConfig(
        backbone=BackboneConfig(family="qwen2", config=TRANSFORMER | {"num_key_value_heads": 1}, train=backbone),
        encoders={IMG: EncoderConfig(family="siglip", config=IMAGE["siglip"])},
        freeze=freeze,
    )
    model = build_mllm(parts, VOCABULARY, torch.float64)
    spec = model_spec(model)
    spec = replace(spec, modules=tuple(map(all_pairs, spec.modules)))
    shard(model, mesh, config)
    exchange = ItemExchange(mesh.host_group, orchestrator_of(model, num_ranks, Case()), dict(model.encoders.items()))
    rng, batches = np.random.default_rng(0), []
    for media in microbatches:
        examples = [draw(rng, each) for each in media]
        home = home_ranks(len(examples), num_ranks)
        got = exchange([example for example, at in zip(examples, home) if at == rank])
        batch = assemble(got.decision, got.lengths, rank, got.sequences, got.media)
        batches.append(batch.to("cpu", dtype=torch.float64))
    step = TrainStep(model, mesh)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step.run(batches)
    assigned = [(batch.lengths, dict(batch.decision.assignments)) for batch in batches]
    return counter.get_total_flops(), spec, assigned


def step_of(num_ranks, microbatches, *options):
    ranks = run_ranks(counted, num_ranks, microbatches, *options)
    _, spec, assigned = ranks[0]
    return sum(flops for flops, _, _ in ranks), spec, assigned


LEARNS = {"encoder alone": (False, ()), "all": (True, ()), "last block": (True, ("*.embed_tokens.*", "*.layers.0.*"))}
OF_EACH = [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(LEARNS)]


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("learns", OF_EACH)
def test_hardware_computes_the_passes_that_the_program_has(learns, recompute):
    done, spec, assigned = step_of(2, MICROBATCHES, *LEARNS[learns], recompute)
    blocks = spec.num_blocks if recompute else {}
    counted = (batch_flops(spec, lengths, recomputed=blocks, backward_of="microbatch") for lengths, _ in assigned)
    trained = sum(sum(of_modules.values()) for of_modules in counted)
    whole = {name: len(spec.module(name).blocks) for name in (IMG, "backbone")}
    unit = Unit("all", (whole,), dp=2, recompute=(whole,) if recompute else ())
    plan = Plan(spec, cluster(2), (unit,), 12, schedule="data_parallel", microbatch_size=2)
    cost = Linear(plan.cluster)
    predicted = predict_assigned(plan, planned(plan), joined(*map(list, zip(*assigned))), cost)
    assert predicted.hardware_flops == trained
    assert predicted.model_flops == sum(sum(batch_flops(spec, lengths).values()) for lengths, _ in assigned)
    if not recompute:  # torch leaves out the last product of what is recomputed.
        assert done == trained


@pytest.mark.parametrize("learns", OF_EACH)
def test_the_model_needs_what_each_example_takes_alone(learns):
    done, spec, assigned = step_of(1, [[media] for part in MICROBATCHES for media in part], *LEARNS[learns], False)
    assert done == sum(sum(batch_flops(spec, lengths).values()) for lengths, _ in assigned)
