"""What `motet profile` prints: the errors of interpolation and fit on batches that were held out from both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from motet.core.arrays import Float64Array
from motet.core.spec import ModelSpec
from motet.cost.decoding import DecodingFit
from motet.cost.fit import RelativeError, Surface, fit_curve, relative_error
from motet.cost.phases import PS_PER_NS, phase_times
from motet.cost.profile import DTYPE_BYTES, LayerTimes, Points, Profile, RunTimes, kept_shares
from motet.cost.profiled import message_fit, run_surfaces

_WIDTH = 140
_FEW_BATCHES = 4
_PASSES: tuple[Callable[[Points], tuple[float, ...]], ...] = (
    lambda points: points.forward_s,
    lambda points: points.input_s,
    lambda points: points.weight_s,
)


def print_tables(profile: Profile, spec: ModelSpec, *, recomputed: Mapping[str, int]) -> None:
    """Print a profile's layers, modules and messages. spec: the whole model, as it trains.

    recomputed: module -> number of its blocks that are recomputed.
    """
    # A file, which is read later, has lines as wide as the tables need.
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    of_modules = _layers(profile), _runs(profile), _kept(profile, spec), _phases(profile, spec, recomputed)
    for table in (*of_modules, _messages(profile), _decoding(profile)):
        if table.row_count:
            console.print(table)
    for sentence in profile.left_out:
        console.print(f"Left out: {sentence}.", markup=False)
    if few := [module.name for module in profile.modules if len(module.grid) < _FEW_BATCHES or not module.held_out]:
        console.print(
            f"There was time for too few batches of {', '.join(few)} to interpolate between, so what is predicted from "
            "this profile is rough. Give more --seconds."
        )


def _decoding(profile: Profile) -> Table:
    """Files a second and core, and how far the fit is from what was measured."""
    table = _table("Decoding on one core", ("encoder", "codec"), ("files", "pixels or samples", "ms a file", "fitted"))
    for times in profile.decoding:
        amounts, seconds = np.array(times.amounts), np.array(times.seconds)
        error = relative_error(DecodingFit.of(times).seconds(amounts), seconds)
        table.add_row(
            times.phase,
            times.codec,
            str(len(amounts)),
            f"{amounts.min():,.0f} to {amounts.max():,.0f}",
            f"{seconds.min() * 1e3:.2f} to {seconds.max() * 1e3:.2f}",
            _error(error),
        )
    return table


@dataclass(frozen=True)
class HeldOut:
    """Seconds of all passes at the held-out batches, float64 [num_batches]: measured, and predicted in two ways."""

    measured: Float64Array
    interpolated: Float64Array
    fitted: Float64Array

    @classmethod
    def of(cls, times: LayerTimes) -> HeldOut:
        """The held-out batches of one layer, predicted from its grid."""
        grid, held_out = times.grid, times.held_out
        rows, pairs = np.array(held_out.rows), np.array(held_out.pairs)
        measured = [seconds(held_out) for seconds in _PASSES]
        interpolated = [Surface(grid.rows, grid.pairs, seconds(grid))(rows, pairs) for seconds in _PASSES]
        fitted = [fit_curve(seconds(grid), grid.rows, grid.pairs).seconds(rows, pairs) for seconds in _PASSES]
        return cls(np.sum(measured, axis=0), np.sum(interpolated, axis=0), np.sum(fitted, axis=0))

    def __add__(self, other: HeldOut) -> HeldOut:
        """The seconds of two layers, one after the other."""
        return HeldOut(
            self.measured + other.measured, self.interpolated + other.interpolated, self.fitted + other.fitted
        )

    @property
    def errors(self) -> tuple[RelativeError, RelativeError]:
        """The errors of interpolation and of the fit."""
        return relative_error(self.interpolated, self.measured), relative_error(self.fitted, self.measured)


def _layers(profile: Profile) -> Table:
    table = _table(
        f"{profile.recipe} on {profile.device}, {profile.precision}",
        ("module", "layer", "tp", "batches"),
        ("forward", "input", "weights", "ns a row", "interpolated", "fitted"),
    )
    for module in profile.modules:
        batches = f"{len(module.grid)} + {len(module.held_out)}"
        for times in module.layers:
            passes_s = np.sum([seconds(times.grid) for seconds in _PASSES], axis=0)
            if not passes_s.any():
                continue
            shares = [f"{sum(seconds(times.grid)) / passes_s.sum():.0%}" for seconds in _PASSES]
            per_row = fit_curve(passes_s, times.grid.rows, times.grid.pairs)
            errors = [_error(error) for error in HeldOut.of(times).errors]
            table.add_row(
                module.name, _label(times), str(times.tp), batches, *shares, f"{per_row.linear_ns:.4g}", *errors
            )
        whole = reduce(add, (HeldOut.of(times) for times in module.layers if times.tp == 1))
        table.add_row(module.name, "all of these", "1", batches, "", "", "", "", *map(_error, whole.errors))
    return table


def _runs(profile: Profile) -> Table:
    """How far seconds of attention of runs are from what is predicted, and from their share of whole items."""
    table = _table(
        "Attention of items that ranks share",
        ("module", "layer", "batches"),
        ("rows of a run", "over whole items", "interpolated", "as whole items"),
    )
    for module in profile.modules:
        for times in module.layers:
            if times.runs is None:
                continue
            grid, held_out = times.runs.grid, times.runs.held_out
            measured, whole, more = run_errors(times.runs)
            ratio = sum(grid.forward_s + grid.input_s) / sum(grid.whole_forward_s + grid.whole_input_s)
            table.add_row(
                module.name,
                _label(times),
                f"{len(grid.rows)} + {len(held_out.rows)}",
                f"{min(grid.rows):,.0f} to {max(grid.rows):,.0f}",
                f"{ratio:.2f}",
                _error(relative_error(whole + more, measured)),
                _error(relative_error(whole, measured)),
            )
    return table


def _kept(profile: Profile, spec: ModelSpec) -> Table:
    """Bytes that layers keep for backward, as they were measured and by the memory model."""
    table = _table("Bytes kept for backward", ("module", "layer"), ("a row", "memory model", "measured over it"))
    for (name, layer), share in kept_shares(profile, spec).items():
        said = layer.activation_width * DTYPE_BYTES[profile.precision]
        times = profile.module(name)
        label = times and (found := times.of_layer(layer)) and _label(found)
        table.add_row(name, label or layer.kind, f"{share * said:,.0f}", f"{said:,}", f"{share:.2f}")
    return table


def run_errors(times: RunTimes) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Seconds of forward and backward of held-out runs, [num_points] each: measured; those of whole items; and what is
    predicted from the grid to be more than these.
    """
    points = times.held_out
    pairs = np.array(points.pairs)
    rows = pairs / np.maximum(np.array(points.keys), 1e-9)
    number = rows / np.maximum(np.array(points.rows), 1e-9)
    more = np.sum([surface(number, rows, pairs) for surface in run_surfaces(times.grid)], axis=0)
    return (
        np.array(points.forward_s) + np.array(points.input_s),
        np.array(points.whole_forward_s) + np.array(points.whole_input_s),
        more,
    )


