"""What was measured on a device, as a file: seconds of each kind of layer, of messages, and of the optimizer.

A profile holds the measured points themselves, so that whoever reads it can interpolate or fit as it needs to, and
beside them points of other lengths, which neither sees and whose error is therefore the error to expect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from motet.core.errors import UserError
from motet.core.limits import Count, NumRanks, Parameters
from motet.core.text_files import read_json

PROFILE_FILE = "profile.json"
"""Its name in a run's folder, where nothing else is said."""
Column = tuple[Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)], ...]
Batch = tuple[tuple[Annotated[Count, Field(gt=0)], Annotated[Count, Field(gt=0)]], ...]
"""The items of a measured batch as (number of items, length of each)."""
MessageKind = Literal["gather", "reduce_scatter", "all_reduce", "exchange", "send"]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Points(_Stored):
    """Medians of repeated measurements, a point a batch of the module. Columns are of equal length.

    rows, pairs: of the layer, as in `cost.model.Work`. forward_s, input_s, weight_s: as in `cost.model.LayerSeconds`.
    """

    rows: Column
    pairs: Column
    forward_s: Column
    input_s: Column
    weight_s: Column

    @model_validator(mode="after")
    def _equal(self) -> Points:
        lengths = {len(column) for column in (self.rows, self.pairs, self.forward_s, self.input_s, self.weight_s)}
        if len(lengths) > 1:
            raise ValueError("rows, pairs and seconds must be equally many")
        return self


class LayerTimes(_Stored):
    """One kind of layer of a module, as one of `tp` tensor-parallel ranks computes it.

    weights: of the layer, whole (`core.spec.Layer.weights`): which of a module's layers of that kind it is.
    grid, held_out: at the module's batches of the same name.
    """

    kind: str
    weights: Parameters
    tp: NumRanks = 1
    grid: Points
    held_out: Points


class ModuleTimes(_Stored):
    """grid: the batches that are interpolated between and fitted to; held_out: those that tell the error of both."""

    name: str
    grid: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    layers: tuple[LayerTimes, ...]

    @model_validator(mode="after")
    def _a_point_a_batch(self) -> ModuleTimes:
        for layer in self.layers:
            if len(layer.grid.rows) != len(self.grid) or len(layer.held_out.rows) != len(self.held_out):
                raise ValueError(f"layer {layer.kind!r} must have a point for each batch of module {self.name!r}")
        return self


class MessageTimes(_Stored):
    """Seconds of one kind of message or collective, over sizes as `cost.model.CostModel` counts them.

    num_ranks, num_nodes: that took part, and the nodes that they were on.
    """

    kind: MessageKind
    num_ranks: Annotated[NumRanks, Field(gt=1)]
    num_nodes: NumRanks
    size_bytes: Column
    seconds: Column


class OptimizerTimes(_Stored):
    """Seconds of an update of that many parameters on one rank."""

    num_parameters: Column
    seconds: Column


class Profile(_Stored):
    """recipe: name of the file that it was made from. device: name of the device. precision: what layers compute in.
    torch: its version. measured_at: UTC, ISO 8601. left_out: what could not be measured, and why.
    """

    format: Literal[1] = 1
    recipe: str
    device: str
    precision: str
    torch: str
    measured_at: str
    num_ranks: NumRanks
    modules: tuple[ModuleTimes, ...]
    messages: tuple[MessageTimes, ...] = ()
    optimizer: OptimizerTimes | None = None
    left_out: tuple[str, ...] = ()

    def module(self, name: str) -> ModuleTimes | None:
        return next((module for module in self.modules if module.name == name), None)

    def write(self, path: Path) -> None:
        """As JSON. Raises UserError where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"The profile {path} cannot be written: {error.strerror}.") from error


def amounts(batches: tuple[Batch, ...], *, padded: bool) -> tuple[list[int], list[int]]:
    """Per batch the sum of lengths and the sum of squared lengths; padded: each item as long as the longest."""
    found: tuple[list[int], list[int]] = ([], [])
    for batch in batches:
        longest = max((length for _, length in batch), default=0)
        filled = [(count, longest if padded else length) for count, length in batch]
        found[0].append(sum(count * length for count, length in filled))
        found[1].append(sum(count * length**2 for count, length in filled))
    return found


def read_profile(path: Path) -> Profile:
    """Raises UserError with one sentence for a file that is missing, is no profile, or is one of another format."""
    if not path.is_file():
        raise UserError(f"Cannot read the profile {path}: there is no such file; `motet profile RECIPE` makes one.")
    value = read_json(path, "the profile")
    try:
        return Profile.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path} is no profile of format 1: {where}: {first['msg']}; make it anew with `motet profile`."
        ) from error
