"""What tensor-parallel ranks hold and compute whole is priced whole, by ranks and in messages."""

import numpy as np
import pytest

from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.cost.memory import parameters_of_rank
from motet.cost.model import Work
from motet.schedule import planned
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing

LAYER = Transformer(256, 512, 4)


def collectives(kind, tp):
    """Of a chain whose encoder has a projector over 16 rows: half of all parameters, if it is one matrix."""
    image = connect(vit("image", LAYER, 1), 256, kind, 16)
    model = multimodal("toy", language_model(LAYER, 2, 1000), [image])
    unit = Unit("all", ({"image": 1, "backbone": 2},), tp=tp, dp=2, zero=0)
    plan = Plan(model, cluster("h100", 1, 8), (unit,), batch_size=4, microbatch_size=1, schedule="1f1b")
    items = ItemLengths(np.arange(4), np.full(4, 256), np.full(4, 16))
    batch = BatchLengths(np.full(4, 100), np.full(4, 50), np.zeros(4, np.int32), {"image": items})
    cost = Analytic(plan.cluster)
    pricing = Pricing(plan, planned(plan), assign_batch(plan, batch, cost), cost)
    return Collectives(pricing), pricing


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_gradients_and_the_optimizer_are_of_all_that_a_rank_holds(kind):
    of_ranks, pricing = collectives(kind, 4)
    (stage,) = pricing.planned.stages
    held = sum(parameters_of_rank(placed.layer, 4) for placed in pricing.layers(stage))
    assert held > sum(placed.layer.parameters for placed in pricing.layers(stage)) / 4
    cost = pricing.cost
    reduce_s = cost.all_reduce_seconds(held * pricing.precision.gradient, stage.data_ranks)
    assert of_ranks.seconds(stage).reduce_s == pytest.approx(reduce_s)
    assert of_ranks.step_s.tolist() == [pytest.approx(cost.step_seconds(held))]


def test_a_single_matrix_behind_an_encoder_is_computed_by_each_rank():
    cost, work = Analytic(cluster("h100")), Work(np.array([4096.0]), np.array([0.0]))
    for kind, is_divided in (("linear", False), ("mlp", True)):
        projector = connect(vit("image", LAYER, 1), 256, kind, 16).layers[-1]
        assert projector.is_divided is is_divided
        whole, share = (cost.layer_seconds("image", projector, work, tp).forward_s[0] for tp in (1, 4))
        assert bool(share < whole) is is_divided
        assert bool(cost.tensor_seconds(projector, work, range(4))[0]) is is_divided
