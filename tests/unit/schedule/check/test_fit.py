"""A Plan that does not fit its model or cluster gets one sentence."""

from dataclasses import replace

import pytest

from motet.core.errors import UserError
from motet.core.plan import Fill, Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.schedule import check_fit, planned, program_of
from unit.schedule.plans import PLANS, VLM, model, plan

ENCODERS = Unit("encoders", ({"image": 4, "audio": 2},))
LLM = Unit("llm", ({"backbone": 4}, {"backbone": 4}), first_rank=1, pp=2)
COLOCATED = Unit("image", ({"image": 4, "audio": 2},), dp=2)
FIRST = replace(LLM, first_rank=0)


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_fit_pass(name):
    check_fit(PLANS[name])


WRONG = {
    "2 units are named 'llm'": [LLM, LLM],
    "unit 'llm': tp is 0; it must be at least 1": [ENCODERS, replace(LLM, tp=0)],
    "unit 'llm': shard_size is 2; it must divide dp, 1": [ENCODERS, replace(LLM, shard_size=2)],
    "unit 'llm' has no stages; it needs at least one": [ENCODERS, replace(LLM, stages=())],
    "stage 1 of unit 'llm' has no layers; give it some or remove it": [
        ENCODERS,
        replace(LLM, stages=({"backbone": 8}, {})),
    ],
    "stage 0 of unit 'encoders' assigns 0 layers to 'audio'; use at least 1 or remove it": [
        replace(ENCODERS, stages=({"image": 4, "audio": 0},)),
        LLM,
    ],
    "unit 'llm': recompute is given for 1 stage of 2": [ENCODERS, replace(LLM, recompute=({},))],
    "stage 1 recomputes 5 layers of 'backbone'; it has 4": [ENCODERS, replace(LLM, recompute=({}, {"backbone": 5}))],
    "the plan has module 'video', but toy does not; it has image, audio, backbone": [
        replace(ENCODERS, stages=({"video": 4},)),
        LLM,
    ],
    "module 'image' has 4 layers; the plan's stages hold 3": [
        replace(ENCODERS, stages=({"image": 3, "audio": 2},)),
        LLM,
    ],
    "module 'image' has 4 layers; the plan's stages hold 0": [replace(ENCODERS, stages=({"audio": 2},)), LLM],
    "module 'image' is in units encoders, more": [
        ENCODERS,
        LLM,
        Unit("more", ({"image": 4},), first_rank=3),
    ],
    "module 'audio' is replicated and also in stages": [
        Unit("llm", ({"image": 4, "audio": 2}, {"backbone": 8}), pp=2, replicated=("audio",))
    ],
    "unit 'image' replicates modules; only the backbone's": [
        Unit("image", ({"image": 4},), replicated=("audio",)),
        LLM,
    ],
    "unit 'llm' is on ranks 63 to 64; the cluster has ranks 0 to 63": [ENCODERS, replace(LLM, first_rank=63)],
    "unit 'image' has 1 rank and shares some with the backbone, which has 2": [replace(COLOCATED, dp=1), FIRST],
    "zero is 3, over 2 replicas, and 2 pipelines in bubbles take different microbatches; set zero to 0 or 1": [
        replace(COLOCATED, zero=3),
        FIRST,
    ],
    "over 4 replicas, and 2 pipelines in bubbles .*; set shard_size to 2, or to what divides it, or zero to 0 or 1": [
        replace(COLOCATED, zero=2, dp=4),
        replace(FIRST, dp=2),
    ],
    "so its pp .2. and tp . cp .2. must divide the backbone's .4 and 1.": [
        Unit("image", ({"image": 4}, {"audio": 2}), pp=2, tp=2),
        Unit("llm", ({"backbone": 2},) * 4, pp=4),
    ],
    "ranks with tp 2; it must divide the backbone's, 1, .*: let it have tp 1 and cp 2, by which the same ranks": [
        Unit("image", ({"image": 4, "audio": 2},), tp=2, dp=4),
        Unit("llm", ({"backbone": 2},) * 4, pp=4, cp=2),
    ],
    "units 'encoders' and 'llm' share rank 1, but not all": [replace(ENCODERS, dp=2), LLM],
    "unit 'llm': 'image' feeds 'backbone', so its stages must not come after": [
        Unit("llm", ({"backbone": 8}, {"image": 4, "audio": 2}), pp=2)
    ],
    "unit 'llm': stage 0 has 'backbone' before 'audio', which feeds it": [
        Unit("llm", ({"image": 4, "backbone": 8, "audio": 2},))
    ],
    "unit 'encoders' has 1 stage on 2 pipeline ranks; '1f1b' needs 1 a pipeline rank": [
        replace(ENCODERS, pp=2),
        replace(LLM, first_rank=2),
    ],
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_unit_is_named(words):
    made = plan(VLM, *WRONG[words])
    with pytest.raises(UserError, match=words) as caught:
        program_of(made)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")


FSDP = PLANS["fsdp"]
OPTIONS = {
    "batch_size is 15; it must be a multiple of .*, 2": (PLANS["chain"], {"batch_size": 15}),
    "schedule 'zb_h1' is of one pipeline": (PLANS["modality parallel"], {"schedule": "zb_h1"}),
    "'interleaved_1f1b' needs 2 or more a pipeline rank": (PLANS["chain"], {"schedule": "interleaved_1f1b"}),
    "'zb_v' needs 2 a pipeline rank": (PLANS["chain"], {"schedule": "zb_v"}),
    "deferred_warmup is of 'interleaved_1f1b'; the schedule is '1f1b'": (PLANS["chain"], {"deferred_warmup": True}),
    "there are fills, but no unit shares": (PLANS["chain"], {"fills": (Fill(0, "3F0"),)}),
    "filling is 'by_step', but no unit shares the backbone's": (PLANS["chain"], {"filling": "by_step"}),
    "filling is 'by_step', and a fill runs before 0F0.1, a part": (
        PLANS["filled"], {"filling": "by_step", "fills": (Fill(0, "4F0", "0F0.1"),)}
    ),
    "balance 'joint' and order 'both' both deal out": (PLANS["chain"], {"balance": "joint", "order": "both"}),
    "policy is of 'image', and with balance 'off' nothing is balanced by it": (
        FSDP, {"policy": {"image": "padded"}, "balance": "off"}
    ),
    "policy: toy has no module 'video'; it has": (FSDP, {"policy": {"video": "padded"}, "balance": "joint"}),
    "order is of pipelines; under 'data_parallel' balance": (FSDP, {"order": "both"}),
    "microbatch_caps are of backbone; under 'data_parallel' each module of .* must have one: ": (
        FSDP, {"microbatch_caps": {"backbone": 9}}
    ),
    "microbatch_caps are of backbone; they must be of 'backbone' and of one other module of toy": (
        PLANS["chain"], {"microbatch_caps": {"backbone": 9}}
    ),
    "microbatch_caps are of video, backbone; they must": (
        PLANS["chain"], {"microbatch_caps": {"video": 9, "backbone": 9}}
    ),
    "microbatch_caps: the cap of 'image' is 0": (PLANS["chain"], {"microbatch_caps": {"image": 0, "backbone": 9}}),
    "all units must have as many replicas, .*; they have dp 1, 2": (
        PLANS["disaggregated"], {"microbatch_caps": {"image": 9, "backbone": 9}, "order": "both"}
    ),
    "under 'data_parallel' one unit holds all": (PLANS["replicated"], {"schedule": "data_parallel"}),
    "unit 'llm' replicates image, audio beside 4 stages on 2": (
        replace(
            PLANS["replicated"],
            units=(replace(PLANS["replicated"].units[0], stages=({"backbone": 2},) * 4),),
        ),
        {"schedule": "interleaved_1f1b"},
    ),
    "unit 'llm': zero is 3, and stages that share out a replicated module take passes in different orders": (
        replace(PLANS["replicated"], units=(replace(PLANS["replicated"].units[0], zero=3),)), {}
    ),
    "module 'image' must feed the backbone and nothing else, or be fed by it alone": (
        plan(
            replace(VLM, edges=(("image", "audio"), ("image", "backbone"))),
            Unit("all", ({"image": 4, "audio": 2, "backbone": 8},), zero=3),
        ),
        {"schedule": "data_parallel"},
    ),
    "batch_size is 4,000,000, which is 500,000 microbatches on each replica .*; there may be 100,000": (
        plan(VLM, Unit("all", ({"image": 4, "audio": 2, "backbone": 8},), dp=8)), {"batch_size": 4_000_000}
    ),
    "unit 'image' has 2 pipelines beside each .* 1 microbatch": (PLANS["filled"], {"batch_size": 2}),
}  # fmt: skip


@pytest.mark.parametrize("words", OPTIONS)
def test_a_wrong_option_is_named(words):
    made, options = OPTIONS[words]
    with pytest.raises(UserError, match=words) as caught:
        program_of(replace(made, **options))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")


def test_what_runs_in_bubbles_feeds_the_backbone_alone():
    spec = model(image=4, backbone=8, generator=2)
    spec = replace(spec, edges=(*spec.edges, ("image", "generator")))
    units = [FIRST, Unit("image", ({"image": 4},), dp=2), Unit("generator", ({"generator": 2},), first_rank=2)]
    with pytest.raises(UserError, match="'image' feeds 'generator'; what runs in the backbone's bubbles"):
        program_of(plan(spec, *units))


def test_units_must_not_feed_each_other_in_a_circle():
    spec = model(image=4, backbone=8, generator=2)
    both = Unit("both", ({"image": 4}, {"generator": 2}), first_rank=2, pp=2)
    with pytest.raises(UserError, match="units llm, both feed each other in a circle"):
        program_of(plan(spec, FIRST, both))


def test_a_plan_needs_a_backbone():
    spec = model(backbone=2)
    spec = replace(spec, modules=(replace(spec.modules[0], name="llm"),))
    with pytest.raises(UserError, match="no unit holds a module named 'backbone'"):
        program_of(plan(spec, Unit("llm", ({"llm": 2},))))


@pytest.mark.parametrize(
    ("tp", "kv_heads", "what"), [(3, 0, "4 heads"), (4, 2, "2 heads of keys and values"), (2, 1, "1 head of keys")]
)
def test_heads_that_tensor_parallelism_does_not_divide_are_refused(tp, kv_heads, what):
    layer = Transformer(48, 96, num_heads=4, num_kv_heads=kv_heads, causal=True)
    llm = multimodal("toy", language_model(layer, 8, vocab_size=101), [])
    unit = Unit("llm", ({"backbone": 8},), tp=tp)
    with pytest.raises(UserError, match=f"unit 'llm': tp is {tp}, and 'backbone' has {what}.*; tp must divide them"):
        check_fit(Plan(llm, cluster("h100"), (unit,), 8))
    check_fit(Plan(llm, cluster("h100"), (replace(unit, tp=2 if kv_heads != 1 else 1),), 8))


MIXED = Transformer(48, 96, num_heads=4, causal=True, num_experts=6, experts_per_token=2)


def test_experts_that_tensor_parallelism_does_not_divide_are_refused():
    llm = multimodal("toy", language_model(MIXED, 8, vocab_size=101), [])
    unit = Unit("llm", ({"backbone": 8},), tp=4)
    with pytest.raises(UserError, match="unit 'llm': tp is 4, and 'backbone' has 6 experts; tp must divide them"):
        check_fit(Plan(llm, cluster("h100"), (unit,), 8))
    check_fit(Plan(llm, cluster("h100"), (replace(unit, tp=2),), 8))


@pytest.mark.parametrize(
    ("changes", "schedule", "what"),
    [
        ({"dp": 4, "ep": 4}, "1f1b", "layers have 6 experts; ep must divide them"),
        ({"dp": 2, "cp": 2, "ep": 3}, "1f1b", "it must divide dp \\* cp, 4"),
        ({"dp": 2, "tp": 2, "ep": 2}, "1f1b", "and tp 2, and layers have 6 experts; ep \\* tp must divide them"),
        ({"dp": 4, "ep": 4}, "data_parallel", "layers have 6 experts; ep must divide them"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(changes, schedule, what):
    mixture = multimodal("toy", language_model(MIXED, 8, vocab_size=101), [])
    unit = Unit("llm", ({"backbone": 8},), **changes)
    with pytest.raises(UserError, match=f"unit 'llm': ep is {unit.ep}.*{what}"):
        check_fit(Plan(mixture, cluster("h100"), (unit,), 8, schedule=schedule))
    check_fit(Plan(mixture, cluster("h100"), (replace(unit, ep=1),), 8, schedule=schedule))


def test_replicas_that_other_units_feed_in_common_share_experts_of_the_backbone():
    """Their passes meet; those of one replica's context-parallel ranks do so anyway."""
    mixture = multimodal("toy", language_model(MIXED, 8, vocab_size=101), [connect(vit("image", MIXED, 2), 48)])
    image, llm = Unit("image", ({"image": 2},), dp=3, ep=3), Unit("llm", ({"backbone": 8},), 3, dp=2, ep=2)
    made = Plan(mixture, cluster("h100", num_nodes=2), (image, llm), 12)
    with pytest.raises(UserError, match="unit 'image': ep is 3, over replicas that other units feed in common, and it"):
        check_fit(made)
    evenly = image, replace(llm, dp=3, ep=3)
    check_fit(replace(made, units=evenly))
    with pytest.raises(
        UserError, match=r"unit 'image': ep is 3, .*; balance must not be 'auto', which lets any replica"
    ):
        check_fit(replace(made, units=evenly, balance="auto"))
    image = replace(image, ep=1)
    for units, meets in (
        ((image, llm), True),
        ((image, replace(llm, cp=2)), False),
        ((replace(image, dp=1), replace(llm, first_rank=1, dp=1, cp=2)), False),
    ):
        assert {stage.meets for stage in planned(replace(made, units=units)).program.stages} == {False, meets}


def test_what_has_no_experts_shares_none():
    dense = multimodal("toy", language_model(replace(MIXED, num_experts=0, experts_per_token=0), 8, 101), [])
    with pytest.raises(UserError, match="unit 'llm': ep is 2, and backbone have no experts; it must be 1"):
        check_fit(Plan(dense, cluster("h100"), (Unit("llm", ({"backbone": 8},), dp=2, ep=2),), 8))


def test_an_encoder_in_bubbles_may_have_the_degrees_that_a_refusal_names():
    hosts, encoder = Unit("llm", ({"backbone": 2},) * 4, pp=4, tp=3, cp=4), ({"image": 4, "audio": 2},)
    with pytest.raises(UserError, match=r"with tp 6; it must divide the backbone's, 3, .*have tp 3 and cp 4, by"):
        check_fit(plan(VLM, hosts, Unit("image", encoder, tp=6, cp=2, dp=4)))
    check_fit(plan(VLM, hosts, Unit("image", encoder, tp=3, cp=4, dp=4)))
