"""The choice of a cost model: analytic, or from a profile of the device."""

from __future__ import annotations

from pathlib import Path

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.cost.analytic import Analytic
from motet.cost.model import CostModel

_MEASURED_IN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def cost_model(cluster: Cluster, precision: str, profile_file: Path | None = None) -> CostModel:
    """The cost model of a profile or, without one, the analytic model. precision: the plan's.

    Raises UserError for a precision of which the cluster's devices state no peak, for a file that is no profile, for a
    profile in another precision, and for a cluster that hides what a profile measures.
    """
    if profile_file is None:
        return Analytic(cluster, precision)
    # Imported here: most jobs have no profile, and building the classes that read one takes time.
    from motet.cost.profile import read_profile
    from motet.cost.profiled import Profiled

    profile = read_profile(profile_file)
    if profile.precision != _MEASURED_IN.get(precision):
        raise UserError(
            f"{profile_file} was measured in {profile.precision} and the plan computes in {precision}: profile a "
            "recipe that computes as the plan does, or change the plan's precision."
        )
    if precision not in cluster.device.peak_flops:
        raise UserError(
            f"The plan computes in {precision}, and {cluster.device.name} has no peak in it (it has "
            f"{', '.join(cluster.device.peak_flops)}): choose a precision that it has, or another device."
        )
    if cluster.tensor_pieces > 1:
        raise UserError(
            f"{profile_file} has messages as they are, and tensor_pieces = {cluster.tensor_pieces} hides those of "
            "tensor parallelism behind products, which no profile measures; leave one of them out."
        )
    return Profiled(profile, cluster)
