"""How ranks find each other: what the environment must say, and who can reach what they open."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from cli.meddling import Meddling, listening, motet
from cli.test_stop import STEP, arguments
from cli.tiny_job import losses, write_tiny_job
from motet.train.world import open_store

LOOPBACK = "0100007F"
OTHERS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""What torchrun sets beside RANK."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_ranks_of_one_machine_cannot_be_reached_from_others(job, tmp_path):
    """Started without torchrun, rank 0 serves the store by itself."""
    meeting = OTHERS | {"MASTER_PORT": str(free_port())}

    def rank(number):
        say = Meddling(STEP, 2, number, "os.write(2, ' '.join(listening()).encode())")
        options = ("data.heldout=[]", "run.steps=2")
        return motet(*arguments(job, tmp_path, *options), meddling=say, environment={"RANK": str(number)} | meeting)

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank, range(2)))
    assert [done.returncode for done in ranks] == [0, 0], ranks
    addresses = [done.stderr.split() for done in ranks]
    assert [set(found) for found in addresses] == [{LOOPBACK}, {LOOPBACK}]
    assert len(addresses[0]) == len(addresses[1]) + 1, "the store"
    assert len(losses(tmp_path)) == 2


def test_a_store_of_one_machine_listens_there_and_one_of_several_everywhere(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = len(listening())
    store = open_store("localhost", 0, serves=True)
    assert listening()[before:] == [LOOPBACK]
    open_store("localhost", store.port, serves=False).set("key", "value")
    assert store.get("key") == b"value"
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    everywhere = open_store("localhost", 0, serves=True)
    assert set(listening()[before:]) > {LOOPBACK}
    open_store("localhost", everywhere.port, serves=False).set("key", "value")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"RANK": "0"},
            "has RANK = '0' and no WORLD_SIZE and no MASTER_ADDR and no MASTER_PORT: start ranks with torchrun",
        ),
        (OTHERS | {"RANK": "one"}, "has RANK = 'one', which must be a whole number"),
        (OTHERS | {"RANK": "-1"}, "has RANK = '-1', which must be a whole number"),
        (OTHERS | {"RANK": "2"}, "has RANK = 2 and WORLD_SIZE = 2; ranks count from 0"),
        (OTHERS | {"RANK": "0", "MASTER_PORT": "x"}, "has MASTER_PORT = 'x', which must be a whole number"),
    ],
)
def test_an_environment_that_is_half_set_is_one_sentence(job, tmp_path, environment, said):
    done = motet(*arguments(job, tmp_path), environment=environment)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
