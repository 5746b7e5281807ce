"""The loops of examples/ on two ranks train as one process does that runs HF's model on one example at a time."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH_SIZE, NUM_EXAMPLES = 4, 64


def example_module(name: str):
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def whole(model: nn.Module) -> list[np.ndarray]:
    """All parameters, those of sharded modules gathered."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().numpy() for p in full]


def one_process(steps: list[list[list[int]]]) -> tuple[list[float], list[np.ndarray]]:
    """Loss of each microbatch, and parameters after the last step. steps: the examples of each microbatch of a step."""
    vlm = example_module("vlm")
    torch.manual_seed(0)
    model, data = vlm.VLM().double(), vlm.Examples()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for microbatches in steps:
        examples = [[data[number] for number in numbers] for numbers in microbatches]
        num_targets = sum(int(example.sequence.targets.sum()) for part in examples for example in part)
        for part in examples:
            loss = sum(loss_of(model, example) for example in part) / num_targets
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole(model)


def loss_of(model: nn.Module, example) -> torch.Tensor:
    """The loss of one example summed over its targets, by HF's own forward. Images stand before the text."""
    text = torch.from_numpy(example.sequence.tokens[len(example.media) :])
    rows = [model.images(torch.from_numpy(image.values).double(), None) for image in example.media]
    embeds = torch.cat([*rows, model.llm.get_input_embeddings()(text)])
    logits = model.llm(inputs_embeds=embeds[None]).logits[0, -len(text) :]
    targets = torch.from_numpy(example.sequence.targets[len(example.media) :])
    return nn.functional.cross_entropy(logits[:-1][targets[1:]], text[targets], reduction="sum")


def strided(accumulate: int, num_ranks: int = 2) -> list[list[list[int]]]:
    """The steps of a DistributedSampler that does not shuffle: each microbatch has consecutive examples."""
    return in_steps(np.arange(NUM_EXAMPLES).reshape(-1, BATCH_SIZE * num_ranks).tolist(), accumulate)


def in_steps(microbatches: list, accumulate: int) -> list[list]:
    """The microbatches of each step; the last has those that are left."""
    return [microbatches[first : first + accumulate] for first in range(0, len(microbatches), accumulate)]


def own_loop(rank: int, num_ranks: int, wrap: str, mode: str, accumulate: int):
    loop = example_module("own_loop")
    wrapper = loop.DistributedDataParallel
    if wrap == "fsdp":
        from torch.distributed.fsdp import fully_shard as wrapper
    measures = {"image": loop.Tiles()} if mode == "exchange" else None
    model, losses = loop.train(wrapper, measures, accumulate, torch.float64)
    return losses.tolist(), whole(model)


def check(results, steps) -> None:
    losses, parameters = one_process(steps)
    for of_rank, found in results:
        assert np.allclose(of_rank, losses, rtol=0, atol=1e-10)
        assert all(np.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(found, parameters, strict=True))


@pytest.mark.parametrize(
    ("wrap", "mode", "accumulate"),
    [("ddp", "exchange", 3), ("fsdp", "index", 1)],
)
def test_own_loop(wrap, mode, accumulate):
    check(run_ranks(own_loop, 2, wrap, mode, accumulate), strided(accumulate))


@pytest.mark.slow
@pytest.mark.torchrun
def test_own_loop_as_a_user_starts_it():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "own_loop.py")], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^loss \d\.\d{4}$", done.stdout, re.MULTILINE)) == 8


def told_as_by_torchrun(rank: int, num_ranks: int) -> None:
    """accelerate looks for ranks in the environment alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}


def accelerate_loop(rank: int, num_ranks: int, accumulate: int):
    told_as_by_torchrun(rank, num_ranks)
    model, losses = example_module("accelerate_loop").train(accumulate, torch.float64, cpu=True)
    return losses.tolist(), whole(model)


def test_accelerate_loop():
    accumulate = 3  # of 8 microbatches: the last step has two
    pytest.importorskip("accelerate", reason="accelerate is no dependency of Motet; pip install accelerate")
    check(run_ranks(accelerate_loop, 2, accumulate), strided(accumulate))


def hf_trainer(rank: int, num_ranks: int, accumulate: int):
    """The parameters, and the examples that this rank has loaded, in their order."""
    told_as_by_torchrun(rank, num_ranks)
    loop, vlm = example_module("hf_trainer"), example_module("vlm")
    loaded = []

    class Recorded(vlm.Examples):
        def __getitem__(self, number):
            loaded.append(number)
            return super().__getitem__(number)

    loop.Examples = Recorded
    model, losses = loop.train(torch.float64, gradient_accumulation_steps=accumulate, dataloader_num_workers=0)
    return losses, whole(model), loaded


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_hf_trainer(accumulate):
    pytest.importorskip("accelerate", reason="HF Trainer needs accelerate, which is no dependency of Motet")
    results = run_ranks(hf_trainer, 2, accumulate)
    loaded = np.concatenate([np.reshape(numbers, (-1, BATCH_SIZE)) for *_, numbers in results], axis=1)
    assert sorted(loaded.ravel()) == list(range(NUM_EXAMPLES))
    steps = in_steps(loaded.tolist(), accumulate)
    losses, parameters = one_process(steps)
    for logged, found, _ in results:
        # The Trainer adds losses up in float32, and logs one a step, on rank 0.
        assert logged == [] or np.allclose(logged, [sum(step) for step in in_steps(losses, accumulate)], rtol=1e-6)
        assert all(np.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(found, parameters, strict=True))


def test_the_loops_of_the_examples_are_short():
    for name in ("own_loop", "accelerate_loop", "hf_trainer"):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) < 65
        assert sum("prefetched(" in line or "scale_sum(" in line for line in text.splitlines()) == 2
