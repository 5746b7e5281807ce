import pytest
import torch
from torch import nn

from motet.planning.elementwise import mixes


class Own(torch.optim.Optimizer):
    """An optimizer of a user's own, by what it divides gradients by, or draws."""

    def __init__(self, weights, kind):
        super().__init__(weights, {"lr": 0.0})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        given = [weight for group in self.param_groups for weight in group["params"]]
        for weight in given:
            norms = {
                "weight": weight.grad.norm(),
                "weights": torch.cat([each.grad.flatten() for each in given]).norm(),
                "sign": weight.grad.abs(),
                "drawn": torch.rand_like(weight) + 1,
            }
            weight.sub_(self.param_groups[0]["lr"] * weight.grad / norms[self.kind])


class Slow(Own):
    """Moves slow copies after those of another optimizer."""

    def __init__(self, weights, kind):
        self.fast = Own(weights, kind)
        self.__setstate__(self.fast.__dict__ | {"kind": kind})
        self.slow = {}

    def step(self, closure=None):
        self.fast.step()


def weights():
    return [nn.Parameter(torch.ones(shape)) for shape in ((5, 3), (7,), (2, 2, 2), ())]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Adagrad", "SGD"])
def test_optimizers_that_treat_each_element_by_itself(kind, options):
    assert mixes(getattr(torch.optim, kind)(weights(), lr=0.0, **options)) == ""


@pytest.mark.parametrize("kind", [Own, Slow])
@pytest.mark.parametrize(
    ("norm", "expected"), [("weight", "elements"), ("weights", "weights"), ("sign", ""), ("drawn", "")]
)
def test_what_an_optimizer_reads_beside_an_elements_gradients(kind, norm, expected):
    assert mixes(kind(weights(), norm)) == expected


def test_each_kind_of_group_is_tried_and_nothing_is_changed():
    """An optimizer may treat matrices otherwise than the rest."""

    class Split(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data -= weight.grad / (weight.grad.norm() if group["whole"] else 1)

    first, *others = given = weights()
    optimizer = Split([{"params": others, "whole": False}, {"params": [first], "whole": True}], {"lr": 1.0})
    optimizer.register_step_post_hook(lambda *_: pytest.fail("it has not stepped"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = torch.get_rng_state()
    assert mixes(optimizer) == "elements"
    assert all(weight.grad is None and (weight == 1).all() for weight in given) and not optimizer.state
    assert torch.equal(torch.get_rng_state(), state) and scheduler.last_epoch == 0
