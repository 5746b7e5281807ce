"""Plans into Programs, and what their stages stand for."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from motet.core.errors import UserError
from motet.core.plan import Fill, Unit
from motet.schedule import Kind, coarse_fills, dumps, fillable, loads, planned, program_of, validate
from motet.schedule.generators.bubble_filling import EncoderPipeline
from motet.schedule.plan_units import sharing_ranks
from motet.schedule.program import COMPUTE_KINDS
from unit.schedule.plans import PLANS, VLM, model, plan

COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)


@pytest.fixture(params=PLANS)
def any_plan(request):
    return PLANS[request.param]


def passes(program, rank):
    return " ".join(str(action) for action in program.actions[rank] if action.kind in COMPUTE)


def test_every_plan_gives_a_proper_program(any_plan):
    found = planned(any_plan)
    validate(found.program)
    assert found.program == program_of(any_plan)
    assert loads(dumps(found.program)) == found.program
    assert len(found.stages) == found.program.num_stages
    for stage, planned_stage in zip(found.program.stages, found.stages, strict=True):
        assert (stage.rank, stage.module) == (planned_stage.rank, "+".join(planned_stage.modules))


def test_kinds_of_stages_are_those_of_stages_that_are_listed(any_plan):
    found = planned(any_plan)
    listed = replace(found, stages=tuple(found.stages))
    assert listed == found
    for kind, same in zip(found.kinds, listed.kinds, strict=True):
        assert kind.stage == same.stage
        for column, other in zip(kind[1:], same[1:], strict=True):
            assert column.tolist() == other.tolist()


def without_overlap(of):
    return replace(of, cluster=replace(of.cluster, device=replace(of.cluster.device, overlaps=False)))


def test_where_collectives_hold_the_compute_stream_every_plan_can_still_run(any_plan):
    """Encoders in bubbles too, whose parameters are gathered before all passes, and reduced after them."""
    validate(program_of(without_overlap(any_plan)), holds_up=True)


def test_a_rank_receives_right_before_it_computes_whatever_its_collectives_hold_up(any_plan):
    program = program_of(without_overlap(any_plan))
    for row in program.actions:
        for action, after in pairwise(row):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                assert after.kind in (action.kind, *COMPUTE_KINDS), (str(action), str(after))


def test_encoders_of_which_one_waits_for_the_reduction_of_another_can_run():
    """One pipeline of the image encoder ends before the other, and the rank beside it still sends audio's gradients."""
    units = (
        Unit("llm", ({"backbone": 4}, {"backbone": 4}), pp=2),
        Unit("image", ({"image": 4},), dp=2),
        Unit("audio", ({"audio": 1}, {"audio": 1}), pp=2),
    )
    made = replace(PLANS["filled"], units=units, schedule="1f1b", deferred_warmup=False, batch_size=3, fills=())
    filled = program_of(without_overlap(made))
    validate(filled, holds_up=True)
    assert {row[-2].kind for row in filled.actions} == {Kind.REDUCE}
    # Ranks that overlap what they gather would else wait in a receive before it, and others for them.
    rows = program_of(replace(made, units=units)).actions
    assert all(
        action.kind is Kind.GATHER for row in rows for action in row[: [one.kind for one in row].count(Kind.GATHER)]
    )
    assert any(Kind.GATHER in {action.kind for action in row} for row in rows)


def test_gradients_pass_through_a_frozen_stage_in_bubbles():
    """The last stage of the encoders' unit is frozen, and image's gradients come back through it."""
    units = (
        Unit("llm", ({"backbone": 4}, {"backbone": 4}), pp=2),
        Unit("encoders", ({"image": 4}, {"audio": 2}), pp=2),
    )
    made = replace(PLANS["filled"], units=units, schedule="1f1b", deferred_warmup=False, fills=())
    last = planned(made).stages[3]
    assert last.layers == {"audio": (0, 2)} and last.has_backward and not last.trainable


def test_a_stage_has_the_passes_that_it_is_said_to_have(any_plan):
    found = planned(any_plan)
    kinds = {(a.stage, a.kind) for row in found.program.actions for a in row}
    parts = Counter((a.stage, a.kind, a.microbatch) for row in found.program.actions for a in row)
    for number, stage in enumerate(found.stages):
        assert ((number, Kind.B) in kinds or (number, Kind.I) in kinds) == stage.has_backward
        assert (number, Kind.STEP) not in kinds or stage.trainable
        assert ((number, Kind.REDUCE) in kinds) == (stage.trainable and len(stage.data_ranks) > 1)
        assert parts[number, Kind.F, stage.microbatches[0]] == stage.num_parts


