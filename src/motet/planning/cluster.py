"""The cluster that a recipe is planned or simulated for: from the command line, its `[cluster]`, or this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.cost.catalogue import ClusterConfig

_OPTIONS = {"device": "--cluster", "nodes": "--nodes", "ranks_per_node": "--ranks-per-node"}


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster options of the command line; None is as the recipe has it. device: a name in the catalogue."""

    device: str | None = None
    num_nodes: int | None = None
    ranks_per_node: int | None = None


def cluster_of(
    path: Path, stated: ClusterConfig | None, options: ClusterOptions, default: str | None = None
) -> Cluster:
    """The cluster of a job; options outweigh the recipe.

    stated: `[cluster]` of the recipe `path`. default: the device if neither names one.
    Raises UserError for a device that is not in the catalogue, and if there is no device.
    """
    device = default if options.device is None and stated is None else options.device
    if stated is None and device is None:
        raise UserError(
            f"{path} has no [cluster], so --cluster must name the device to plan for, and --nodes how many."
        )
    kept: dict[str, Any] = {} if stated is None else stated.model_dump(exclude_unset=True)
    if device is not None and stated is not None and device.lower() != stated.device:
        # What the recipe says of its own device does not hold for another one.
        kept = {"nodes": stated.nodes, "tensor_pieces": stated.tensor_pieces}
    changed = {"device": device, "nodes": options.num_nodes, "ranks_per_node": options.ranks_per_node}
    try:
        return ClusterConfig(**kept | {key: value for key, value in changed.items() if value is not None}).cluster()
    except ValidationError as error:
        wrong = error.errors()[0]
        option = _OPTIONS.get(str(wrong["loc"][0]), "cluster") if wrong["loc"] else "--cluster"
        message = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
        raise UserError(f"{option} {wrong['input']}: {message}.") from error
