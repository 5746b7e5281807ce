"""The files of `motet plan --launch`: bash and YAML can read them, and they start what was planned."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from motet.cost.catalogue import cluster
from motet.planning.launch import Launch, kubernetes_job, launch_file, slurm_script, write_launch

SET = ("run.steps=5", 'data.train=["a b.jsonl"]')
ODD = Launch(Path("my recipes/It's.toml"), SET, Path("plan.json"), cluster("h100", 3), Path("/jobs/a b"))
TRAIN = ["-m", "motet", "train", str(ODD.recipe_file), "--set", SET[0], "--set", SET[1]]


def words_of(command: str) -> list[str]:
    """The words of a command of torchrun, from the word `torchrun` on."""
    words = shlex.split(command)
    return words[words.index("torchrun") :]


def checked_by_bash(script: str) -> None:
    ran = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_script_for_slurm_can_be_read_and_starts_the_training():
    script = slurm_script(ODD)
    checked_by_bash(script)
    lines = script.splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert lines[0] == "#!/bin/bash" and options["nodes"] == "3" and options["gpus-per-node"] == "8"
    assert options["ntasks-per-node"] == "1" and options["job-name"] == "motet-it-s"
    assert options["mem"] == "0"  # Else the job has the site's default of memory, however much the nodes have.
    assert "cd '/jobs/a b'" in lines
    words = words_of(lines[-1])
    assert words[:5] == ["torchrun", "--nnodes", "3", "--nproc-per-node", "8"]
    assert options["signal"] == f"TERM@{words[words.index('--shutdown-timeout') + 1]}"
    assert words[-len(TRAIN) - 2 :] == [*TRAIN, "--plan", "plan.json"]


@pytest.mark.parametrize(("device", "limits"), [("h100", {"nvidia.com/gpu": 8}), ("mi300x", {"amd.com/gpu": 8})])
def test_a_kubernetes_job_can_be_read_and_starts_the_training(device, limits):
    service, job = yaml.safe_load_all(kubernetes_job(replace(ODD, cluster=cluster(device, 3))))
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 3 and spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == limits and container["workingDir"] == "/jobs/a b"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (command,) = container["args"]
    checked_by_bash(command)
    words = words_of(command)
    assert words[words.index("--master-addr") + 1] == "motet-it-s-0.motet-it-s"
    assert words[words.index("--shutdown-timeout") + 1] == str(pod["terminationGracePeriodSeconds"])
    assert words[-len(TRAIN) - 2 :] == [*TRAIN, "--plan", "plan.json"]


def test_names_of_any_characters_stay_as_they_are_in_kubernetes():
    odd = replace(ODD, recipe_file=Path("öl/😀.toml"), folder=Path("/jobs/😀"))
    _, job = yaml.safe_load_all(kubernetes_job(odd))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == "/jobs/😀" and "öl/😀.toml" in words_of(container["args"][0])


def test_ranks_on_cpus_ask_for_no_gpu():
    on_cpus = replace(ODD, cluster=replace(ODD.cluster, device=replace(ODD.cluster.device, name="cpu")))
    assert "gpus-per-node" not in slurm_script(on_cpus)
    _, job = yaml.safe_load_all(kubernetes_job(on_cpus))
    assert "resources" not in job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("launcher", ["slurm", "k8s"])
def test_a_file_is_written_beside_the_plan(tmp_path, launcher):
    plan = tmp_path / "a plan.json"
    started = write_launch(replace(ODD, plan_file=plan), launcher)
    file = launch_file(plan, launcher)
    assert file.parent == tmp_path and shlex.split(started)[-1] == str(file) and str(plan) in file.read_text()
