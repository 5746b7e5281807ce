"""What a rank of the backbone holds at once, by its Program and without it."""

from itertools import product

import pytest

from motet.planner.bubble_filling.encoder_memory import in_flight, in_flight_under_1f1b
from motet.schedule import one_f_one_b


@pytest.mark.parametrize("num_frozen", [0, 2, 5])
def test_moments_of_1f1b_need_no_program(num_frozen):
    for num_stages, num_microbatches in product((1, 2, 5), (1, 3, 5, 12)):
        has_backward = [stage >= num_frozen for stage in range(num_stages)]
        program = one_f_one_b(num_stages, num_microbatches, has_backward=has_backward)
        for rank in range(num_stages):
            found = in_flight_under_1f1b(num_stages - rank, num_microbatches, has_backward[rank])
            assert found.tolist() == in_flight(program, rank).tolist()
