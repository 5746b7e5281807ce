"""What rounding makes of a drawn model: the tolerance to which Plans are held on it."""

from __future__ import annotations

import torch

from parity.planned import NUM_STEPS, TOLERANCE, PlannedCase, expected, in_one_process, largest_error, share_off

NUM_SHIFTS, MARGIN = 4, 10
LOOSEST = 1e-8
"""No model is held to less, whatever rounding makes of it. What a Plan does wrong is many orders above."""


def tolerance_of(case: PlannedCase) -> float:
    """The largest error, as a share, that a Plan may have on the model and the examples of a case in float64.

    TOLERANCE, or MARGIN times what one process is off by if its weights are shifted by their last bit, up or down at
    random, the largest of NUM_SHIFTS times; at most LOOSEST. AdamW makes a step of its own size of any gradient, so
    that a model with one that is nearly zero multiplies what was rounded.
    """
    return min(max(TOLERANCE, MARGIN * max(_shifted(case, seed) for seed in range(NUM_SHIFTS))), LOOSEST)


def _shifted(case: PlannedCase, seed: int) -> float:
    figures, *tables = expected(case)
    model, generator = case.model(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) - 1
            parameter *= 1 + signs * torch.finfo(parameter.dtype).eps
    found, *others = in_one_process(case, model, NUM_STEPS, has_draws=bool(case.dropout))
    errors = [share_off(*pair) for of_step in zip(found, figures) for pair in zip(*of_step)]
    for table, wanted in zip(others, tables):
        errors += [largest_error(table[name], tensor) for name, tensor in wanted.items() if tensor is not None]
    return max(errors)
