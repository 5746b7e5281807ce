"""Media decoded by Ray's actors: the losses of local workers bit for bit, also where actors die."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import diffusers
import pytest
from PIL import Image

import motet.data.decode
import motet.data.ray_actors
from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_planned_parts import plan_of
from dist.test_resume import run, stop_after
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.data.ray_actors import RayActor, RayCluster
from motet.data.ray_server import RayServer
from motet.planning.under_plan import recipe_under_plan
from motet.train.input.feed import Feed
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

# Ray is not imported here: a process must have its token before it does.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra motet[ray] is not installed"),
]


@pytest.fixture(scope="module")
def server():
    with RayServer(num_cpus=4) as server:
        yield server


def served(server, num_workers=1):
    """The options of a run whose media the actors of a cluster decode, and the variables of its processes."""
    options = ["data.service=ray", f"data.ray_address={server.address}", f"data.num_workers={num_workers}"]
    return options, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": server.token}


def decode_here(*_):
    raise AssertionError("the trainer's own process decodes")


def serve_rank(rank, num_ranks, recipe, overrides, variables, kill_at=None, plan=None, session=None):
    """Train, where this process may not decode. kill_at: the step whose input is asked for when an actor is killed.

    session: the processes that are killed in its place, a node's.
    """
    os.environ |= variables
    actors, asked = [], []
    ready, next_step = RayActor.ready, Feed.next_step

    def noting_ready(self, may_wait):
        ready(self, may_wait)
        actors.append(self.process_id)

    def killing_next_step(self):
        asked.append(self)
        if len(asked) == kill_at and rank == 0:
            for process in [actors[0]] if session is None else processes_of(session):
                os.kill(process, signal.SIGKILL)
        return next_step(self)

    motet.data.decode.load_media = decode_here
    RayActor.ready, Feed.next_step = noting_ready, killing_next_step
    read, chosen = load_recipe(recipe, overrides), None
    if plan is not None:
        read, chosen = recipe_under_plan(read, recipe, plan)
    train(read, chosen=chosen)
    return len(actors)


def processes_of(session):
    """The processes of a session, by number."""
    found = []
    for number in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(ProcessLookupError):
            if os.getsid(number) == session:
                found.append(number)
    return found


@contextmanager
def joined_node(server, num_cpus):
    """Another node of the server's cluster, on this machine: the number of its session."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": server.token}
    options = [
        "--address",
        server.address,
        "--num-cpus",
        str(num_cpus),
        "--object-store-memory",
        "100000000",
        "--block",
    ]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", *options]
    node = subprocess.Popen(start, env=os.environ | token, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        yield node.pid
    finally:
        for process in processes_of(node.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()


def serve(job, num_ranks, run_dir, server, *overrides, num_workers=1, **options):
    service, variables = served(server, num_workers)
    overrides = [f"run.dir={run_dir}", "data.heldout=[]", *service, *overrides]
    run_ranks(serve_rank, num_ranks, job, overrides, variables, *options.values())


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "mode"), [(1, "index"), (2, "exchange")])
def test_losses_are_those_of_local_workers(job, server, tmp_path, num_ranks, mode):
    mode = f"balance.mode={mode}"
    run(job, num_ranks, tmp_path / "local", "data.num_workers=1", mode)
    serve(job, num_ranks, tmp_path / "ray", server, mode, num_workers=2)
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")
    assert all(step["ahead"]["store_bytes"] > 0 and step["ahead"]["deaths"] == 0 for step in metrics(tmp_path / "ray"))


GENERATOR = """
[model.generators.draw]
makes = "image"
family = "dit"
num_queries = 2
config = { row_dim = 4, hidden = 8, num_layers = 1, num_heads = 2 }
vae = { path = "vae", encode_in = "workers" }

[transforms.draw]
patch_size = 2
"""


@pytest.mark.slow
def test_actors_encode_latents_as_local_workers_do(server, tmp_path):
    job = write_tiny_job(tmp_path / "data", num_train=4, num_heldout=0)
    autoencoder = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (4, 8),
        "norm_num_groups": 2,
    }
    diffusers.AutoencoderKL(**autoencoder).save_pretrained(job.parent / "vae")
    Image.effect_noise((8, 12), 60.0).save(job.parent / "media" / "drawn.png")
    turns = [{"from": "human", "value": "draw"}, {"from": "gpt", "value": "see: <image>"}]
    asked = json.dumps({"conversations": turns, "image": ["media/drawn.png"]}) + "\n"
    manifest = job.with_name("train.jsonl")
    manifest.write_text(manifest.read_text() + asked * 4)
    job.write_text(job.read_text() + GENERATOR)
    few = "run.steps=2"
    run(job, 1, tmp_path / "local", "data.num_workers=1", "data.heldout=[]", few)
    serve(job, 1, tmp_path / "ray", server, few)
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")
    assert all(step["losses"]["draw"] > 0 for step in metrics(tmp_path / "ray"))
    shutil.move(job.parent / "vae", job.parent / "elsewhere")
    said = refusal(job, server, tmp_path, tmp_path / "a")
    assert said.startswith("model.generators.draw.vae.path: there is neither ")


@pytest.mark.slow
def test_neither_an_actor_that_is_killed_nor_a_resume_changes_anything(job, server, tmp_path):
    run(job, 2, tmp_path / "local")
    shallow = "data.prefetch_steps=1"
    serve(job, 2, tmp_path / "ray", server, shallow, "checkpoint.every_steps=4", kill_at=3)
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")
    steps = metrics(tmp_path / "ray")
    assert [step["ahead"]["deaths"] for step in steps][:: len(steps) - 1] == [0, 1]
    assert not any(step["left_out"] for step in steps)
    stop_after(tmp_path / "ray", 4)
    serve(job, 2, tmp_path / "ray", server, "data.prefetch_bytes=1000")
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")
    # One step may wait, however large it is.
    assert max(step["ahead"]["steps"] for step in metrics(tmp_path / "ray")[4:]) <= 1


