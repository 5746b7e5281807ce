"""ModalityModule and MLLM: hooks, frozen combinations, modalities that are absent, modules of the user's own."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from motet.core.errors import ArgumentError, UserError
from motet.core.item_segments import ItemSegments
from motet.models.module import ModalityModule
from motet.models.projector import Projector, ProjectorConfig


class Custom(nn.Module):
    """The smallest encoder: a row in, a row out. No blocks, no cost, no lengths."""

    output_dim = 6

    def __init__(self, row_dim: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(row_dim, 6)

    def num_outputs(self, sizes):
        return np.prod(sizes, axis=1)

    def forward(self, values, sizes):
        return self.linear(values).tanh()


class Listed(Custom):
    """An encoder whose blocks are a plain list beside registered modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = [self.first, self.second]

    def forward(self, values, sizes):
        hidden = super().forward(values, sizes)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def module_of(encoder, downsample=1, **options):
    return ModalityModule(encoder, Projector(encoder.output_dim, 8, ProjectorConfig(downsample=downsample)), **options)


def test_custom_module_needs_two_members_only():
    module = module_of(Custom())
    sizes = torch.tensor([[2, 3], [1, 1]])
    assert module(torch.randn(7, 4), sizes).shape == (7, 8)
    assert (module.cost, module.blocks) == ("packed", ())
    assert module.lengths(sizes.numpy()).tolist() == [6, 1]
    assert module.layers()[0].layer.weights == 24


def test_sizes_are_no_tensor_where_fsdp_moves_tensors_to_the_device():
    """Else no encoder that FSDP2 shards could read them on a GPU."""
    module, moved = module_of(Custom()), []
    module.register_forward_pre_hook(lambda module, args: moved.extend(map(torch.is_tensor, args)))
    module(torch.randn(7, 4), torch.tensor([[2, 3], [1, 1]]))
    assert moved == [True, False, False]


def test_blocks_in_a_plain_list_are_run_as_blocks():
    module = module_of(Listed())
    assert module.encoder.blocks == list(module.blocks) == [module.encoder.first, module.encoder.second]
    module(torch.randn(3, 4), torch.tensor([[3]])).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_block_that_is_no_submodule_is_refused():
    encoder = Custom()
    object.__setattr__(encoder, "blocks", [nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="not one of its submodules"):
        module_of(encoder)


def test_downsampling_joins_rows_of_one_item_and_fills_its_tail_with_zeros():
    projector = Projector(3, 5, ProjectorConfig(kind="linear", downsample=4))
    rows = torch.randn(11, 3)
    counts = np.array([6, 0, 4, 1])
    out = projector(rows, counts)
    expected = []
    for item in rows.split(counts.tolist()):
        filled = torch.cat([item, torch.zeros(-len(item) % 4, 3)])
        expected.append(projector.layers(filled.reshape(-1, 12)))
    torch.testing.assert_close(out, torch.cat(expected))
    assert projector.num_outputs(counts).tolist() == [2, 0, 1, 1] == [len(e) for e in expected]


@pytest.mark.parametrize("downsample", [4, 9])
def test_rows_of_a_raster_are_joined_in_squares(downsample):
    projector = Projector(3, 5, ProjectorConfig(kind="linear", downsample=downsample))
    grids = np.array([[4, 6], [3, 5], [1, 1], [6, 3]])
    rows = torch.randn(int(grids.prod(axis=1).sum()), 3)
    side, expected, counts = int(downsample**0.5), [], []
    for item, (height, width) in zip(rows.split(grids.prod(axis=1).tolist()), grids.tolist()):
        raster = nn.functional.pad(item.view(height, width, 3), (0, 0, 0, -width % side, 0, -height % side))
        blocks = raster.unfold(0, side, side).unfold(1, side, side)  # [down, across, 3, side, side]
        counts.append(blocks.shape[0] * blocks.shape[1])
        expected.append(projector.layers(blocks.permute(0, 1, 3, 4, 2).reshape(-1, downsample * 3)))
    assert projector.num_outputs(grids).tolist() == counts
    torch.testing.assert_close(projector(rows, grids), torch.cat(expected))


@pytest.mark.parametrize("norm", [None, "layer", "rms"])
@pytest.mark.parametrize("kind", ["none", "linear", "mlp"])
def test_rows_are_averaged_and_normalised_before_the_map(kind, norm):
    """Squares of rasters with edges, and stretches of sequences, whose last ones are shorter; against plain loops."""
    config = ProjectorConfig(kind=kind, pool=4, norm=norm)
    projector = Projector(3, 3 if kind == "none" else 5, config).double()
    for weight in projector.parameters():
        nn.init.uniform_(weight, 0.5, 1.5)

    def expected(blocks):
        rows = torch.stack([block.reshape(-1, 3).mean(0) for block in blocks])
        if norm == "layer":
            rows = nn.functional.layer_norm(rows, (3,), projector.norm.weight, projector.norm.bias, 1e-5)
        elif norm == "rms":
            rows = rows * (rows.square().mean(1, keepdim=True) + 1e-6).rsqrt() * projector.norm.weight
        return projector.layers(rows)

    rows = torch.randn(27, 3, dtype=torch.float64, requires_grad=True)
    raster, counts = np.array([[3, 5], [2, 6]]), np.array([9, 0, 17, 1])
    first, second = (grid.view(*size, 3) for grid, size in zip(rows.split([15, 12]), raster.tolist(), strict=True))
    squares = [
        grid[y : y + 2, x : x + 2] for grid in (first, second) for y in range(0, len(grid), 2) for x in (0, 2, 4)
    ]
    stretches = [part for item in rows.split(counts.tolist()) for part in item.split(4) if len(item)]
    for extents, blocks in ((raster, squares), (counts, stretches)):
        got, wanted = projector(rows, extents), expected(blocks)
        assert len(got) == projector.num_outputs(extents).sum()
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), rows)[0] for each in (got, wanted)))
    [described] = projector.described(1)
    assert described.layer.parameters == sum(weight.numel() for weight in projector.parameters())
    assert described.layer.weights == sum(weight.numel() for weight in projector.parameters() if weight.ndim > 1)
    assert described.layer.divisor == 4


