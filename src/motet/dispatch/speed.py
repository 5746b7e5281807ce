"""`[balance.speed]` of a recipe: the speed of devices and links that a prediction assumes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from motet.balance import ASSUMED_SPEEDS, Link, Speed
from motet.core.limited import Latency, Rate


class SpeedConfig(BaseModel):
    """`[balance.speed]`: what a rank computes and sends in a second. `method = "auto"` predicts steps from it.

    These are constants, not measurements: a run can be repeated, and all ranks decide alike. Only the ratio between
    computing and exchanging matters. A field that is not given takes an assumed value for the kind of device:

    - "cuda": what training reaches on a current data-centre GPU; for each GPU 4/5 of a network card of 200 Gbit/s;
    - any other: one CPU core and a loopback.

    An assumed link between nodes is never faster than the link inside a node.

    Example:
        >>> speed = SpeedConfig(device_tflops=300.0, link_gbytes_per_s=10.0).resolved("cuda")
        >>> speed.flops_per_s, speed.link.bytes_per_s, speed.inter_node.bytes_per_s
        (300000000000000.0, 10000000000.0, 10000000000.0)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    device_tflops: Rate | None = Field(
        None,
        description="10^12 operations a second that training reaches on a rank; cuda 400, cpu 0.04",
    )
    link_gbytes_per_s: Rate | None = Field(
        None, description="10^9 bytes a second that a rank sends in its node; cuda 40, cpu 1"
    )
    link_latency_us: Latency | None = Field(
        None, description="microseconds of an empty exchange inside a node; cuda 50, cpu 300"
    )
    inter_node_gbytes_per_s: Rate | None = Field(
        None, description="10^9 bytes a second that a rank sends to other nodes; cuda 20, cpu 1"
    )
    inter_node_latency_us: Latency | None = Field(
        None, description="microseconds of an empty exchange between nodes; cuda 50, cpu 300"
    )

    def resolved(self, device_type: str) -> Speed:
        """The given values, and the assumed ones of a type of device ("cuda" or any other) for the rest."""
        assumed = ASSUMED_SPEEDS["cuda" if device_type == "cuda" else "cpu"]
        flops_per_s = assumed.flops_per_s if self.device_tflops is None else self.device_tflops * 1e12
        return Speed(flops_per_s, *self.links(assumed.link, assumed.inter_node))

    def links(self, link: Link, inter_node: Link) -> tuple[Link, Link]:
        """The links inside a node and between nodes: given values first, then those of `link` and `inter_node`.

        Without given values the link between nodes is at most as fast as the one inside.
        """
        inside = _link(self.link_gbytes_per_s, self.link_latency_us, link)
        return inside, _link(
            self.inter_node_gbytes_per_s, self.inter_node_latency_us, inter_node.no_faster_than(inside)
        )


def _link(gbytes_per_s: float | None, latency_us: float | None, default: Link) -> Link:
    return Link(
        default.bytes_per_s if gbytes_per_s is None else gbytes_per_s * 1e9,
        default.latency_s if latency_us is None else latency_us * 1e-6,
    )
