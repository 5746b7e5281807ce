"""The schedule as a function of the step, and which parameters decay."""

from contextlib import nullcontext

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from motet.core.errors import UserError
from motet.models.fused import SplitLinear
from motet.train.optimizer import (
    OptimizerConfig,
    build_optimizer,
    check_groups,
    learning_rate,
    never_reached,
    parameter_groups,
    set_learning_rate,
)
from motet.train.optimizers import OPTIMIZERS


def rates(num_steps, **options):
    config = OptimizerConfig(lr=1.0, **options)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_warm_up_rises_to_the_peak_and_decay_ends_at_the_final_ratio():
    found = rates(11, warmup_steps=5, schedule="linear", final_lr_ratio=0.5)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_cosine_is_half_way_in_the_middle_and_ends_in_the_last_step():
    found = rates(11, schedule="cosine", final_lr_ratio=0.0)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0)


def test_constant_stays():
    assert rates(4, schedule="constant", warmup_steps=1) == [1.0, 1.0, 1.0, 1.0]


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert rates(2, warmup_steps=4) == pytest.approx([0.25, 0.5])


def test_matrices_decay_and_norms_biases_embeddings_and_frozen_parameters_do_not():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[3].requires_grad_(False)
    groups = parameter_groups(model, OptimizerConfig(lr=1e-3))
    assert {group["weight_decay"]: len(group["params"]) for group in groups} == {0.0: 4, 0.1: 1}
    decayed = next(group["params"] for group in groups if group["weight_decay"])
    assert decayed[0] is model[1].weight
    assert sum(len(group["params"]) for group in build_optimizer(model, OptimizerConfig(lr=1e-3)).param_groups) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"name": "adafactor"},
            "adafactor keeps means over rows and columns of whole matrices, which ranks that share",
        ),
        ({"name": "muon"}, "muon multiplies whole matrices, in bfloat16, which ranks that share weights do not have"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, 'betas has no effect with name = "sgd"'),
        ({"momentum": 0.9}, 'momentum has no effect with name = "adamw"'),
        ({"name": "rmsprop", "nesterov": True}, 'nesterov has no effect with name = "rmsprop"'),
        ({"name": "sgd", "momentum": 0.0, "nesterov": True}, "nesterov = true needs a momentum above 0"),
    ],
)
def test_optimizers_and_options_that_are_not_computed(options, said):
    with pytest.raises(ValidationError, match=said):
        OptimizerConfig(lr=1e-3, **options)


def test_each_optimizer_has_torchs_options_and_as_many_moments_as_it_says():
    for name, kind in OPTIMIZERS.items():
        for momentum in (None, 0.0, 0.5) if "momentum" in kind.options else (None,):
            config = OptimizerConfig(name=name, lr=1e-3, **({} if momentum is None else {"momentum": momentum}))
            model = nn.Linear(3, 2)
            optimizer = build_optimizer(model, config)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            state = optimizer.state[model.weight]
            assert (
                sum(each.shape == model.weight.shape for each in state.values() if each is not None)
                == config.num_moments
            )
    assert OptimizerConfig(lr=1).weight_decay == 0.1 and OptimizerConfig(name="adam", lr=1).weight_decay == 0
    assert OptimizerConfig(name="sgd", lr=1).momentum == 0.9 and OptimizerConfig(name="adagrad", lr=1).eps == 1e-10


def test_wsd_stays_and_falls_in_its_last_steps():
    found = rates(11, schedule="wsd", warmup_steps=2, decay_steps=4, final_lr_ratio=0.0)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates(20, schedule="wsd", final_lr_ratio=0.2) == pytest.approx([1.0] * 18 + [0.6, 0.2])
    assert rates(3, schedule="wsd", warmup_steps=1, decay_steps=9, final_lr_ratio=0.0) == pytest.approx([1, 1, 0])


def test_decay_steps_are_refused_where_they_have_no_effect():
    with pytest.raises(ValueError, match='decay_steps has no effect with schedule = "linear"'):
        OptimizerConfig(lr=1.0, schedule="linear", decay_steps=5)


def test_a_final_rate_is_refused_where_the_rate_stays():
    with pytest.raises(ValueError, match='final_lr_ratio has no effect with schedule = "constant"'):
        OptimizerConfig(lr=1.0, schedule="constant", final_lr_ratio=0.0)
    whole = OptimizerConfig(lr=1.0, schedule="constant").model_dump()
    assert OptimizerConfig(**whole).final_lr_ratio == 0.1, "as a run's recipe.toml has all defaults"


