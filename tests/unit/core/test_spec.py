"""Modules and models as data: stacks, counts, edges, and which layers need a gradient for their input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack


def layer(parameters=1, trainable=True, kind="attention") -> Layer:
    return Layer(kind, parameters, parameters, 1, 1, trainable=trainable)


def module(name, *trainable: bool) -> Module:
    return Module.of(name, [layer(trainable=each) for each in trainable])


def test_neighbours_that_are_alike_become_one_stack():
    layers = [layer(1), layer(2), layer(2), layer(1), layer(1, trainable=False)]
    it = Module.of("it", iter(layers), padded=True)
    assert it.stacks == (Stack(layer(1)), Stack(layer(2), 2), Stack(layer(1)), Stack(layer(1, trainable=False)))
    assert it.layers == tuple(layers)
    assert (it.num_layers, it.num_parameters, it.trainable, it.padded) == (5, 7, True, True)


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.booleans())
def test_a_gradient_must_pass_where_anything_before_is_trainable(trainable, reached):
    flags = module("it", *trainable).input_gradients(reached)
    assert flags == tuple(reached or any(trainable[:number]) for number in range(len(trainable)))


def test_gradients_pass_from_module_to_module():
    """Cornstarch Figure 3: a frozen backbone must pass gradients on to a trainable module that feeds it."""
    image, audio = module("image", False, True), module("audio", False, False)
    backbone, generator = module("backbone", False, False), module("generator", True)
    modules = (image, audio, backbone, generator)
    edges = (("image", "backbone"), ("audio", "backbone"), ("backbone", "generator"))
    spec = ModelSpec("model", modules, edges)
    assert spec.input_gradients == {
        "image": (False, False),
        "audio": (False, False),
        "backbone": (True, True),
        "generator": (True,),
    }
    assert spec.sources("backbone") == ("image", "audio")
    assert spec.num_parameters == 7
    without = ModelSpec("model", (audio, backbone, generator), edges[1:])
    assert without.input_gradients["generator"] == (False,)


def test_outputs_may_enter_a_module_again():
    image, blocks = module("image", True), Layer("attention", 1, 1, 1, 1, Attention(1, 1))
    backbone, edges = Module.of("backbone", [blocks] * 3), (("image", "backbone"),)
    spec = ModelSpec("model", (image, backbone), edges, (("image", "backbone", 2), ("image", "backbone", 1)))
    assert spec.entries("image", "backbone") == (0, 1, 2)
    assert ModelSpec("model", (image, backbone), edges).entries("image", "backbone") == (0,)
    for again in (("image", "backbone", 0), ("image", "backbone", 3), ("backbone", "image", 1)):
        with pytest.raises(ArgumentError, match=f"enters '{again[1]}' again before its block {again[2]}; it must feed"):
            ModelSpec("model", (image, backbone), edges, (again,))


def test_what_does_not_fit_together_is_named():
    image, backbone = module("image", True), module("backbone", True)
    with pytest.raises(ArgumentError, match="two modules have one name"):
        ModelSpec("model", (image, image), ())
    with pytest.raises(ArgumentError, match="an edge names 'audio'; the modules are image, backbone"):
        ModelSpec("model", (image, backbone), (("audio", "backbone"),))
    with pytest.raises(ArgumentError, match="'image' feeds 'backbone', so it must come before it"):
        ModelSpec("model", (backbone, image), (("image", "backbone"),))
    with pytest.raises(ArgumentError, match="has no module 'audio'; it has image, backbone"):
        ModelSpec("model", (image, backbone), ()).module("audio")


def test_no_more_than_all_is_divided():
    with pytest.raises(ArgumentError, match="divided_width 5; it must be at most activation_width, which is 4"):
        Layer("projector", 4, 4, output_width=2, activation_width=4, divided_width=5)
