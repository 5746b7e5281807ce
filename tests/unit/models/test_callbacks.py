"""Callbacks around an encoder and in place of the merge: what may be named, and what they may do to shapes."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from motet.core.errors import UserError
from motet.models import build
from motet.models.build import EncoderConfig, ModelConfig, build_mllm, build_modality
from motet.models.export import export_hf
from unit.models.conftest import BACKBONE, DIM, VISION, VOCAB

HERE = "unit.models.callbacks_of_tests"
SIZES = torch.tensor([[2, 4], [4, 4]])


def module(**callbacks):
    named = {kind: f"{HERE}:{name}" for kind, name in callbacks.items()}
    return build_modality("it", EncoderConfig(family="siglip", config=VISION, **named), DIM, torch.float64, 0)


def config(**options):
    image = {"family": "siglip", "config": VISION} | {k: v for k, v in options.items() if k != "merge"}
    merge = {k: v for k, v in options.items() if k == "merge"}
    return ModelConfig(backbone={"family": "qwen2", "config": BACKBONE}, encoders={"image": image}, **merge)


@pytest.mark.parametrize(
    ("key", "path", "said"),
    [
        ("before", "nowhere:at_all", r"cannot be imported as package.module:function \(No module named 'nowhere'\)"),
        ("between", f"{HERE}:nothing", "cannot be imported .*has no attribute 'nothing'"),
        ("after", f"{HERE}", "cannot be imported as package.module:function"),
        ("after", f"{HERE}:number", "is int, which cannot be called"),
        ("after", f"{HERE}:one_argument", r"is called with 2 arguments, rows, sizes, and takes \(rows\)"),
        ("merge", f"{HERE}:same", "is called with 3 arguments, embeds, features, sequences, and takes"),
        (
            "after",
            f"{HERE}:drawn",
            "holds weights that were drawn when it was imported, which differ from rank to rank",
        ),
        ("after", f"{HERE}:NeedsMore", "is a class that cannot be built without arguments"),
        ("after", f"{HERE}:NotCalled", "is a class whose instances cannot be called"),
    ],
)
def test_what_cannot_be_called_is_said_before_any_model_is_built(monkeypatch, key, path, said):
    monkeypatch.setattr(build, "_build_hf", lambda *_, **__: pytest.fail("a model was built"))
    where = "model.merge" if key == "merge" else f"model.encoders.image.{key}"
    with pytest.raises(UserError, match=rf"^{where} = '{re.escape(path)}': {said}"):
        build_mllm(config(**{key: path}), VOCAB)


def test_callbacks_are_called_in_their_places(tiny):
    values = tiny.values("siglip", SIZES)
    plain, called = module(), module(before="same", between="rows", after="Weighted")
    expected = plain(values, SIZES) * called.after.weight.sum()
    torch.testing.assert_close(called(values, SIZES), expected)
    assert torch.equal(called.after.weight, module(after="Weighted").after.weight), "drawn from the seed"
    assert called.after.weight.dtype == torch.float64


def test_rows_that_a_callback_says_are_counted(tiny):
    joined = module(between="Joined")
    assert joined.projector.input_dim == 48
    assert joined.num_tokens(SIZES.numpy()).tolist() == [4, 8]
    assert joined(tiny.values("siglip", SIZES), SIZES).shape == (12, DIM)


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (
            {"before": "resizing"},
            r"before \(.*:resizing\) returned items of sizes \[\[3, 5\], \[5, 5\]\] .*by items\(sizes\)",
        ),
        ({"between": "cutting"}, r"between \(.*:cutting\) gave 23 rows for 2 items, and 24 were expected"),
        ({"after": "cutting"}, r"after \(.*:cutting\) gave 23 rows for 2 items, and 24 were expected"),
    ],
)
def test_rows_that_a_callback_does_not_say_are_refused(tiny, callbacks, said):
    with pytest.raises(UserError, match=said):
        module(**callbacks)(tiny.values("siglip", SIZES), SIZES)


def test_what_a_callback_says_must_be_a_number_of_each_item():
    def after(rows, sizes):
        return rows

    after.num_rows = lambda sizes: np.array([1.5])
    made = module()
    made.after = after
    with pytest.raises(UserError, match=r"after \(.*\): its num_rows gives \[1\.5\] for 2 items"):
        made.num_tokens(SIZES.numpy())


def test_no_callback_is_called_without_items():
    def never(*_):
        raise AssertionError("called with nothing")

    made = module()
    made.before = made.between = made.after = never
    assert made(torch.empty(0, 48), torch.empty(0, 2, dtype=torch.int64)).shape == (0, DIM)


def test_a_trained_callback_before_a_frozen_encoder_learns(tiny):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(48, dtype=torch.float64))

        def forward(self, values, sizes):
            return values + self.shift, sizes

    made = build_modality(
        "it", EncoderConfig(family="siglip", config=VISION, train_encoder=False), DIM, torch.float64, 0,
        callbacks={"before": Shift()},
    )  # fmt: skip
    made(tiny.values("siglip", SIZES), SIZES).sum().backward()
    assert made.before.shift.grad.abs().sum() > 0
    assert not any(p.requires_grad for p in made.encoder.parameters())


@pytest.mark.parametrize("learns", [True, False])
def test_callbacks_with_weights_learn_with_the_projector_and_a_merge_with_the_backbone(learns):
    """So where a phase says what learns, all else of the model is frozen."""
    made = config(before=f"{HERE}:Shift", after=f"{HERE}:Weighted", merge=f"{HERE}:Scaled", train_projector=learns)
    made.backbone.train = learns
    model = build_mllm(made, VOCAB).train()
    assert [model.encoders["image"].after.training, model.backbone.merge.training] == [learns] * 2
    held = [*model.encoders["image"].before.parameters(), *model.encoders["image"].after.parameters()]
    held += [*model.backbone.merge.parameters()]
    assert len(held) == 3 and all(weight.requires_grad == learns for weight in held)


def a_batch(tiny):
    packed = tiny.Packed.of([14], image=[1, 2, 3, 4, 5, 6, 7, 8])
    sizes = torch.tensor([[2, 4]])
    return packed, {"image": (tiny.values("siglip", sizes), sizes)}


def test_a_merge_takes_the_place_of_motets_own(tiny, tmp_path):
    packed, media = a_batch(tiny)
    text = tiny.Packed.of([9])
    plain, merged, all_of_it = (
        build_mllm(config(**({"merge": f"{HERE}:{name}"} if name else {})), VOCAB, torch.float64)
        for name in ("", "merge", "merging_all")
    )
    assert merged(packed, media)[0] != plain(packed, media)[0]
    assert merged(text, {})[0] == plain(text, {})[0] != all_of_it(text, {})[0]
    export_hf(merged, tmp_path / "export")


def test_a_merge_that_changes_places_is_refused(tiny):
    packed, media = a_batch(tiny)
    with pytest.raises(UserError, match=r"merge \(.*:shrinking\) returned \[13, 32\] .* given embeddings \[14, 32\]"):
        build_mllm(config(merge=f"{HERE}:shrinking"), VOCAB, torch.float64)(packed, media)


def test_rows_at_one_place_are_added(tiny):
    from motet.models.merge import merge_rows

    packed = tiny.Packed.of([6], first=[1, 2], second=[1, 2])
    embeds, first, second = (torch.randn(n, 4, dtype=torch.float64) for n in (6, 2, 2))
    merged = merge_rows(embeds, {"first": first, "second": second}, packed)
    assert torch.equal(merged[1:3], first + second) and torch.equal(merged[3:], embeds[3:])
