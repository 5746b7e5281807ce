"""A Ray of one's own, where none runs yet: in a process beside the rank, which ends with it."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from contextlib import suppress

from motet.core.errors import UserError
from motet.data.ray_connection import connected_address, ray_package, token_variables

_START_LIMIT_S = 120.0
_STORE_BYTES_AN_ACTOR = 128 << 20
_MIN_STORE_BYTES = 80 << 20
"""Ray refuses a store below 75 MiB."""
_END_LIMIT_S = 60.0
_GRACE_S = 5.0
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from motet.data.ray_server import serve_ray; serve_ray(int(sys.argv[1]))"
)


class RayServer:
    """A Ray of one node on this machine, in a process of its own, which ends with this process, however that ends.

    A signal to the group of this process, as torchrun and terminals send them, does not reach it.

    address: "host:port". token: what processes must know to connect; "" where Ray's own variables say.
    """

    def __init__(self, num_cpus: int) -> None:
        """Raises UserError if Ray does not start."""
        # Whoever reaches a cluster without a token can run anything there.
        self.token = "" if "RAY_AUTH_MODE" in os.environ else secrets.token_hex(32)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(num_cpus), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | token_variables(self.token),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = ""
        if select.select([self._process.stdout], [], [], _START_LIMIT_S)[0]:
            said = self._process.stdout.readline()
        if not said.startswith("{"):
            self._process.kill()
            self._process.wait()
            raise UserError(f"Ray does not start on this machine within {_START_LIMIT_S:g} s.")
        answer = json.loads(said)
        if "error" in answer:
            self._process.wait()
            raise UserError(answer["error"])
        self.address: str = answer["address"]

    def close(self) -> None:
        """End Ray, with all its actors."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write("end\n")
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> RayServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_ray(num_cpus: int) -> None:
    """The process of a `RayServer`: Ray until its standard input says "end", or ends."""
    store_bytes = max(num_cpus * _STORE_BYTES_AN_ACTOR, _MIN_STORE_BYTES)
    options = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": store_bytes}
    try:
        print(json.dumps({"address": connected_address(address="local", **options)}), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    if not sys.stdin.readline():
        # The rank is dead. The others, which Ray's end would end too, first say so.
        time.sleep(_GRACE_S)
    ray_package().shutdown()
