"""Memory by rank: ranks that hold the same are one row."""

import numpy as np

from motet.core.timeline import Timeline
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.memory_table import memory_table


def of(parameters, activations) -> Prediction:
    held = {"parameters": np.array(parameters), "activations": np.array(activations)}
    return Prediction(Timeline.of(), np.arange(100, 100 + len(parameters)), 1, 1, 1, 1, 1.0, held, 80 * 10**9)


def test_alike_ranks_are_one_row_and_the_fullest_is_first():
    gbytes = 10**9
    table = memory_table(of([gbytes] * 6, [2 * gbytes, 2 * gbytes, 3 * gbytes, 2 * gbytes, 2 * gbytes, 2 * gbytes + 1]))
    assert table.unit == "GB" and table.parts == ("parameters", "activations") and table.left_out == 0
    assert table.rows == (("102", (1.0, 3.0, 4.0)), ("100-101, 103-105", (1.0, 2.0, 3.0)))


def test_of_many_different_ranks_the_fullest_and_the_emptiest_are_shown():
    table = memory_table(of([0] * 3000, np.arange(3000) * 10**8))
    assert len(table.rows) == 12 and table.left_out == 2988
    assert table.rows[0].ranks == "3,099" and table.rows[-1].ranks == "100"
    sizes = [row.sizes[-1] for row in table.rows]
    assert sizes == sorted(sizes, reverse=True)


def test_many_ranges_are_counted_and_small_models_are_in_megabytes():
    table = memory_table(of([10**6, 2 * 10**6] * 8, [0] * 16))
    assert table.unit == "MB"
    assert table.rows[0].ranks == "101, 103, 105, 107 and 4 more"
