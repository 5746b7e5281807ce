import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.simulate.predict.batch import draw_batch
from unit.simulate.jobs import PLANS, lengths


def test_a_workload_without_a_modules_lengths_is_refused():
    plan, batch = PLANS["modality parallel"], lengths(30)
    assert draw_batch(plan, Workload("table.csv", batch), np.random.default_rng(0)).num_examples == plan.batch_size
    empty = ItemLengths(*(np.zeros(0, np.int64) for _ in range(3)))
    lacking = BatchLengths(batch.sequence, batch.num_targets, batch.home, {**batch.items, "audio": empty})
    with pytest.raises(UserError, match=r"'audio' needs lengths, but table.csv has none"):
        draw_batch(plan, Workload("table.csv", lacking), np.random.default_rng(0))