def test_replicas_hold_every_layer_once(any_plan):
    held = Counter()
    for stage in planned(any_plan).stages:
        replicated = set(stage.modules) & set(stage.unit.replicated)
        for name, (first, stop) in stage.layers.items():
            assert not replicated or (first, stop) == (0, any_plan.model.module(name).num_layers)
            held.update((stage.unit.name, stage.replica, name, layer) for layer in range(first, stop))
    times = {name: len(unit.stages) for unit in any_plan.units for name in unit.replicated}
    for unit in any_plan.units:
        replicas = {key[1] for key in held if key[0] == unit.name}
        layers = [(name, n) for name in unit.modules for n in range(any_plan.model.module(name).num_layers)]
        for replica in replicas:
            assert all(held[unit.name, replica, name, n] == times.get(name, 1) for name, n in layers)


def test_stages_of_a_unit_share_its_ranks_and_examples(any_plan):
    stages = planned(any_plan).stages
    for unit in any_plan.units:
        own = [stage for stage in stages if stage.unit.name == unit.name]
        inside = set(range(unit.first_rank, unit.first_rank + unit.num_ranks))
        assert all(set(stage.ranks) <= inside and set(stage.data_ranks) <= inside for stage in own)
        assert all(len(stage.ranks) == unit.tp * sharing_ranks(any_plan, unit) for stage in own)
        ranks = [rank for stage in {(s.replica, s.rank): s for s in own}.values() for rank in stage.ranks]
        assert len(ranks) == len(set(ranks))
    ends = {stage.examples[1] for stage in stages}
    for name in any_plan.model.modules:
        taken = {(s.examples, s.microbatches) for s in stages if name.name in s.modules}
        counted = sum((stop - first) * len(microbatches) for (first, stop), microbatches in taken)
        assert counted == max(ends) * planned(any_plan).program.num_microbatches


def test_a_chain_of_one_unit():
    program = program_of(PLANS["chain"])
    assert [stage.module for stage in program.stages] == ["image+audio", "backbone", "backbone"]
    assert passes(program, 2) == " ".join(f"2F{i} 2B{i}" for i in range(8))


def test_recomputation_precedes_backward():
    assert passes(program_of(PLANS["chain gpipe"]), 1).endswith("1R14 1B14 1R15 1B15")


def test_modalities_run_in_parallel():
    found = planned(PLANS["modality parallel"])
    assert found.program.sources(3) == (1, 2)
    assert [stage.has_backward for stage in found.stages] == [True, True, False, True, True]
    assert [stage.layers for stage in found.stages[:2]] == [{"image": (0, 1)}, {"image": (1, 4)}]


def test_replicated_encoders_are_reduced_over_all_stages():
    found = planned(PLANS["replicated"])
    assert found.stages[2].modules == ("image",)
    assert found.stages[2].data_ranks == (0, 1, 2, 3)
    assert found.stages[0].data_ranks == (0, 1)
    assert not found.stages[4].has_backward


def test_disaggregated_units_take_examples_by_their_size():
    found = planned(PLANS["disaggregated"])
    by_unit = {}
    for stage in found.stages:
        by_unit.setdefault(stage.unit.name, []).append(stage.examples)
    assert by_unit["image"] == [(0, 3), (3, 6)]
    assert by_unit["llm"] == [(0, 2)] * 2 + [(2, 4)] * 2 + [(4, 6)] * 2
    assert by_unit["generator"] == [(0, 6)]
    assert [sink for source, sink in found.program.edges if source == 0] == [3, 5]
    assert [stage.ranks for stage in found.stages[3:7]] == [(3, 4), (9, 10), (5, 6), (11, 12)]
    assert found.stages[3].data_ranks == (3, 5, 7)


def test_fsdp_has_a_stage_a_module_on_every_rank():
    found = planned(PLANS["fsdp"])
    assert found.program.num_ranks == 4
    assert [stage.modules[0] for stage in found.stages[:3]] == ["image", "audio", "backbone"]
    assert found.stages[-1].examples == (6, 8)
    assert Kind.EXCHANGE_F in {a.kind for a in found.program.actions[0]}
    joint = program_of(replace(PLANS["fsdp"], balance="joint"))
    assert Kind.EXCHANGE_F not in {a.kind for a in joint.actions[0]}


def test_interleaved_chunks_lie_on_ranks_in_turn():
    found = planned(PLANS["interleaved"])
    assert [stage.rank for stage in found.stages] == [0, 1, 0, 1]
    assert planned(PLANS["zb_v"]).stages[2].rank == 1


def test_a_frozen_stage_has_no_backward_under_zero_bubble():
    assert passes(program_of(PLANS["zb_h1"]), 0) == " ".join(f"0F{i}" for i in range(16))


