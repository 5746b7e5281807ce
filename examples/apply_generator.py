"""A diffusion transformer behind a language model, each on a rank of its own, in a plain loop.

torchrun --standalone --nproc-per-node 2 examples/apply_generator.py
"""

import numpy as np
import torch
import torch.distributed as dist
from hf_parts import PATCH, VOCABULARY, language_model, vision_tower

import motet
from motet.core.example import Media, TokenSequence
from motet.dispatch import LoadedExample
from motet.models.generator_config import GeneratorConfig

DIT = {"row_dim": PATCH**2, "hidden": 16, "num_layers": 2, "num_heads": 2}
DRAW = GeneratorConfig(family="dit", config=DIT, num_queries=2, drop_condition=0.1, weight=1.0)
DEGREES = {"backbone": {"pp": 1, "dp": 1}, "draw": {"pp": 1, "dp": 1}}  # What is not said is planned.


def build(dtype=torch.float32):
    torch.manual_seed(0)
    parts = language_model().to(dtype), {"image": vision_tower().to(dtype)}
    return motet.compose(*parts, generators={"draw": DRAW})


def example(number):
    """A prompt with an image in every other example, and an answer that ends with a picture, but for every third."""
    rng = np.random.default_rng(number)
    names = ("image",) * (number % 2) + ("draw",) * (number % 3 > 0)
    sizes = [rng.integers(1, 5, 2) for _ in names]
    dims = {"image": 3 * PATCH**2, "draw": PATCH**2}  # Of a grey picture: a row of latents a patch.
    items = [
        Media(rng.standard_normal((size.prod(), dims[name]), np.float32), size) for name, size in zip(names, sizes)
    ]
    num_tokens = 8 + number % 5
    places = {"image": 0, "draw": num_tokens - 1}
    is_answer = np.arange(num_tokens) >= 4
    is_answer[-1] &= "draw" not in names  # A place of an item is no token to predict.
    tokens = rng.integers(0, VOCABULARY, num_tokens)
    return LoadedExample(
        TokenSequence(tokens, is_answer, names, np.array([places[name] for name in names], int)), tuple(items)
    )


def batches(batch_size=6, num_steps=4):
    """The examples of each step: on every rank all of them."""
    return [[example(step * batch_size + index) for index in range(batch_size)] for step in range(num_steps)]


def train(plan=DEGREES, dtype=torch.float32):
    """The results of the steps, and this rank's part of the model. plan: degrees, a Plan, or its file."""
    mllm, steps = build(dtype), batches()
    torch.manual_seed(1)  # Draws the noise, with the number of the step and the place of the example.
    parallel = motet.apply(mllm, plan, lambda part: torch.optim.AdamW(part, 1e-2), batch=steps[0])
    return [parallel.step(batch) for batch in steps], parallel.model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results, _ = train()
    if dist.get_rank() == 0:
        for result in results:
            print(" ".join(f"{name} {loss:.4f}" for name, loss in result.losses.items()))
    dist.destroy_process_group()
