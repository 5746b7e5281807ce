"""A profile: a file of seconds measured on a device, of each kind of layer, of messages, and of the optimizer.

It stores the measured points themselves, so a reader can interpolate or fit. It also stores held-out points of other
lengths. Neither the interpolation nor the fit sees these, so their error is the error to expect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from motet.core.errors import UserError
from motet.core.limited import Count, NumRanks, Parameters
from motet.core.spec import Layer, ModelSpec
from motet.core.text_files import read_json

PROFILE_FILE = "profile.json"
"""The default name of a profile in a run's folder."""
_Seconds = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
_Difference = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]
Column = tuple[_Seconds, ...]
Batch = tuple[tuple[Annotated[Count, Field(gt=0)], Annotated[Count, Field(gt=0)]], ...]
"""The items of a measured batch as (number of items, length of each)."""
MessageKind = Literal["gather", "reduce_scatter", "all_reduce", "exchange", "send", "call"]
"""call: what a message takes of the thread that computes, at either end, as the mean of both; only of a CPU."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Points(_Stored):
    """Medians of repeated measurements of a layer, a point a batch of the module. Columns have equal lengths.

    rows, pairs: as in `cost.model.Work`. forward_s, input_s, weight_s: as in `cost.model.LayerSeconds`.
    kept_bytes: what forward keeps for backward, each storage once; (), or 0 of all batches, if the memory model says it
                (`profiling.kept.kept_once`).
    """

    rows: Column
    pairs: Column
    forward_s: Column
    input_s: Column
    weight_s: Column
    kept_bytes: Column = ()

    @model_validator(mode="after")
    def _equal(self) -> Points:
        if len(self.kept_bytes) not in (0, len(self.rows)):
            raise ValueError("kept_bytes must be as many as rows, or none")
        lengths = {len(column) for column in (self.rows, self.pairs, self.forward_s, self.input_s, self.weight_s)}
        if len(lengths) > 1:
            raise ValueError("rows, pairs and seconds must be equally many")
        return self


class RunPoints(_Stored):
    """Seconds of attention alone, of packs whose rows two ranks share in runs of one size, and of the same packs whole.

    Of both ranks together, each without messages. Columns have equal lengths, a point a pack and size of a run.
    length: of the pack's longest item. rows: of a run, in the mean. pairs: of the pack. keys: that a row attends to.
    forward_s, input_s: of the runs. whole_forward_s, whole_input_s: of the whole pack.
    """

    length: Column = ()
    rows: Column = ()
    pairs: Column = ()
    keys: Column = ()
    forward_s: Column = ()
    input_s: Column = ()
    whole_forward_s: Column = ()
    whole_input_s: Column = ()

    @model_validator(mode="after")
    def _equal(self) -> RunPoints:
        if len({len(getattr(self, name)) for name in type(self).model_fields}) > 1:
            raise ValueError("the columns of runs must be equally long")
        return self


class RunTimes(_Stored):
    """Points to interpolate between, and those that measure its error, as of `LayerTimes`."""

    grid: RunPoints
    held_out: RunPoints = RunPoints()


class LayerTimes(_Stored):
    """Seconds of one kind of layer of a module, on one of `tp` tensor-parallel ranks.

    weights: `core.spec.Layer.weights` of the whole layer, and
    reach:   `core.spec.Attention.reach` tell layers of one kind apart. None of a layer without attention; of one with
             attention, if the file is older than the field.
    hooks_s: the part of forward_s and of weight_s that FSDP's hooks take in any batch; 0 if it was profiled without.
    waits_s: what forward, input and weight seconds become more, in any batch, where gradients of weights wait
             (`core.spec.Layer.defers_weights`); 0 if it was not measured.
    grid, held_out: the points of the module's batches of that name.
    runs: what its attention takes of items that ranks share; None if it was not measured, and of layers on several
          tensor-parallel ranks, which have some of its heads.
    """

    kind: str
    weights: Parameters
    reach: tuple[bool, Count, bool] | None = None
    tp: NumRanks = 1
    hooks_s: tuple[_Seconds, _Seconds] = (0.0, 0.0)
    waits_s: tuple[_Difference, _Difference, _Difference] = (0.0, 0.0, 0.0)
    grid: Points
    held_out: Points
    runs: RunTimes | None = None


class ModuleTimes(_Stored):
    """Seconds of the layers of one module.

    grid:     the batches for interpolation and fit.
    held_out: the batches that measure the error of both.
    grid_squares, held_out_squares: of a module that computes items in segments, the sum of their squared lengths in
                                    each batch; () for one that does not.
    entry_s: what a forward pass that begins inside the module takes beside its layers; 0 if it was not measured.
    """

    name: str
    grid: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    layers: tuple[LayerTimes, ...]
    grid_squares: Column = ()
    held_out_squares: Column = ()
    entry_s: _Seconds = 0.0

    @model_validator(mode="after")
    def _a_point_a_batch(self) -> ModuleTimes:
        for layer in self.layers:
            if len(layer.grid.rows) != len(self.grid) or len(layer.held_out.rows) != len(self.held_out):
                raise ValueError(f"layer {layer.kind!r} must have a point for each batch of module {self.name!r}")
        for batches, squares in ((self.grid, self.grid_squares), (self.held_out, self.held_out_squares)):
            if squares and len(squares) != len(batches):
                raise ValueError(f"module {self.name!r} must have a sum of squares for each batch, or none")
        return self

    def of_layer(self, layer: Layer, tp: int = 1) -> LayerTimes | None:
        """The times of a layer; None if it was not measured.

        A file that says no reach of attention has one layer for all of its kind and weights.
        """
        alike = [
            times for times in self.layers if (times.kind, times.weights, times.tp) == (layer.kind, layer.weights, tp)
        ]
        for reach in (None if layer.attention is None else layer.attention.reach, None):
            for times in alike:
                if times.reach == reach:
                    return times
        return None

    def amounts(self, *, held_out: bool = False, padded: bool) -> tuple[Sequence[float], Sequence[float]]:
        """The sum of lengths and the sum of squared lengths of each batch, with each segment as an item.

        padded: each item is as long as the longest.
        """
        batches, squares = (self.held_out, self.held_out_squares) if held_out else (self.grid, self.grid_squares)
        sums, square_sums = amounts(batches, padded=padded)
        return sums, squares or square_sums


class MessageTimes(_Stored):
    """Seconds of one kind of message or collective by size, as `cost.model.CostModel` counts sizes.

    num_ranks, num_nodes: the number of ranks that took part, and of their nodes.
    """

    kind: MessageKind
    num_ranks: Annotated[NumRanks, Field(gt=1)]
    num_nodes: NumRanks
    size_bytes: Column
    seconds: Column

    @model_validator(mode="after")
    def _equal(self) -> MessageTimes:
        if not any(self.size_bytes) or len(self.size_bytes) != len(self.seconds):
            raise ValueError("size_bytes and seconds must be equally many, and a size above 0")
        return self


class OptimizerTimes(_Stored):
    """Seconds of the optimizer's update by number of parameters on one rank."""

    num_parameters: Column
    seconds: Column

    @model_validator(mode="after")
    def _equal(self) -> OptimizerTimes:
        if len(self.num_parameters) != len(self.seconds):
            raise ValueError("num_parameters and seconds must be equally many")
        return self


