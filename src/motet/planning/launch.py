"""`motet plan --launch slurm|k8s`: the file that starts the job under the plan that was found.

Slurm: a script for sbatch, one task a node, each a torchrun. Kubernetes: an Indexed Job, one pod a node, and the
headless Service by whose names the pods find the first; no operator is needed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from motet.core.cluster import Cluster
from motet.planning.trainable import train_words

Launcher = Literal["slurm", "k8s"]

_SUFFIXES: dict[Launcher, str] = {"slurm": ".sbatch", "k8s": ".k8s.yaml"}
_START: dict[Launcher, str] = {"slurm": "sbatch", "k8s": "kubectl apply -f"}
_PORT = 29500
_SAVING_S = 300
"""Seconds before its end at which a job is told to stop, to save the step."""


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    folder: in which the command was given, and to which paths are relative; all nodes must see it.
    """

    recipe_file: Path
    overrides: Sequence[str]
    plan_file: Path
    cluster: Cluster
    folder: Path

    @property
    def name(self) -> str:
        """A name for the job: letters, digits and hyphens, at most 50."""
        return re.sub(r"[^a-z0-9]+", "-", f"motet-{self.recipe_file.stem}".lower())[:50].strip("-")

    @property
    def gpus_per_node(self) -> int:
        """The GPUs of a node; 0 where ranks run on CPUs."""
        return 0 if self.cluster.device.name == "cpu" else self.cluster.ranks_per_node

    @property
    def headline(self) -> str:
        """What the file does, in a line."""
        cluster = self.cluster
        nodes = f"{cluster.num_nodes} node{'' if cluster.num_nodes == 1 else 's'}"
        where = f"{nodes} of {cluster.ranks_per_node} {cluster.device.name}"
        return f"Trains {self.recipe_file} under {self.plan_file} on {where}; written by motet plan --launch."

    def torchrun(self, *options: str) -> str:
        """The command of a node. options: how the nodes meet, as text for a shell."""
        counts = f"--nnodes {self.cluster.num_nodes} --nproc-per-node {self.cluster.ranks_per_node}"
        # Else torchrun kills its ranks 30 s after it has passed the signal to stop on.
        counts += f" --shutdown-timeout {_SAVING_S}"
        train = shlex.join(train_words(self.recipe_file, [self.plan_file], self.overrides))
        return " ".join(["torchrun", counts, *options, train])


def launch_file(plan_file: Path, launcher: Launcher) -> Path:
    """The file for the job, beside the plan's."""
    return plan_file.with_suffix(_SUFFIXES[launcher])


def write_launch(launch: Launch, launcher: Launcher) -> str:
    """Write the job's file; returns the command that starts the job."""
    file = launch_file(launch.plan_file, launcher)
    file.write_text({"slurm": slurm_script, "k8s": kubernetes_job}[launcher](launch), encoding="utf-8")
    return f"{_START[launcher]} {shlex.quote(str(file))}"


def slurm_script(launch: Launch) -> str:
    """A script for sbatch. A job that is stopped saves its step, and goes on from there when it is started again.

    Example:
        >>> from motet.cost.catalogue import cluster
        >>> where = cluster("h100", num_nodes=2)
        >>> print(slurm_script(Launch(Path("a.toml"), (), Path("plan.json"), where, Path("/jobs"))).splitlines()[3])
        #SBATCH --nodes=2
    """
    gpus = [f"#SBATCH --gpus-per-node={launch.gpus_per_node}"] if launch.gpus_per_node else []
    meet = f'--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:{_PORT}"'
    lines = [
        "#!/bin/bash",
        f"# {launch.headline}",
        f"#SBATCH --job-name={launch.name}",
        f"#SBATCH --nodes={launch.cluster.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",  # All memory of a node: --exclusive gives all CPUs, but of memory the site's default.
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=TERM@{_SAVING_S}",
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(str(launch.folder))}",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun --kill-on-bad-exit=1 {launch.torchrun(meet)}",
    ]
    return "\n".join(lines) + "\n"


def kubernetes_job(launch: Launch) -> str:
    """A Service and an Indexed Job, as YAML. IMAGE and CLAIM in it are for the user to fill in."""
    name, folder = launch.name, _quoted(str(launch.folder))
    first = f"{name}-0.{name}"
    meet = f'--node-rank "$JOB_COMPLETION_INDEX" --master-addr {first} --master-port {_PORT}'
    vendor = "amd.com" if launch.cluster.device.name.startswith("mi") else "nvidia.com"
    gpus = f"""
          resources:
            limits: {{ {vendor}/gpu: {launch.gpus_per_node} }}""" * bool(launch.gpus_per_node)
    return f"""\
# {launch.headline}
# Set IMAGE to an image with motet, CLAIM to a volume that holds this folder. Every pod mounts it at the same place.
apiVersion: v1
kind: Service
metadata: {{ name: {name} }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{ job-name: {name} }}
---
apiVersion: batch/v1
kind: Job
metadata: {{ name: {name} }}
spec:
  completionMode: Indexed
  completions: {launch.cluster.num_nodes}
  parallelism: {launch.cluster.num_nodes}
  # A pod alone cannot go on. `kubectl replace --force -f` starts all again, from the newest checkpoint.
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {_SAVING_S}
      containers:
        - name: train
          image: IMAGE
          workingDir: {folder}
          command: ["bash", "-c"]
          args:
            - {_quoted("exec " + launch.torchrun(meet))}{gpus}
          volumeMounts:
            - {{ name: folder, mountPath: {folder} }}
            - {{ name: shared-memory, mountPath: /dev/shm }}
      volumes:
        - {{ name: folder, persistentVolumeClaim: {{ claimName: CLAIM }} }}
        - {{ name: shared-memory, emptyDir: {{ medium: Memory }} }}
"""


def _quoted(text: str) -> str:
    """A string of YAML. Characters stay as they are: YAML has no pairs of escapes, as JSON has behind U+FFFF."""
    return json.dumps(text, ensure_ascii=False)