def _label(times: LayerTimes) -> str:
    _, window, whole = times.reach or (False, 0, False)
    return times.kind + (f", window {window}" if window else ", whole items" if whole else "")


def _phases(profile: Profile, spec: ModelSpec, recomputed: Mapping[str, int]) -> Table:
    found = {
        module.name: phase_times(profile, spec, module.name, recomputed.get(module.name, 0)) for module in spec.modules
    }
    # Of layers that attend to rows of images.
    of_media = ("ns a length with images", "ns an image") if any(times.media_ps for times in found.values()) else ()
    table = _table(
        "Forward and backward of whole modules",
        ("module",),
        ("us a microbatch", "ns a length", "ns a length²", "ns a target", *of_media, "fitted"),
    )
    for name, times in found.items():
        columns = (times.constant_ps / PS_PER_NS, times.linear_ps, times.quadratic_ps, times.target_ps)
        columns += (times.media_row_ps, times.media_ps) if of_media else ()
        table.add_row(name, *(f"{value / PS_PER_NS:.4g}" for value in columns), _error(times.held_out))
    return table


def _messages(profile: Profile) -> Table:
    table = _table(f"Messages between {profile.num_ranks} ranks", ("kind",), ("latency, us", "10⁹ bytes/s", "fitted"))
    for times in profile.messages:
        line = message_fit(times)
        bandwidth = f"{1 / line.linear_ns:.3g}" if line.linear_ns else "-"
        error = relative_error(line.seconds(times.size_bytes), times.seconds)
        table.add_row(times.kind.replace("_", "-"), f"{line.constant_ns / 1e3:.4g}", bandwidth, _error(error))
    return table


def _table(title: str, names: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def _error(error: RelativeError) -> str:
    if not error.num_points:
        return "not held out"
    return f"{error.overall:.1%} (to {error.worst:.0%})"
