"""The cluster that a recipe is planned or simulated for: from the command line, its `[cluster]`, or this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.text_files import parse_toml, read_text
from motet.cost.catalogue import DEVICES, ClusterConfig
from motet.train.recipe.toml_text import key_of, set_key

_OPTIONS = {"device": "--cluster", "nodes": "--nodes", "ranks_per_node": "--ranks-per-node"}
_OF_JOB = ("nodes", "tensor_pieces", "tensor_transport")
"""Keys of `[cluster]` that hold for any device."""


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster options of the command line; None is as the recipe has it. device: a name in the catalogue."""

    device: str | None = None
    num_nodes: int | None = None
    ranks_per_node: int | None = None


def cluster_of(
    path: Path,
    stated: ClusterConfig | None,
    options: ClusterOptions,
    default: str | None = None,
    overrides: Sequence[str] = (),
) -> Cluster:
    """The cluster of a job; options outweigh the recipe.

    stated: `[cluster]` of the recipe `path`. default: the device if neither names one. overrides: of the recipe.
    Raises UserError for a device that is not in the catalogue, and if there is no device.
    """
    device = default if options.device is None and stated is None else options.device
    if stated is None and device is None:
        raise UserError(
            f"{path} has no [cluster], so --cluster must name the device to plan for, and --nodes how many."
        )
    kept: dict[str, Any] = {} if stated is None else stated.model_dump(exclude_unset=True)
    for key in () if stated is None else _of_another(stated, device, overrides):
        del kept[key]
    changed = {"device": device, "nodes": options.num_nodes, "ranks_per_node": options.ranks_per_node}
    try:
        return ClusterConfig(**kept | {key: value for key, value in changed.items() if value is not None}).cluster()
    except ValidationError as error:
        wrong = error.errors()[0]
        option = _OPTIONS.get(str(wrong["loc"][0]), "cluster") if wrong["loc"] else "--cluster"
        message = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
        raise UserError(f"{option} {wrong['input']}: {message}.") from error


def words_of_another(
    path: Path, stated: ClusterConfig | None, options: ClusterOptions, overrides: Sequence[str]
) -> str:
    """The sentence on the numbers of `[cluster]` that `cluster_of` leaves out; "" if there are none."""
    others = () if stated is None else _of_another(stated, options.device, overrides)
    keys = [key for key in others if key != "ranks_per_node" or options.ranks_per_node is None]
    if not keys or stated is None:
        return ""
    are = "is of its device" if len(keys) == 1 else "are of its device"
    them = "it is" if len(keys) == 1 else "they are"
    return (
        f"{path}: {', '.join(keys)} in [cluster] {are}, {stated.device}, so {them} not taken for --cluster "
        f"{options.device}; what --set says is."
    )


def words_of_unused_peaks(
    path: Path, stated: ClusterConfig | None, options: ClusterOptions, overrides: Sequence[str], precision: str
) -> str:
    """The sentence on peaks in `[cluster]` none of which is of the job's precision; "" if there are none."""
    if stated is None or not stated.peak_tflops or precision in stated.peak_tflops:
        return ""
    if "peak_tflops" in _of_another(stated, options.device, overrides):
        return ""
    return (
        f"{path}: peak_tflops in [cluster] is of {', '.join(stated.peak_tflops)}, and the job computes in {precision}, "
        f"so it has no effect: the catalogue's peak of {options.device or stated.device} is taken; state {precision}."
    )


def _of_another(stated: ClusterConfig, device: str | None, overrides: Sequence[str]) -> tuple[str, ...]:
    """The numbers of `[cluster]` that are of another device than the one named: all but those of the job.

    What overrides set beside the option is of the device that the option names, unless they set a device.
    """
    if device is None or device.lower() == stated.device:
        return ()
    keys = {key for override in overrides for key in _keys_of_cluster(override)}
    taken = {"device", *_OF_JOB} | (set() if "device" in keys else keys)
    return tuple(key for key in type(stated).model_fields if key in stated.model_fields_set - taken)


def _keys_of_cluster(override: str) -> set[str]:
    """The keys of `[cluster]` that an override sets."""
    tables: dict[str, Any] = {}
    if key_of(override)[0] == "cluster" and "=" in override:
        set_key(tables, override)
    found = tables.get("cluster")
    return set(found) if isinstance(found, dict) else set()


def with_device(path: Path, overrides: Sequence[str], device: str | None) -> list[str]:
    """Overrides of a recipe that also set the device of `[cluster]` to that of --cluster, if that table has none.

    Raises UserError for a recipe that cannot be read, a wrong override, and a device that is not in the catalogue.
    """
    tables = parse_toml(read_text(path, "the recipe"), str(path)) if device is not None else {}
    for override in overrides if device is not None else ():
        if key_of(override)[0] == "cluster":
            set_key(tables, override)
    stated = tables.get("cluster")
    if device is None or not isinstance(stated, dict) or "device" in stated:
        return list(overrides)
    if device.lower() not in DEVICES:
        cluster_of(path, None, ClusterOptions(device))
    return [*overrides, f"cluster.device={device}"]
