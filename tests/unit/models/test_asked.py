"""What modules say that their attention will ask is what it asks, so that what is made ahead is what is needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from motet.ahead import MadeAhead, finding
from motet.models.asked import Asked
from motet.models.attention import PackedItems
from motet.models.backbone import Backbone
from motet.models.key_items import KeyItems
from motet.models.table_items import TableItems
from unit.models.test_backbone import FAMILIES, LENGTHS, WITHOUT_WINDOW

CPU = torch.device("cpu")
PACKED = ["siglip", "clip", "dinov2", "internvl", "qwen2_vl", "eva_clip", "pixtral", "dinov3", "qwen2_5_vl", "qwen3_vl"]


@contextmanager
def told(of_attention: bool) -> Iterator[set[Asked]]:
    """What attention asks in the block, or what extents are told that it will."""
    found: set[Asked] = set()
    if of_attention:
        by = Asked.by
        with mock.patch.object(Asked, "by", staticmethod(lambda *call: found.add(asked := by(*call)) or asked)):
            yield found
        return
    with (
        mock.patch.object(PackedItems, "make_ahead", lambda items, asked: found.add(asked)),
        mock.patch.object(TableItems, "make_ahead", lambda items, asked: found.add(asked)),
    ):
        yield found


def hiding(asked: set[Asked]) -> set[Asked]:
    """With the windows that hide anything of these documents."""
    return {each if (each.window or 0) < max(LENGTHS) else each._replace(window=None) for each in asked}


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "opt"])
@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.1}, {"sliding_window": 4}], ids=str)
def test_backbones_say_what_they_ask(tiny, family, options):
    if "sliding_window" in options and family in (*WITHOUT_WINDOW, "gpt2", "opt"):
        pytest.skip(f"{family} has no sliding window")
    if family == "gpt2":
        options = dict(zip(["attn_pdrop"], options.values()))
    if "sliding_window" in options and family in ("qwen2", "qwen3", "qwen3_moe"):
        options = options | {"use_sliding_window": True} | ({} if family == "qwen3_moe" else {"max_window_layers": 1})
    backbone, packed = tiny.backbone(family, **options), tiny.Packed.of(LENGTHS)
    with told(of_attention=True) as asked:
        backbone(packed, {})
    with told(of_attention=False) as said:
        backbone.make_ahead(packed, range(2), CPU, torch.float64)
    assert hiding(said) == hiding(asked)


@pytest.mark.parametrize("family", PACKED)
def test_encoders_say_what_they_ask(tiny, family):
    """But for their heads, which nothing follows from."""
    sizes = torch.tensor([[4, 4], [2, 6]])
    module, values = tiny.encoder(family), tiny.values(family, sizes).double()
    with told(of_attention=True) as asked:
        module(values, sizes)
    with told(of_attention=False) as said:
        module.make_ahead(values, sizes, None, range(len(module.blocks)), CPU, torch.float64)
    assert said == {each._replace(heads=0, kv_heads=0) for each in asked} and asked


def test_frozen_weights_drop_nothing_out(tiny):
    backbone = tiny.backbone("qwen2", attention_dropout=0.1).requires_grad_(False)
    with told(of_attention=False) as said:
        backbone.make_ahead(tiny.Packed.of(LENGTHS), range(2), CPU, torch.float64)
    assert {each.dropout for each in said} == {0.0}


def test_documents_are_made_once_for_all_passes_of_a_microbatch(tiny):
    """And anew where nobody says of which microbatch they are."""
    backbone, packed, made = tiny.backbone("gemma3"), tiny.Packed.of(LENGTHS), MadeAhead()
    with mock.patch("motet.models.backbone.PackedItems", wraps=PackedItems) as making:
        with finding("backbone", made):
            backbone.make_ahead(packed, range(2), CPU, torch.float64)
            expected = [backbone(packed, {})[0] for _ in range(2)]
        assert making.call_count == 1
        assert torch.equal(backbone(packed, {})[0], expected[0]) and torch.equal(*expected)
        assert making.call_count == 2
        with finding("backbone", made):
            backbone(tiny.Packed.of(LENGTHS), {})
        assert making.call_count == 3


def test_an_encoder_may_have_any_name(tiny):
    """What is made of documents is found beside who sees the rows of an encoder that is called so."""
    backbone, packed = Backbone(tiny.backbone().causal_lm, keys={"documents": 4}), tiny.Packed.of(LENGTHS)
    with finding("backbone", MadeAhead()):
        assert isinstance(backbone._who_sees(packed), PackedItems)
        assert isinstance(backbone._keys_seen("documents", 4, packed), KeyItems)
