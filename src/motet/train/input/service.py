"""Opens what decodes the media of a run: processes of each rank, or actors of Ray (`data.service`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np

from motet.core.words import counted_words
from motet.data.config import LoadingConfig
from motet.data.decode import LIMIT, Decoder
from motet.data.ray_actors import RayCluster
from motet.data.ray_server import RayServer
from motet.data.transforms import Transform
from motet.runtime.groups import wait_limit
from motet.train.world import World


def open_decoder(
    config: LoadingConfig,
    transforms: Mapping[str, Transform],
    world: World,
    say: Callable[[str], None],
    cleanup: ExitStack,
    *,
    reads: bool = True,
) -> Decoder:
    """The Decoder of this rank, which `cleanup` closes. A collective.

    reads: whether this rank reads media. Where some do not, those that do have their actors of Ray, too.
    Raises JointUserError where Ray is not installed, cannot be reached, or has no CPU for the actors.
    """
    cluster, num_workers = None, config.num_workers
    if config.service == "ray":
        cluster = _joined(config, world, cleanup)
        num_workers = _share(config, world, reads)
    limit_s = LIMIT * wait_limit(world.device).total_seconds()
    with world.together():
        decoder = cleanup.enter_context(Decoder(transforms, num_workers, cluster, limit_s=limit_s))
    if cluster is not None:
        whose = "that runs at " + cluster.address if not _is_embedded(config) else "of this run"
        nodes = "a node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
        shares = world.gather(num_workers)
        of_each = f"{counted_words(num_workers, 'actor')} of each rank"
        if not all(shares):
            of_each = (
                f"{counted_words(sum(shares), 'actor')} of {np.count_nonzero(shares)} of {world.num_ranks} ranks, "
                "which read media"
            )
        say(f"Ray decodes: {of_each}, in a cluster {whose}, with {nodes}; its store holds one result of each.")
    return decoder


def _share(config: LoadingConfig, world: World, reads: bool) -> int:
    """How many actors this rank has of those of all ranks that share a cluster. A collective."""
    sharing = world.on_node if _is_embedded(config) else range(world.num_ranks)
    reading = [rank for rank, each in enumerate(world.gather(reads)) if each and rank in sharing]
    if not reads:
        return 0
    return len(range(reading.index(world.rank), config.num_workers * len(sharing), len(reading)))


def _is_embedded(config: LoadingConfig) -> bool:
    return not (config.ray_address or os.environ.get("RAY_ADDRESS"))


def _joined(config: LoadingConfig, world: World, cleanup: ExitStack) -> RayCluster:
    """This rank's connection to Ray. A collective.

    Where no Ray runs, the first rank of each machine starts it for all ranks there.
    """
    # No rank goes on to its end while another still leaves Ray: it would be met by that rank's last word as it exits.
    cleanup.enter_context(_ending_together(world))
    if not _is_embedded(config):
        address = config.ray_address or os.environ["RAY_ADDRESS"]
        with world.together():
            return cleanup.enter_context(RayCluster(address, config.num_workers * world.num_ranks))
    first, num_actors = world.on_node.start, config.num_workers * len(world.on_node)
    server = None
    with world.together():
        if world.rank == first:
            server = cleanup.enter_context(RayServer(num_actors))
    address, token = world.gather(None if server is None else (server.address, server.token))[first]
    # Ray ends when all ranks have left it.
    cleanup.enter_context(_ending_together(world))
    with world.together():
        return cleanup.enter_context(RayCluster(address, num_actors, token))


@contextmanager
def _ending_together(world: World) -> Iterator[None]:
    """Wait for all ranks at the end of the block, unless it fails. A collective."""
    yield
    world.barrier()
