"""The loss scale moves as torch's GradScaler does, and keys that have no effect are refused."""

import numpy as np
import pytest
import torch

from motet.runtime.fsdp import FSDPConfig
from motet.runtime.loss_scale import LossScale


def test_it_moves_as_the_scale_of_a_grad_scaler():
    own, scaler = LossScale(2.0**10, grow_after=3), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflows in np.random.default_rng(0).random(200) < 0.2:
        scaler.scale(weight.sum()).backward()
        if overflows:
            weight.grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        own.overflowed() if overflows else own.passed()
        assert own.value == scaler.get_scale()


def test_it_stays_where_every_gradient_is_exact():
    scale = LossScale(2.0, grow_after=1)
    for _ in range(3):
        scale.overflowed()
    assert scale.value == 1 and not scale.can_fall
    for _ in range(40):
        scale.passed()
    assert scale.value == 2.0**32


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss_scale": 1024.0}, "loss_scale has no effect without param_dtype"),
        ({"loss_scale_steps": 10, "param_dtype": "bfloat16"}, "loss_scale_steps has no effect"),
        ({"loss_scale": 1000.0, "param_dtype": "float16"}, "1000 is no power of two"),
        ({"reduce_dtype": "float16"}, "needs param_dtype"),
    ],
)
def test_what_would_do_nothing_or_round_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        FSDPConfig(**given)