def wait_for_nodes(rank, num_ranks, server, num_nodes):
    with RayCluster(server[0], 1, server[1]) as cluster:
        while cluster.num_nodes < num_nodes:
            time.sleep(0.2)


@pytest.mark.slow
def test_a_node_that_is_killed_changes_nothing(job, tmp_path):
    run(job, 1, tmp_path / "local")
    with RayServer(num_cpus=1) as server, joined_node(server, 2) as node:
        run_ranks(wait_for_nodes, 1, (server.address, server.token), 2)
        serve(job, 1, tmp_path / "ray", server, "data.prefetch_steps=1", num_workers=3, kill_at=3, plan=None, node=node)
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")
    steps = metrics(tmp_path / "ray")
    # Its two actors died with it, and the one that is left decodes all that follows.
    assert [(step["ahead"]["workers"], step["ahead"]["deaths"]) for step in (steps[0], steps[-1])] == [(3, 0), (1, 2)]
    assert not any(step["left_out"] for step in steps)
    assert "2 of them died" in (tmp_path / "ray" / "report.html").read_text()


def headless_rank(rank, num_ranks, recipe, overrides, variables, head):
    motet.data.ray_actors._HEAD_LIMIT_S = 1.0
    try:
        serve_rank(rank, num_ranks, recipe, overrides, variables, 3, None, head)
    except UserError as error:
        return str(error)


@pytest.mark.slow
def test_a_ray_that_ends_is_a_sentence(job, tmp_path):
    with RayServer(num_cpus=2) as server:
        service, variables = served(server)
        overrides = [f"run.dir={tmp_path}", "data.heldout=[]", *service, "data.prefetch_steps=1"]
        said = run_ranks(headless_rank, 2, job, overrides, variables, server._process.pid)
    assert said[0] == said[1]
    assert f"Ray's head at {server.address} has ended, and with it what decodes; start it again" in said[0]


@pytest.mark.slow
def test_under_a_plan_with_stages_too(job, server, tmp_path):
    exact = ("run.dtype=float64", "run.steps=4")
    stages = {"image": 1, "audio": 1, "backbone": 1}, {"backbone": 1}
    unit = Unit("all", stages, pp=2, zero=0)
    write_plan(plan_of(job, exact, unit, batch_size=6), tmp_path / "plan.json")
    for way in ("local", "ray"):
        service, variables = served(server) if way == "ray" else ([], {})
        overrides = [f"run.dir={tmp_path / way}", "data.heldout=[]", *exact, *service]
        rank = serve_rank if way == "ray" else plan_rank
        given = run_ranks(rank, 2, job, overrides, variables, None, tmp_path / "plan.json")
    # The rank of the encoders has the actors of both.
    assert given == [2, 0]
    assert losses(tmp_path / "ray") == losses(tmp_path / "local")


def plan_rank(rank, num_ranks, recipe, overrides, variables, kill_at, plan):
    read, chosen = recipe_under_plan(load_recipe(recipe, overrides), recipe, plan)
    train(read, chosen=chosen)


def refused_rank(rank, num_ranks, recipe, overrides, variables, other, folder):
    os.environ |= variables
    os.chdir(folder)
    if rank == 1 and other == "ray":
        import ray

        ray.__version__ = "1.2.3"
    if rank == 1 and other == "pillow":
        ours = motet.data.ray_actors.versions() | {"pillow": "1.2.3"}
        motet.data.ray_actors.versions = lambda: ours
    try:
        train(load_recipe(recipe, overrides))
    except UserError as error:
        return str(error)


def refusal(job, server, folder, run_dir, *options, other=""):
    """The sentence that all ranks end with, each in `folder`."""
    service, variables = served(server)
    overrides = [f"run.dir={run_dir}", "data.heldout=[]", *service, *options]
    start_s = time.monotonic()
    said = run_ranks(refused_rank, 2, job, overrides, variables, other, folder)
    assert said[0] == said[1]
    assert time.monotonic() - start_s < 300
    return said[0]


@pytest.mark.parametrize(
    ("other", "options", "sentence"),
    [
        ("ray", [], ", and this rank has Ray 1.2.3 on Python "),
        pytest.param(
            "pillow",
            [],
            ", and this rank has pillow 1.2.3, so items could come out otherwise: install the same on both.",
            marks=pytest.mark.slow,
        ),
        ("", ["data.num_workers=100"], "data.num_workers asks for 200 actors over all ranks, with a CPU each, and "),
        ("", ["data.ray_address=127.0.0.1:1"], "Ray at 127.0.0.1:1 cannot be reached: "),
    ],
)
def test_what_ray_cannot_serve_is_a_sentence_on_all_ranks(job, server, tmp_path, other, options, sentence):
    assert sentence in refusal(job, server, tmp_path, tmp_path / "a", *options, other=other)


@pytest.mark.slow
def test_files_that_actors_cannot_open_are_a_sentence(job, server, tmp_path):
    # A path that means something else in each process.
    manifest = job.with_name("own.jsonl")
    manifest.write_text((job.parent / "train.jsonl").read_text().replace('"media/', '"/proc/self/cwd/media/'))
    said = refusal(job, server, job.parent, tmp_path / "a", f"data.train=['{manifest}']")
    assert "can be opened here and not on Ray's node" in said
    assert "give all nodes of Ray the files of the job, under the same paths" in said
