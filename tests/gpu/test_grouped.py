"""The kernel that multiplies the rows of all experts at once, against the loop over them."""

import pytest
import torch

from motet import grouped
from unit.test_grouped import COUNTS, kernel_calls, one_kernel_is_the_loop  # noqa: F401


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("waits", [False, True])
def test_one_kernel_is_the_loop(kernel_calls, counts, waits):  # noqa: F811
    one_kernel_is_the_loop("cuda", counts, waits)
    assert len(kernel_calls) == 3


def test_what_the_kernel_does_not_take_is_a_loop():
    rows, weights = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((8, 12), (2, 8, 12)))
    assert not grouped.is_one_kernel(rows, weights)  # Rows of 24 bytes.
    assert not grouped.is_one_kernel(rows.float(), weights.float())
