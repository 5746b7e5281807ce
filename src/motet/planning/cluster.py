"""What a recipe is planned or simulated for: `[cluster]` of the recipe, the command line, or else this machine."""

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
class GivenCluster:
    """What the command line says; None is as the recipe has it. device: of the catalogue."""

    device: str | None = None
    num_nodes: int | None = None
    ranks_per_node: int | None = None


def cluster_of(path: Path, stated: ClusterConfig | None, given: GivenCluster, default: str | None = None) -> Cluster:
    """stated: `[cluster]` of the recipe `path`. default: the device where neither names one.

    Raises UserError for a device that is not in the catalogue, or that nothing names.
    """
    device = default if given.device is None and stated is None else given.device
    if stated is None and device is None:
        raise UserError(
            f"{path} has no [cluster], so --cluster must name the device to plan for, and --nodes how many."
        )
    kept: dict[str, Any] = {} if stated is None else stated.model_dump(exclude_unset=True)
    if device is not None and stated is not None and device.lower() != stated.device:
        # Of another device, what the recipe says of one does not hold.
        kept = {"nodes": stated.nodes}
    changed = {"device": device, "nodes": given.num_nodes, "ranks_per_node": given.ranks_per_node}
    try:
        return ClusterConfig(**kept | {key: value for key, value in changed.items() if value is not None}).cluster()
    except ValidationError as error:
        wrong = error.errors()[0]
        option = _OPTIONS.get(str(wrong["loc"][0]), "cluster") if wrong["loc"] else "--cluster"
        message = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
        raise UserError(f"{option} {wrong['input']}: {message}.") from error
