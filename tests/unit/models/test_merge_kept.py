"""What a merge of the user's own keeps for backward is part of the model's memory, whatever it computes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from motet.core.workload import BACKBONE
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm
from motet.models.merge import merge_rows
from motet.models.merge_kept import kept_of_merge
from motet.models.spec import model_spec

WIDTH = 32
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, embeds, features, sequences):
        merged = merge_rows(embeds, features, sequences)
        return merged * torch.sigmoid(self.gate(merged))


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, embeds, features, sequences):
        return merge_rows(embeds, features, sequences) + self.dropout(self.narrow(torch.tanh(self.wide(embeds))))


def squared(embeds, features, sequences):
    return merge_rows(embeds, features, sequences) ** 2


def replaced(embeds, features, sequences):
    assert [*features] == ["image"]
    return merge_rows(embeds, features, sequences)


def failing(embeds, features, sequences):
    raise KeyError("image")


def measured(merge, num_rows, num_features):
    """Bytes that the merge keeps in float32, without its output and the rows."""
    rows, kept = torch.randn(num_features, WIDTH, requires_grad=True), {}
    places = torch.arange(num_features)
    embeds = torch.randn(num_rows, WIDTH, requires_grad=True)
    sequences = SimpleNamespace(feature_positions={"image": places}, offsets=torch.tensor([0, num_rows]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        merged = merge(embeds.clone(), {"image": rows}, sequences)
    own = [*merge.parameters()] if isinstance(merge, nn.Module) else []
    for tensor in (merged, rows, places, *own):
        kept.pop(tensor.data_ptr(), None)
    sizes = {True: 1, False: 2}  # A mask counts as half an element, of four bytes here.
    counted = [each for each in kept.values() if each.is_floating_point() or each.dtype == torch.bool]
    return sum(each.untyped_storage().nbytes() * sizes[each.is_floating_point()] for each in counted)


@pytest.mark.parametrize("merge", [Gated(), Dropped(), squared])
def test_a_merge_keeps_what_a_few_rows_show(merge):
    kept = kept_of_merge(merge, WIDTH, ("image",))
    assert kept > 0 and 4 * kept * 500 == measured(merge, 500, 100)


def model_with(merge):
    backbone = BackboneConfig(family="qwen2", config=CONFIG)
    config = ModelConfig(encoders={"image": EncoderConfig(family="siglip", config=VISION)}, backbone=backbone)
    mllm = build_mllm(config, 50)
    mllm.backbone.merge = merge
    return mllm


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_predictions_have_it_with_the_merge_or_with_the_embeddings(on):
    def widths(merge):
        with torch.device(on):
            layers = model_spec(model_with(merge)).module(BACKBONE).layers
        return {each.kind: each.activation_width for each in layers}

    plain = widths(None)
    assert widths(replaced) == plain
    # What is squared, which the embeddings do not keep.
    assert widths(squared) == plain | {"embedding": plain["embedding"] + WIDTH}
    assert widths(Gated()) == plain | {"merge": 2 * WIDTH}


def test_a_merge_that_does_not_run_on_a_few_rows_counts_as_its_products():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(WIDTH, 3 * WIDTH)

        forward = staticmethod(failing)

    assert kept_of_merge(failing, WIDTH, ("image",)) is None
    layers = model_spec(model_with(Failing())).module(BACKBONE).layers
    assert next(each for each in layers if each.kind == "merge").activation_width == WIDTH


def test_it_draws_no_random_number_and_changes_no_weight():
    merge, state = Dropped(), torch.get_rng_state()
    weight = merge.wide.weight.clone()
    assert kept_of_merge(merge, WIDTH, ("image",)) is not None
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(merge.wide.weight, weight)