def test_a_projector_starts_from_the_file_of_an_export(tmp_path):
    config = ProjectorConfig(kind="linear", norm="rms", path=tmp_path / "image.safetensors")
    with pytest.raises(UserError, match=r"image.safetensors is no file; .* projectors/NAME.safetensors of an export"):
        config.build(3, 5)
    saved = Projector(3, 5, ProjectorConfig(kind="linear", norm="rms"))
    save_file(saved.state_dict(), config.path)
    for name, weight in config.build(3, 5).state_dict().items():
        assert torch.equal(weight, saved.state_dict()[name])
    with pytest.raises(UserError, match=r"of layers.0.weight it has of shape \[5, 3\], and needs of shape \[5, 4\]"):
        config.model_copy(update={"norm": None}).build(4, 5)
    with pytest.raises(UserError, match=r"of norm.weight it has of shape \[3\], and needs none"):
        config.model_copy(update={"norm": None}).build(3, 5)
    config.path.write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"image\.safetensors cannot be read"):
        config.build(3, 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"downsample": 4, "pool": 4}, "`downsample` joins rows, and `pool` averages them"),
        ({"kind": "none", "path": "a"}, "`path` has no effect"),
        ({"kind": "resampler", "queries": 3, "pool": 4}, "`pool` is for linear and mlp only"),
        ({"kind": "qformer", "queries": 3, "norm": "rms"}, "`norm` is for linear, mlp and none only"),
    ],
)
def test_options_of_a_projector_that_do_not_go_together(options, said):
    with pytest.raises(ValueError, match=said):
        ProjectorConfig(**options)


def test_rows_of_another_width_need_a_map():
    with pytest.raises(UserError, match=r"gives the backbone rows of 6 values, and it takes 5; take .linear. or"):
        Projector(3, 5, ProjectorConfig(kind="none", downsample=2))


def test_joined_squares_are_internvls_pixel_shuffle():
    from transformers.models.internvl.modeling_internvl import InternVLModel

    images = torch.randn(2, 8, 8, 3, dtype=torch.float64)  # [image, row, column, channel]
    expected = InternVLModel.pixel_shuffle(None, images, 0.5).flatten(0, 2)
    projector = Projector(3, 12, ProjectorConfig(kind="linear", downsample=4)).double()
    projector.layers = nn.Identity()
    assert torch.equal(projector(images.flatten(0, 2), np.array([[8, 8], [8, 8]])), expected)