def test_encoders_in_bubbles_are_laid_over_the_backbones_ranks():
    found = planned(PLANS["filled"])
    image, audio = found.stages[4:6], found.stages[6:]
    assert [stage.rank for stage in image] == [0, 1]
    assert [stage.microbatches for stage in image] == [(0, 2), (1, 3)]
    assert [stage.ranks for stage in image] == [(0, 1), (4, 5)]
    assert [stage.rank for stage in audio] == [0, 1]
    assert [sharing_ranks(PLANS["filled"], stage.unit) for stage in audio] == [2, 2]
    assert next(action for action in found.program.actions[0] if action.kind in COMPUTE).stage == 4


def test_fills_say_where_encoders_run():
    spec = model(image=4, backbone=4)
    made = plan(
        spec, Unit("llm", ({"backbone": 2},) * 2, pp=2), Unit("image", ({"image": 4},), dp=2),
        batch_size=3,
    )  # fmt: skip
    unfilled, encoders = fillable(made, split=True)
    backbone = unfilled.program
    assert encoders == (
        EncoderPipeline("image", (0,), (0, 2), 0, (True,)),
        EncoderPipeline("image", (1,), (1,), 0, (True,)),
    )
    coarse = program_of(replace(made, fills=coarse_fills(backbone, encoders, num_parts=2)))
    validate(coarse)
    assert passes(coarse, 1).startswith("3F1.0 3F1.1 1F0.0")
    fills = [Fill(0, "2F0", "0F0.0"), Fill(1, "3F1", "1F0.0"), Fill(1, "3F2.0", "1F0.3"), Fill(1, "3F2.1", "1B0.1")]
    with pytest.raises(UserError, match="fill 3F1 is no pass of its stage, or the stage's other passes have another"):
        program_of(replace(made, fills=tuple(fills)))
    fills[1:2] = [Fill(1, f"3F1.{part}", "1F0.0") for part in (0, 1)]
    ends = [Fill(0, "2B0"), Fill(1, "3B1"), Fill(1, "3B2")]
    found = planned(replace(made, fills=(*fills, *ends)))
    validate(found.program)
    assert [stage.num_parts for stage in found.stages] == [8, 8, 1, 2]
    assert [stage.microbatches for stage in found.stages[2:]] == [(0,), (1, 2)]
    assert passes(found.program, 1).startswith("3F1.0 3F1.1 1F0.0 1F0.1 1F0.2 3F2.0 1F0.3")
    with pytest.raises(UserError, match="no fill says where the forward passes of stage 3 run"):
        program_of(replace(made, fills=tuple(fill for fill in fills if fill.rank == 0)))


def test_gradients_pass_through_what_is_frozen():
    spec = model(image=2, audio=(2, 0), backbone=(4, 0))
    stages = planned(plan(spec, Unit("all", ({"image": 2}, {"audio": 2}, {"backbone": 4}), pp=3))).stages
    assert [stage.has_backward for stage in stages] == [True, True, True]
    assert [stage.trainable for stage in stages] == [True, False, False]


def test_zero_with_single_shards_shards_nothing():
    unit = Unit("all", ({"image": 4, "audio": 2, "backbone": 8},), dp=4, shard_size=1)
    assert Kind.GATHER not in {action.kind for action in program_of(plan(VLM, unit)).actions[0]}


def test_encoders_that_are_shared_out_in_each_microbatch_take_the_same_ones():
    """Two replicas of the backbone in an island, each with two pipelines of the encoder, share these out."""
    made = PLANS["filled and disaggregated"]
    backbone, image, generator = made.units
    made = replace(made, units=(backbone, replace(image, zero=3, shard_size=4), generator))
    program = program_of(made)
    validate(program, host_waits=True)
    rows = [[str(action) for action in row if action.kind is Kind.REDUCE] for row in program.actions[:4]]
    encoders = range(5, 9)  # Pipelines of the first replica, then those of the second.
    for stage, row in zip(encoders, rows, strict=True):
        own = [text for text in row if text.startswith(f"{stage}R")]
        assert own == [*(f"{stage}REDUCE{i}" for i in program.stages[stage].microbatches), f"{stage}REDUCE"]
    unfilled, pipelines = fillable(made)
    *first, third, fourth = pipelines
    swapped = replace(third, microbatches=fourth.microbatches), replace(fourth, microbatches=third.microbatches)
    fills = coarse_fills(unfilled.program, [*first, *swapped])
    with pytest.raises(UserError, match=r"zero is 3, and fills give its pipelines .* different microbatches; give the"):
        program_of(replace(made, fills=fills))
    program_of(replace(made, units=(backbone, image, generator), fills=fills))