class DecodingTimes(_Stored):
    """Seconds of one core in which files of a phase become items, by what the files hold.

    phase:   the encoder that reads the items. codec: the ending of the files' names, ".jpg".
    amounts: pixels of images, samples of clips, a file each.
    """

    phase: str
    codec: str
    amounts: Column
    seconds: tuple[Annotated[_Seconds, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _equal(self) -> DecodingTimes:
        if not self.amounts or len(self.amounts) != len(self.seconds):
            raise ValueError("amounts and seconds must be equally many, and one at least")
        return self


class Profile(_Stored):
    """All that was measured on one device.

    recipe:      the name of the recipe's file.
    device:      the name of the device.
    precision:   the dtype that layers compute in, by torch's name.
    torch:       torch's version.
    measured_at: UTC, ISO 8601.
    left_out:    what could not be measured, and why, a sentence each.
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
    decoding: tuple[DecodingTimes, ...] = ()
    left_out: tuple[str, ...] = ()

    def module(self, name: str) -> ModuleTimes | None:
        """The times of a module; None if it was not measured."""
        return next((module for module in self.modules if module.name == name), None)

    def why_unshared(self, name: str, tp: int) -> str:
        """Why layers of a module could not be measured on `tp` ranks that share them; "" if that was not tried."""
        starts = unshared(name, ""), unshared(name, "", tp)
        found = (said.removeprefix(start) for said in self.left_out for start in starts if said.startswith(start))
        return next(found, "")

    def write(self, path: Path) -> None:
        """Write the profile as JSON. Raises UserError if the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"The profile {path} cannot be written: {error.strerror}.") from error


DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number, by the names that profiles have for the types in which modules compute."""


def kept_shares(profile: Profile, model: ModelSpec) -> dict[tuple[str, Layer], float]:
    """As of `cost.memory.KeptShares`: what layers of a model were measured to keep, over what they are said to.

    Over all batches of the grid: large ones weigh most, in which what does not grow with rows is least.
    """
    shares = {}
    for module in model.modules:
        times = profile.module(module.name)
        for layer in dict.fromkeys(module.layers) if times is not None else ():
            found = times and times.of_layer(layer)
            if found and layer.activation_width and any(found.grid.kept_bytes):
                said = sum(found.grid.rows) * layer.activation_width * DTYPE_BYTES[profile.precision]
                shares[module.name, layer] = sum(found.grid.kept_bytes) / said
    return shares


def unshared(name: str, why: str, tp: int = 0) -> str:
    """What `Profile.left_out` says of a module whose layers ranks cannot share. tp: how many; 0: any number."""
    return f"{name}: tensor parallelism{f' over {tp} ranks' if tp else ''}: {why}"


def in_words(layer: Layer) -> str:
    """What tells a layer from the others of its module."""
    words = f"{layer.kind!r} of {layer.weights} weights"
    if layer.attention is None or not (layer.attention.window or layer.attention.whole):
        return words
    return f"{words} and " + (f"a window of {layer.attention.window} rows" if layer.attention.window else "whole items")


def amounts(batches: tuple[Batch, ...], *, padded: bool) -> tuple[list[int], list[int]]:
    """The sum of lengths and the sum of squared lengths of each batch. padded: each item is as long as the longest."""
    sums, square_sums = [], []
    for batch in batches:
        longest = max((length for _, length in batch), default=0)
        items = [(count, longest if padded else length) for count, length in batch]
        sums.append(sum(count * length for count, length in items))
        square_sums.append(sum(count * length**2 for count, length in items))
    return sums, square_sums


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises UserError for a file that is missing, is no profile, or has another format."""
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
