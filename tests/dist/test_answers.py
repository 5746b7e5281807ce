"""Greedy answers of a model whose prompts see themselves in both directions: what training would predict."""

import numpy as np
import torch

from motet.dispatch import PackedSequences
from motet.runtime.mesh import build_mesh
from motet.train.generate import generate
from parity.planned import DIM, build_hf_model
from ranks import run_ranks

PROMPTS = [7, 4, 9]
IMAGES = [1, 2, 3, 12, 13]


def packed(tokens, lengths, num_answered):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    targets = np.zeros(offsets[-1], dtype=bool)
    for stop, count in zip(offsets[1:], num_answered):
        targets[stop - count : stop] = True
    moved = np.searchsorted(np.cumsum(PROMPTS), IMAGES, side="right")  # the document of each row of an image
    places = np.array(IMAGES) + (np.cumsum(num_answered) - num_answered)[moved]
    return PackedSequences(
        torch.tensor(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(offsets.astype(np.int32)),
        {"image": torch.from_numpy(places)},
    )


def answered(rank, num_ranks):
    backbone, rng = build_hf_model(parts=("ahead", "prefix")).backbone.eval(), np.random.default_rng(0)
    with torch.no_grad():
        for weight in backbone.parameters():
            weight.mul_(6 if weight.ndim > 1 else 1)
    prompts = packed(rng.integers(0, 40, sum(PROMPTS)), PROMPTS, [0, 0, 0])
    features = {"image": torch.from_numpy(rng.standard_normal((len(IMAGES), DIM)))}
    model = torch.nn.Module()
    model.backbone = backbone
    answers = generate(model, prompts, features, frozenset(), 5, build_mesh(torch.device("cpu")))
    tokens = [
        token for prompt, answer in zip(prompts.tokens.split(PROMPTS), answers) for token in [*prompt.tolist(), *answer]
    ]
    whole = packed(tokens, [length + 5 for length in PROMPTS], [5, 5, 5])
    with torch.no_grad():
        predicted = backbone.logits(backbone.hidden_states(whole, features)).argmax(-1)
    return answers, predicted[whole.targets.nonzero()[:, 0] - 1].view(3, 5).tolist()


def test_answers_are_what_training_would_predict():
    [(answers, predicted)] = run_ranks(answered, 1)
    assert answers == predicted
    assert len({token for answer in answers for token in answer}) > 3
