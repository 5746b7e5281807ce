"""Workers make of a picture what the VAE's encoder says of it, as its transform asks."""

import pickle
import shutil

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from motet.core.errors import UserError
from motet.data.decode import Decoder
from motet.data.images import ImageTransform
from motet.data.media import MediaRef
from motet.data.transforms import load_media
from motet.models.vae import StoredVAE, VAEConfig
from motet.train.input.latents import LatentTransform

TINY = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8),
    "norm_num_groups": 2,
}


@pytest.fixture
def vae(tmp_path):
    torch.manual_seed(2)
    diffusers.AutoencoderKL(**TINY).save_pretrained(tmp_path / "vae")
    return StoredVAE("model.generators.draw.vae", tmp_path / "vae", VAEConfig(encode_in="workers"))


@pytest.fixture
def picture(tmp_path):
    Image.effect_noise((12, 8), 60.0).convert("RGB").save(tmp_path / "a.png")
    return MediaRef("image", str(tmp_path / "a.png"), raw=(12, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_picture_becomes_what_the_encoder_says_of_its_pixels(vae, picture, dtype):
    pixels = ImageTransform(patch_size=2)
    transform = pickle.loads(pickle.dumps(LatentTransform(pixels, vae, dtype)))
    found, given = load_media(picture, transform), pixels.load(picture)
    assert (found.values.dtype, found.values.shape) == (np.dtype(str(dtype).split(".")[1]), (24, 8))
    assert transform.row_dim == 8
    assert found.size.tolist() == [4, 6] == transform.sizes(np.array([[12, 8]]))[0].tolist()
    expected = vae.read(dtype).moments(torch.from_numpy(given.values).to(dtype), torch.from_numpy(given.size)[None])
    assert np.array_equal(found.values, expected.numpy())
    shared = load_media(picture, transform, {})
    assert np.array_equal(shared.values, found.values)
    assert not hasattr(transform, "time_steps")


def test_a_worker_of_other_versions_says_so(vae):
    transform = LatentTransform(ImageTransform(patch_size=2), vae, torch.float32, "torch 1.0 and diffusers 0.1")
    with pytest.raises(UserError, match=r"by torch 2\S+ and diffusers \S+ than by the rank's torch 1.0 and diffusers"):
        transform.open()


@pytest.mark.slow
def test_a_worker_that_lacks_the_directory_says_so(vae, picture):
    transform = LatentTransform(ImageTransform(patch_size=2), vae, torch.float32)
    shutil.rmtree(vae.path)
    with Decoder({"image": transform}, num_workers=1) as decoder, pytest.raises(UserError) as refused:
        decoder.load([picture])
    assert str(refused.value).startswith("model.generators.draw.vae.path: there is neither ")