def test_only_squares_of_a_raster_can_be_joined(tiny):
    with pytest.raises(UserError, match=r"SiglipEncoder gives a raster .*must be 1, 4, 9, 16"):
        tiny.encoder("siglip", projector={"downsample": 2})
    assert tiny.encoder("whisper", projector={"downsample": 2}).projector.downsample == 2


def test_a_cost_that_is_no_kind_of_cost_is_refused():
    encoder = Custom()
    encoder.cost = "quadratic"
    with pytest.raises(UserError, match=r"Custom\.cost is 'quadratic'; it must be 'packed' or 'padded'"):
        module_of(encoder)


def noisy(tiny, **options):
    """An encoder, a projector and a backbone with dropout in each."""
    mllm = tiny.mllm(**options)
    encoder = mllm.encoders["audio"].encoder.model
    encoder.dropout = 0.5
    for layer in encoder.layers:
        layer.dropout = 0.5
    mllm.encoders["audio"].projector.layers.append(nn.Dropout(0.5))
    for layer in mllm.backbone.causal_lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return mllm


def losses(tiny, mllm, count=4):
    sizes = torch.tensor([[7]])
    media = {"audio": (tiny.values("whisper", sizes), sizes)}
    return {mllm(tiny.Packed.of([9], audio=[0, 1]), media)[0].item() for _ in range(count)}


def test_what_is_frozen_drops_nothing_out_however_often_train_is_called(tiny):
    frozen = noisy(tiny, train=False, train_encoder=False, train_projector=False)
    evaluated = losses(tiny, frozen.eval(), 1)
    for _ in range(2):
        assert losses(tiny, frozen.train()) == evaluated
    module = frozen.encoders["audio"]
    assert frozen.training and module.training and not module.encoder.training and not module.projector.training
    assert not frozen.backbone.causal_lm.training


@pytest.mark.parametrize("part", ["train", "train_encoder", "train_projector"])
def test_what_is_trained_drops_out(tiny, part):
    flags = dict.fromkeys(("train", "train_encoder", "train_projector"), False) | {part: True}
    assert len(losses(tiny, noisy(tiny, **flags).train())) > 1


def test_an_encoder_that_froze_itself_is_frozen(tiny):
    encoder = Custom()
    encoder.dropout = nn.Dropout(0.5)
    encoder.requires_grad_(False)
    module = module_of(encoder)
    assert not encoder.training and module.projector.training
    assert not module.train().encoder.training
    encoder.linear.bias.requires_grad_(True)
    assert module.train().encoder.training and encoder.dropout.training


def tile(values, sizes):
    """Cut images of 4 x 4 patches into four tiles of 2 x 2."""
    tiles = values.view(len(sizes), 2, 2, 2, 2, -1).transpose(2, 3)
    return tiles.reshape(len(values), -1), torch.full((4 * len(sizes), 2), 2)


tile.items = lambda sizes: (np.full((4 * len(sizes), 2), 2), np.full(len(sizes), 4))


def untile(features, sizes):
    return features.view(len(sizes), 2, 2, 2, 2, -1).transpose(2, 3).reshape(len(features), -1)


def test_tiling_hooks_need_no_change_to_the_model(tiny):
    module = tiny.encoder("siglip")
    sizes = torch.tensor([[4, 4], [4, 4]])
    values = tiny.values("siglip", sizes)
    tiles = module(*tile(values, sizes))
    module.before, module.after = tile, untile
    out = module(values, sizes)
    assert module.num_tokens(sizes.numpy()).tolist() == [16, 16]
    # Tile (row 0, column 1) of the first image is its patches (0..1, 2..3).
    torch.testing.assert_close(out.view(2, 4, 4, -1)[0, :2, 2:].flatten(0, 1), tiles[4:8])


def test_hooks_that_change_the_number_of_rows_say_so(tiny):
    sizes = torch.tensor([[4, 4]])
    values = tiny.values("siglip", sizes)
    module = tiny.encoder("siglip")

    def mean(features, sizes):
        return features.view(len(sizes), 4, 4, -1).mean(2).flatten(0, 1)

    module.before, module.after = tile, mean
    said = r"after \(.*mean\) gave 4 rows for 1 item, and 16 were expected.*num_rows beside it must say"
    with pytest.raises(UserError, match=said):
        module(values, sizes)
    mean.num_rows = lambda sizes: np.full(len(sizes), 4)
    assert len(module(values, sizes)) == 4 == module.num_tokens(sizes.numpy())[0]


