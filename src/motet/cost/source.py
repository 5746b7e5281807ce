"""The choice of a cost model: analytic, or from a profile of the device."""

from __future__ import annotations

from pathlib import Path

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.plan import ADAM_MOMENTS
from motet.cost.analytic import Analytic
from motet.cost.catalogue import DEVICES, device_called
from motet.cost.model import CostModel

_MEASURED_IN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def cost_model(
    cluster: Cluster,
    precision: str,
    profile_file: Path | None = None,
    *,
    moments: int = ADAM_MOMENTS,
    any_device: bool = True,
) -> CostModel:
    """The cost model of a profile or, without one, the analytic model. precision, moments: the plan's.

    any_device: also of a profile that was measured on another device than the cluster's, as where a run on a CPU tries
                a Plan that was made for GPUs.
    Raises UserError for a precision of which the cluster's devices state no peak, for a file that is no profile, for a
    profile in another precision or of another device, and for a cluster that hides what a profile measures.
    """
    if profile_file is None:
        return Analytic(cluster, precision, moments=moments)
    # Imported here: most jobs have no profile, and building the classes that read one takes time.
    from motet.cost.profile import read_profile
    from motet.cost.profiled import Profiled

    profile = read_profile(profile_file)
    if profile.precision != _MEASURED_IN.get(precision):
        raise UserError(
            f"{profile_file} was measured in {profile.precision} and the plan computes in {precision}: profile a "
            "recipe that computes as the plan does, or change the plan's precision."
        )
    device = cluster.device.name
    if not any_device and device in DEVICES and is_measured_elsewhere(profile.device, device):
        raise UserError(
            f"{profile_file} was measured on {profile.device}, and its seconds say nothing of {device}: profile on "
            f"{device}, or choose --cluster {_catalogued(profile.device)}."
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


def is_measured_elsewhere(name: str, here: str) -> bool:
    """Whether a profile whose device has this name is of another device of the catalogue than `here`; of an unknown
    one, "", nothing is."""
    return bool(here) and _catalogued(name) not in ("", here)


def _catalogued(name: str) -> str:
    """What the catalogue calls the device of a profile; "" if it does not have it."""
    known = device_called(name)
    return "cpu" if name.startswith("cpu") else known.name if known else ""
