"""A Prediction as JSON, for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.simulate.predict.prediction import Prediction

STDOUT = Path("-")


def prediction_tables(strategy: str, prediction: Prediction, why_not: str) -> dict[str, Any]:
    """The figures of a Prediction as plain values; lists have a value a rank, in the order of `ranks`.

    strategy:  its name, as `motet plan` has it.
    bound_s:   seconds that the devices take at their peak for the operations that the model needs; nothing is faster.
    bubbles_s: by kind, mean over ranks.
    why_not:   why the plan cannot be trained; "" if it can.
    """
    return {
        "strategy": strategy,
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


def write_prediction(tables: dict[str, Any] | list[dict[str, Any]], path: Path) -> None:
    """Write the tables of a prediction, or of several, to a file, or print them if `path` is "-".

    Each key of a table has a line of its own, however many ranks there are.
    Raises UserError if the file cannot be written.
    """
    if isinstance(tables, list):
        text = "[\n" + ",\n".join(map(_lines, tables)) + "\n]"
    else:
        text = _lines(tables)
    if path == STDOUT:
        print(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def _lines(table: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()) + "\n}"
