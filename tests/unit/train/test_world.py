"""How ranks find each other: what the environment must say, and who can reach what they open."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from cli.meddling import Meddling, listening, motet
from cli.test_stop import STEP, arguments
from cli.tiny_job import losses
from motet.core.errors import JointUserError, RankFailure, UserError, origin_of
from motet.train import world as world_module
from motet.train.watch import come
from motet.train.world import Meeting, World, _explain, borrowed_world, join_world, open_store, stay_away
from ranks import free_port, run_ranks

LOOPBACK = "0100007F"
OTHERS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""What torchrun sets beside RANK."""


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
        ({"WORLD_SIZE": "4"}, "has WORLD_SIZE = 4 and no RANK, and this process would train alone: start ranks with"),
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


def alone_of_two(job, run_dir, port, *overrides, **environment):
    """What rank 0 says, and its exit code, where nobody starts rank 1."""
    done = motet(
        *arguments(job, run_dir, *overrides), environment=OTHERS | {"RANK": "0", "MASTER_PORT": str(port)} | environment
    )
    (said,) = (line for line in done.stderr.splitlines() if not line.startswith("["))  # torch has lines of its own.
    return done.returncode, said


def test_a_rank_that_is_never_started_is_named(job, tmp_path):
    code, said = alone_of_two(job, tmp_path, free_port(), "run.wait_limit_s=3")
    assert code == 3
    assert said.startswith(
        "motet train, rank 0: waited 3 s, in vain, as rank 1 has not come; run.wait_limit_s is how long a rank waits."
    )


def test_an_interface_that_is_not_there_and_a_port_that_is_taken_are_one_sentence(job, tmp_path):
    code, said = alone_of_two(job, tmp_path, free_port(), GLOO_SOCKET_IFNAME="none7")
    assert code == 2 and "GLOO_SOCKET_IFNAME names 'none7', a network interface that " in said
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, said = alone_of_two(job, tmp_path, port)
    assert code == 2 and f"Rank 0 cannot meet the others at localhost:{port} (" in said


def test_ranks_that_came_and_cannot_connect_say_so_once():
    store, error = dist.HashStore(), RuntimeError("Gloo connectFullMesh failed with Connection refused\nand more")
    for rank in range(2):
        come(store, rank)
    with pytest.raises(UserError, match=r"cannot connect to the other ranks, .*refused.; let GLOO"):
        _explain(error, Meeting(store, 1, 2))
    with pytest.raises(RankFailure):
        _explain(error, Meeting(store, 0, 2))
    assert not origin_of(error).speaks


def joined(rank, num_ranks, local_sizes):
    os.environ["LOCAL_WORLD_SIZE"] = local_sizes[rank]
    said = []
    try:
        borrowed_world()
    except JointUserError as error:
        said.append(str(error))
    try:
        with join_world("cpu") as world:
            return world.ranks_per_node
    except JointUserError as error:
        return [*said, str(error)]


def test_machines_with_different_numbers_of_ranks_are_refused_on_all_ranks():
    """Each rank decided by its own number who shares a machine, so that routes of items did not fit each other."""
    assert run_ranks(joined, 3, ("3", "3", "3")) == [3, 3, 3]
    for first, second in run_ranks(joined, 3, ("2", "2", "1")):
        assert first == second
        assert first.startswith("Rank 0 is one of 2 ranks on its machine and rank 2 one of 1, and all machines must")


def test_a_rank_knows_which_others_are_on_its_machine():
    worlds = [World(rank, 7, (1, 3, 3), torch.device("cpu"), None, None) for rank in range(7)]
    assert [world.on_node for world in worlds] == [range(1)] + [range(1, 4)] * 3 + [range(4, 7)] * 3
    assert {(world.num_nodes, world.ranks_per_node) for world in worlds} == {(3, 3)}


def of_groups(rank, num_ranks, by_node, tensor_size):
    control = dist.new_group(backend="gloo")
    world = World(rank, num_ranks, by_node, torch.device("cpu"), control, control).replicas(tensor_size)
    return world.rank, world.num_ranks, world.by_node


@pytest.mark.parametrize(
    ("by_node", "expected"), [((1, 3), (1, 1)), ((2, 2), (1, 1)), ((3, 1), (2,)), ((4,), (2,))], ids=str
)
def test_ranks_that_share_products_count_as_on_the_machine_of_their_first(by_node, expected):
    """As the prediction of a Plan has it (`Plan.replicas_by_node`)."""
    found = run_ranks(of_groups, 4, by_node, 2)
    assert found == [(rank // 2, 2, expected) for rank in range(4)]


@pytest.mark.parametrize("how", ["", "failed"])
def test_a_rank_without_part_in_a_phase_goes_on_where_that_has_ended_well(how, monkeypatch):
    store = dist.HashStore()
    store.set("ended", how)
    monkeypatch.setattr(world_module, "_meeting", lambda *_, in_phase: Meeting(store, 0, 1))
    with pytest.raises(RankFailure, match="has failed on the others") if how else nullcontext():
        stay_away(1.0)
    assert store.get("heard") == b"1"