def two_layers(*groups, **options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, OptimizerConfig(lr=1e-2, weight_decay=0.1, groups=groups, **options)


def options_of(model, groups):
    """Name -> (learning rate, weight decay)."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(weight)]: (group["lr"], group["weight_decay"]) for group in groups for weight in group["params"]}


def test_the_last_group_that_names_a_weight_counts_for_what_it_says():
    model, config = two_layers(
        {"weights": "0.*", "lr": 1e-3, "weight_decay": 0.5}, {"weights": ["*.weight"], "lr": 4e-2}
    )
    assert options_of(model, build_optimizer(model, config).param_groups) == {
        "0.weight": pytest.approx((4e-2, 0.5)),
        "0.bias": pytest.approx((1e-3, 0)),
        "1.weight": pytest.approx((4e-2, 0.1)),
        "1.bias": pytest.approx((1e-2, 0)),
    }


def test_rates_of_groups_follow_the_schedule():
    model, config = two_layers({"weights": "0.*", "lr": 5e-2})
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 2e-3)
    rates_now = {name: lr for name, (lr, _) in options_of(model, optimizer.param_groups).items()}
    assert rates_now == pytest.approx({"0.weight": 1e-2, "0.bias": 1e-2, "1.weight": 2e-3, "1.bias": 2e-3})


def test_groups_without_weights_that_learn_are_refused():
    model, config = two_layers({"weights": "0.*", "lr": 1e-3}, {"weights": ["1.*", "2.*"], "weight_decay": 0.0})
    with pytest.raises(UserError, match=r"optimizer\.groups\[1\]\.weights: no weight of the model matches '2\.\*'"):
        check_groups(model, config)
    model[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"groups\[0\]\.weights: all weights that match '0\.\*' are frozen"):
        check_groups(model, config)
    with pytest.raises(ValueError, match="a group needs `lr` or `weight_decay`"):
        two_layers({"weights": "0.*"})


@pytest.mark.parametrize("pattern", ["*.bias", "0.*"])
def test_a_decay_of_weights_that_do_not_decay_is_refused(pattern):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    for options, is_wrong in (({"weight_decay": 0.3, "lr": 1e-3}, True), ({"weight_decay": 0.0}, False)):
        config = OptimizerConfig(lr=1e-2, groups=[{"weights": [pattern], **options}])
        with pytest.raises(UserError, match=r"groups\[0\]\.weight_decay has no effect") if is_wrong else nullcontext():
            check_groups(model, config)
    check_groups(model, OptimizerConfig(lr=1e-2, groups=[{"weights": [pattern, "1.weight"], "weight_decay": 0.3}]))


def test_a_group_that_later_ones_overrule_is_refused():
    first, rest = {"weights": "0.*", "lr": 1e-3}, {"weights": "*", "lr": 4e-2}
    check_groups(*two_layers(rest, first))
    check_groups(*two_layers(first | {"weight_decay": 0.2}, {"weights": "*.bias", "lr": 4e-2}))
    with pytest.raises(UserError, match=r"groups\[0\]\.lr has no effect, as groups behind it name the same weights"):
        check_groups(*two_layers(first, rest))
    with pytest.raises(UserError, match=r"groups\[0\]\.weight_decay has no effect"):
        check_groups(*two_layers(first | {"weight_decay": 0.2}, {"weights": "0.*", "weight_decay": 0.3}))


def test_parts_of_a_product_have_the_options_of_the_whole():
    model, config = two_layers({"weights": "1.weight", "lr": 5e-2})
    model[1] = SplitLinear(model[1], [1, 3])
    found = options_of(model, build_optimizer(model, config).param_groups)
    assert {name: lr for name, (lr, _) in found.items()} == pytest.approx(
        {"0.weight": 1e-2, "0.bias": 1e-2, "1.0.weight": 5e-2, "1.0.bias": 1e-2, "1.1.weight": 5e-2, "1.1.bias": 1e-2}
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup_steps": 9}, "warmup_steps = 9 is more than the 8 steps of the run, so the rate rises to 0.889 at"),
        ({"warmup_steps": 8}, ""),
        ({"warmup_steps": 5, "schedule": "wsd", "decay_steps": 4}, "so the rate has 3 to fall in."),
        ({"warmup_steps": 4, "schedule": "wsd", "decay_steps": 4}, ""),
        ({"warmup_steps": 8, "schedule": "wsd"}, ""),
    ],
)
def test_a_schedule_for_which_a_run_is_too_short_is_said(options, said):
    sentence = never_reached(OptimizerConfig(lr=1.0, **options), 8)
    assert said in sentence if said else sentence == ""
