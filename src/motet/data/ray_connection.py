"""This process's connection to Ray, which is imported when a run asks for it (`pip install motet[ray]`)."""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from motet.core.errors import UserError

_CONNECT_LIMIT_S = 10.0


def connected_address(**options: Any) -> str:
    """The address of the cluster to which `ray.init` has connected this process. Raises UserError."""
    # Statistics of use would go to Ray's makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = ray_package()
    logging.getLogger("ray").setLevel(logging.ERROR)
    where = "on this machine" if options["address"] in ("local", "auto") else f"at {options['address']}"
    check_listens(options["address"])
    try:
        with own_signals():
            context = ray.init(log_to_driver=False, configure_logging=False, **options)
    except Exception as error:  # Ray raises many kinds, also plain ones.
        if "ersion mismatch" in str(error):
            theirs = _after(str(error), "Ray: ")
            raise UserError(
                f"The Ray cluster {where} has Ray {theirs[0]} on Python {_after(str(error), 'Python: ')[0]}, and this "
                f"rank has Ray {ray.__version__} on Python {platform.python_version()}; install the same on both."
            ) from error
        if options["address"] == "local":
            raise UserError(
                f"Ray does not start on this machine: {why_of_ray(error)}; end other work here, or name a cluster that "
                "runs in data.ray_address."
            ) from error
        raise UserError(
            f"Ray {where} cannot be reached: {why_of_ray(error)}; where it asks for a token, set RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN."
        ) from error
    return str(context.address_info["gcs_address"])


def token_variables(token: str) -> dict[str, str]:
    """The variables by which a process proves itself; they count when it imports Ray."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}


def check_listens(address: str) -> None:
    """Raise UserError if nothing listens at "host:port": Ray itself would try for minutes."""
    host, separator, port = address.rpartition(":")
    if not separator:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"Ray at {address} cannot be reached: {why_of_ray(error)}.") from error


def ray_package() -> Any:
    """The package. Raises UserError if it is not installed."""
    try:
        with own_signals():
            import ray
    except ImportError as error:
        raise UserError(
            f'data.service = "ray" needs Ray, which is not installed ({error}); run pip install "motet[ray]".'
        ) from error
    return ray


@contextmanager
def own_signals() -> Iterator[None]:
    """Keep this process's handling of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _after(text: str, words: str) -> list[str]:
    """What follows `words` in each line that has them."""
    return [line.partition(words)[2].strip() for line in text.splitlines() if words in line] or ["of another version"]


def why_of_ray(error: Exception) -> str:
    """The first line of an error, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