def test_what_pads_whole_items_cannot_cut_them():
    class Padded(Custom):
        cost = "padded"

    with pytest.raises(ArgumentError, match="pads whole items, so its items can have no segments"):
        module_of(Padded(), cut=lambda sizes: ItemSegments.of([[1]] * len(sizes)))


def test_a_hook_may_have_parameters():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, features, sizes):
            return features * self.factor

    module = module_of(Custom(), after=Scale())
    module(torch.empty(0, 4), torch.empty(0, 1, dtype=torch.int64)).sum().backward()
    assert module.after.factor.grad == 0


PRESENCE = [{"image", "audio"}, {"image"}, {"audio"}, set()]


@pytest.mark.parametrize(
    "present", [pytest.param(names, marks=() if len(names) == 1 else pytest.mark.slow) for names in PRESENCE]
)
@pytest.mark.parametrize(("encoder", "projector", "backbone"), list(itertools.product([True, False], repeat=3)))
def test_what_gets_gradients_depends_on_the_flags_alone(tiny, present, encoder, projector, backbone):
    mllm = tiny.mllm(train=backbone, train_encoder=encoder, train_projector=projector)
    media, places, start = {}, {}, 0
    for name, family, sizes in (("image", "qwen2_vl", [[2, 4]]), ("audio", "whisper", [[7]])):
        if name in present:
            sizes = torch.tensor(sizes)
            media[name] = (tiny.values(family, sizes), sizes)
            places[name] = list(range(start, start + 2))
            start += 2
    loss, _ = mllm(tiny.Packed.of([9], **places), media)
    assert loss.requires_grad
    loss.backward()
    for name, parameter in mllm.named_parameters():
        trainable = backbone if "backbone" in name else projector if "projector" in name else encoder
        trainable = trainable and "embed_positions" not in name
        assert parameter.requires_grad == trainable == (parameter.grad is not None), name
    for name, module in mllm.encoders.items():
        assert module.trainable == (encoder or projector)
        if name not in present:
            assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("present", PRESENCE)
def test_gradients_of_a_batch_are_the_sum_over_its_documents(tiny, present):
    """Documents with and without media in one pack, as ranks with and without them will have."""
    mllm = tiny.mllm()
    params = [p for p in mllm.parameters() if p.requires_grad]
    images, clips = torch.tensor([[2, 4], [4, 4]]), torch.tensor([[9], [12]])
    values = {"image": tiny.values("qwen2_vl", images), "audio": tiny.values("whisper", clips)}
    sizes = {"image": images, "audio": clips}
    places = {"image": [1, 2, 14, 15, 16, 17], "audio": [4, 5, 6, 19, 20, 21]}
    tokens = {"image": [2, 4], "audio": [3, 3]}
    packed = tiny.Packed.of([12, 5, 7], **{name: places[name] for name in present})
    # Documents 0 and 2 hold one item of each modality; document 1 is text.
    packed.offsets = torch.tensor([0, 10, 13, 24])
    media = {name: (values[name], sizes[name]) for name in present}
    together, _ = mllm(packed, media)
    alone = 0.0
    for document, item in ((0, 0), (1, None), (2, 1)):
        own = {}
        for name in present if item is not None else ():
            part = values[name].split(sizes[name].prod(1).tolist())[item]
            own[name] = (part, sizes[name][item : item + 1])
            assert len(packed.document(document).feature_positions[name]) == tokens[name][item]
        alone = alone + mllm(packed.document(document), own)[0]
    torch.testing.assert_close(together, alone, rtol=1e-13, atol=0)
    got, expected = (torch.autograd.grad(x, params) for x in (together, alone))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


class Wide(Custom):
    """An encoder whose rows are in float32 whatever its weights are. in_blocks: whether these are all in blocks."""

    def __init__(self, in_blocks: bool) -> None:
        super().__init__()
        self.blocks = [self.linear] if in_blocks else []

    def forward(self, values, sizes):
        return super().forward(values, sizes).float()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_rows_have_the_type_of_weights_with_items_and_without(in_blocks):
    """Ranks exchange both."""
    module = ModalityModule(Wide(in_blocks), Projector(6, 6, ProjectorConfig(kind="none"))).bfloat16()
    rows = module(torch.randn(7, 4), torch.tensor([[2, 3], [1, 1]]))
    assert rows.dtype == module(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64)).dtype == torch.bfloat16
