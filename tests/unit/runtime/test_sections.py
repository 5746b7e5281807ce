"""A stage in sections: recomputed or not, it is the same function, with the same random numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from motet.ahead import MadeAhead
from motet.core.errors import ArgumentError
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.runtime.sections import Section, SectionedStage, spans_of
from motet.schedule.layout import Layout, parts_of

SHAPE = Transformer(8, 16, num_heads=2)


class Cut(nn.Module):
    """A module of 4 blocks with dropout; counts the blocks that it runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.tail = nn.Linear(3, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))
        self.num_run = 0

    def forward(self, values, sizes):
        return self.leave(self.through(self.enter(values, sizes), sizes, 0, 4), sizes)

    def enter(self, values, sizes):
        return self.stem(values)

    def through(self, hidden, sizes, first, stop):
        for layer in self.layers[first:stop]:
            self.num_run += 1
            hidden = layer(hidden)
        return hidden

    def leave(self, hidden, sizes):
        return self.tail(hidden)


def stages_of(recompute):
    image = connect(vit("image", SHAPE, num_layers=4), output_dim=8)
    model = multimodal("toy", language_model(SHAPE, 2, 100), [image])
    unit = Unit("all", ({"image": 3}, {"image": 1, "backbone": 2}), pp=2, recompute=recompute)
    return model, Layout(Plan(model, cluster("h100", 1, 2), (unit,), batch_size=1)).stages


def run(recompute):
    """(output, gradients, blocks run in F, blocks run in R) of the image's first three blocks."""
    model, stages = stages_of(recompute)
    module = Cut()
    sections = [
        Section(span, SimpleNamespace(encoders={"image": module}, backbone=None), torch.zeros(3))
        for span in spans_of(stages[0], model)
    ]
    stage = SectionedStage(sections, True, torch.device("cpu"))
    media = {"image": (torch.arange(12.0).view(4, 3) / 12, torch.ones(1, 1, dtype=torch.int64))}
    batch = SimpleNamespace(media=media, inputs=media.get, draws=None, ahead=MadeAhead())
    torch.manual_seed(1)
    held, runs = stage.forward(batch, {})
    in_forward = module.num_run
    torch.rand(7)  # Other microbatches draw in between.
    stage.recompute(batch, runs)
    stage.backward(runs, {"image": torch.ones_like(held["image"])})
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return held["image"].detach(), gradients, in_forward, module.num_run - in_forward


@pytest.mark.parametrize("num_recomputed", [0, 1, 2, 3])
def test_recomputation_changes_no_number(num_recomputed):
    output, gradients, in_forward, in_recompute = run(({"image": num_recomputed}, {}))
    expected_output, expected, _, _ = run(())
    assert (in_forward, in_recompute) == (3, num_recomputed)
    assert torch.equal(output, expected_output)
    assert gradients.keys() == expected.keys() and "stem.weight" in gradients
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


def test_a_part_of_a_pass_is_a_span_of_blocks_with_what_is_recomputed_of_them():
    model, (stage, _) = stages_of(({"image": 2}, {}))
    spans = [(s.part, s.first, s.stop, s.enters, s.is_recomputed) for s in spans_of(replace(stage, num_parts=3), model)]
    assert spans == [
        (0, 0, 0, True, False),
        (0, 0, 1, False, True),
        (1, 1, 2, False, True),
        (2, 2, 3, False, False),
    ]
    parts = parts_of(replace(stage, num_parts=2), model)
    assert [part.layers for part in parts] == [{"image": (0, 1)}, {"image": (1, 3)}]


def test_a_part_of_a_pass_is_a_span_of_halves_of_blocks_if_there_are_more_parts_than_blocks():
    model, (stage, last) = stages_of(({"image": 2}, {}))
    spans = [
        (s.part, s.first, s.stop, s.begins_inside, s.ends_inside, s.enters, s.is_recomputed)
        for s in spans_of(replace(stage, num_parts=4), model)
    ]
    assert spans == [
        (0, 0, 0, False, False, True, False),
        (0, 0, 1, False, True, False, True),
        (1, 0, 2, True, True, False, True),
        (2, 1, 2, True, False, False, True),
        (3, 2, 3, False, False, False, False),
    ]
    ends = [(s.module, s.first, s.stop, s.begins_inside, s.ends_inside, s.leaves, s.is_whole)
            for s in spans_of(replace(last, layers={"image": (3, 4)}, num_parts=2), model)]  # fmt: skip
    assert ends == [
        ("image", 3, 4, False, True, False, False),
        ("image", 3, 4, True, False, True, False),
    ]
    with pytest.raises(ArgumentError, match="blocks and halves of blocks, of which there are 6"):
        list(spans_of(replace(stage, num_parts=7), model))


def test_what_stands_around_the_blocks_is_not_recomputed():
    model, stages = stages_of(({"image": 2}, {"image": 1, "backbone": 1}))
    spans = [
        [(s.module, s.first, s.stop, s.enters, s.leaves, s.is_recomputed) for s in spans_of(x, model)] for x in stages
    ]
    assert spans == [
        [
            ("image", 0, 0, True, False, False),
            ("image", 0, 2, False, False, True),
            ("image", 2, 3, False, False, False),
        ],
        [
            ("image", 3, 4, False, False, True),
            ("image", 4, 4, False, True, False),
            ("backbone", 0, 0, True, False, False),
            ("backbone", 0, 1, False, False, True),
            ("backbone", 1, 2, False, False, False),
            ("backbone", 2, 2, False, True, False),
        ],
    ]
