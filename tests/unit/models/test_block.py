import pytest
import torch
from torch import nn

from motet.core.errors import UserError
from motet.models.block import Block, outside_blocks, plain_names, wrap_blocks


class Layer(nn.Module):
    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, hidden, scale, *, shift=0.0):
        return self.frozen(self.linear(hidden)) * scale + shift


def test_block_is_called_as_its_layer():
    layer = Layer()
    x = torch.randn(2, 3)
    expected = layer(x, 2.0, shift=1.0)
    for recompute in (False, True):
        assert torch.equal(Block(layer, recompute)(x, 2.0, shift=1.0), expected)
    assert Block(layer)(x[:0], 2.0, shift=1.0).shape == (0, 3)
    assert Block(layer).kind == "full" and not hasattr(Block(layer), "_private")


def test_input_of_a_block_needs_a_gradient_if_and_only_if_gradients_are_taken():
    seen = []
    block = Block(Layer())
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0].requires_grad))
    x = torch.randn(2, 3)
    block(x, 1.0)
    with torch.no_grad():
        block(x, 1.0)
    assert seen == [True, False] and not x.requires_grad


def test_layers_are_found_beside_modules_that_have_no_length():
    class Lengthless(nn.Linear):
        def __len__(self):
            raise TypeError

    root = nn.Sequential(Lengthless(3, 3), Layer())
    assert wrap_blocks(root, [root[1]]) == [root[1]]


def test_one_layer_in_two_places_is_refused():
    root = nn.Sequential(layer := Layer(), layer)
    with pytest.raises(
        UserError, match=r"Sequential runs one layer in several places \(2 layers, of which 1 are apart"
    ):
        wrap_blocks(root, root)


def test_names_without_blocks():
    root = nn.Sequential(nn.Linear(3, 3), Layer(), nn.ModuleDict({"inner": Layer()}))
    before = list(root.state_dict())
    blocks = wrap_blocks(root, [root[1], root[2]["inner"]])
    assert [type(b.inner) for b in blocks] == [Layer, Layer] and root[1] is blocks[0]
    assert list(plain_names(root).values()) == before
    assert list(plain_names(blocks[0]).values()) == list(Layer().state_dict())
    assert [id(p) for p in outside_blocks(root)] == [id(p) for p in root[0].parameters()]
