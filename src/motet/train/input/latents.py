"""Images as what a frozen VAE says of them, computed by the workers that decode their files (`vae.encode_in`).

A step then draws latents and does no more of the VAE. What is drawn depends on the step and stays there, so a worker's
rows are a function of the file alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from motet.core.arrays import BoolArray, Int64Array
from motet.core.errors import UserError
from motet.core.example import Media
from motet.data.media import MediaRef
from motet.data.transforms import Transform
from motet.models.diffusers_directory import check_diffusers
from motet.models.vae import VAE, StoredVAE


def _versions() -> str:
    """Of torch without its build, as a trainer has CUDA's and a node without a GPU has not."""
    return f"torch {version('torch').split('+')[0]} and diffusers {version('diffusers')}"


@dataclass(frozen=True)
class LatentTransform:
    """The transform of a generator whose VAE encodes in workers: rows of `VAE.moments`, in place of rows of pixels.

    image:  makes the rows of pixels; what is asked of an item, but for its values, it says.
    dtype:  in which the encoder runs, and of the rows: float32 or float64.
    made_by: the versions that compute latents where the transform was made, which a worker must have.

    Example: `LatentTransform(ImageTransform(patch_size=8), vae, torch.float32).load(ref).values` has 8 values a row of
    Stable Diffusion's VAE, 4 means and 4 deviations.
    """

    image: Transform
    vae: StoredVAE
    dtype: torch.dtype
    made_by: str = field(default_factory=_versions)

    def __getattr__(self, name: str) -> Any:
        """What an image's transform may have beside the contract: `buckets`, `picture`, `decode`, ..."""
        if name == "image" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.image, name)

    @property
    def modality(self) -> str:
        """As of `Transform`."""
        return self.image.modality

    def sizes(self, raw: Int64Array) -> Int64Array:
        """As of `Transform`: a row of latents has the pixels of a row."""
        return self.image.sizes(raw)

    def accepts(self, raw: Int64Array) -> BoolArray:
        """As of `Transform`."""
        return self.image.accepts(raw)

    def refusal(self, raw: tuple[int, int]) -> str:
        """As of `Transform`."""
        return self.image.refusal(raw)

    @cached_property
    def row_dim(self) -> int:
        """The values of a row. Raises UserError for a directory without such a model."""
        with torch.device("meta"):
            return self.vae.read(self.dtype).moments_dim

    def open(self) -> None:
        """Read the encoder, in a worker, which has one core.

        Raises UserError for a directory that is not here, and for other versions of what computes latents.
        """
        check_diffusers(self.vae.table)
        if (here := _versions()) != self.made_by:
            raise UserError(
                f"{self.vae.table}.encode_in: latents would come out otherwise by {here} than by the rank's "
                f"{self.made_by}; install the same on both."
            )
        torch.set_num_threads(1)
        self._encoder.vae.decoder = nn.Identity()  # Of no use here, and the larger part.

    def load(self, ref: MediaRef) -> Media:
        """As of `Transform`."""
        return self._encoded(self.image.load(ref))

    def rows_of(self, decoded: Any) -> Media:
        """The item of a picture that others read, too."""
        return self._encoded(self.image.rows_of(decoded))  # type: ignore[attr-defined]

    @cached_property
    def _encoder(self) -> VAE:
        return self.vae.read(self.dtype)

    def _encoded(self, item: Media) -> Media:
        values = torch.from_numpy(item.values).to(self.dtype)
        return Media(self._encoder.moments(values, torch.from_numpy(item.size)[None]).numpy(), item.size)
