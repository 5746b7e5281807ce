"""A Prediction as JSON, for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.simulate.predict.prediction import Prediction

STDOUT = Path("-")


def prediction_tables(plan: Plan, prediction: Prediction, why_not: str) -> dict[str, Any]:
    """The figures of a Prediction as plain values; lists have a value a rank, in the order of `ranks`.

    bound_s:   seconds that the devices take at their peak for the operations that the model needs; nothing is faster.
    bubbles_s: by kind, mean over ranks.
    why_not:   why the plan cannot be trained; "" if it can.
    """
    return {
        "strategy": plan.schedule,
        "trainable": not why_not,
        "why_not": why_not,
        "step_s": prediction.step_s,
        "bound_s": prediction.model_flops / prediction.peak_flops,
        "bubbles_s": prediction.bubbles.mean_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "tokens_per_s": prediction.tokens_per_s,
        "ranks": prediction.ranks.tolist(),
        "peak_bytes": prediction.peak_bytes.tolist(),
        "memory_bytes": {part: held.tolist() for part, held in prediction.memory_bytes.items()},
        "capacity_bytes": prediction.capacity_bytes,
    }


def write_prediction(tables: dict[str, Any], path: Path) -> None:
    """Write the tables to a file, or print them if `path` is "-". Raises UserError if the file cannot be written."""
    text = json.dumps(tables, indent=1)
    if path == STDOUT:
        print(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
