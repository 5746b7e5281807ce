"""Generators of the tiny model that Plans are tried on: "draw" makes rasters, and "say" sequences; "paint" makes
rasters of pixels, whose latents a VAE of diffusers makes; "recall" makes rasters of what was said in a turn. "etch" and
"retell" are as "draw" and "recall", of three blocks; "mould" is a model of shapes of as many, and makes sequences.
"""

from collections.abc import Sequence

from torch import nn

from motet.core.shapes import Transformer
from motet.models.diffusion import Diffusion
from motet.models.dit import DiT, DiTConfig
from motet.models.families.shaped_denoiser import ShapedDenoiser
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.mllm import MLLM
from motet.models.noise_schedule import NoiseConfig
from motet.models.projector import Projector, ProjectorConfig
from motet.models.vae import VAE

QUERIES = {"draw": 3, "say": 2, "paint": 2, "etch": 2, "mould": 2}
ROW_DIMS_MADE = {"draw": 5, "say": 4, "paint": 4, "recall": 3, "etch": 5, "retell": 3, "mould": 4}
SIZE_DIMS_MADE = {"draw": 2, "say": 1, "paint": 2, "recall": 2, "etch": 2, "retell": 2, "mould": 1}
BLOCKS_MADE = {"etch": 3, "retell": 3, "mould": 3}
"""Others are of one block."""
MAX_TURN = 300
LATENTS = 3


def tiny_vae() -> VAE:
    """Four pixels make a row of latents. diffusers is imported for it alone: that takes seconds on each rank."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    channels = {"in_channels": 1, "out_channels": 1, "latent_channels": LATENTS, "block_out_channels": (4, 8)}
    return VAE(AutoencoderKL(**blocks, **channels, norm_num_groups=2, scaling_factor=0.7, shift_factor=0.1))


def with_generators(model: MLLM, made: Sequence[str], frozen: Sequence[str]) -> MLLM:
    """The model with generators behind its backbone, which has query tokens; no weight of theirs is zero, so that
    gradients flow everywhere.

    frozen: may name generators. `made` says of each by its name; none is the model as it is.
    """
    if not made:
        return model
    generators = {name: _generator(name, model.backbone.dim, name not in frozen) for name in made}
    model = MLLM(dict(model.encoders), model.backbone, generators).double()
    for parameter in model.generators.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def _generator(name: str, width: int, learns: bool) -> GeneratorModule:
    vae = tiny_vae() if name == "paint" else None
    config = DiTConfig(
        row_dim=LATENTS if vae else ROW_DIMS_MADE[name], hidden=8, num_layers=BLOCKS_MADE.get(name, 1), num_heads=2
    )
    noise = NoiseConfig(predicts="v", min_snr=5.0) if name == "say" else NoiseConfig()
    queries, weight = QUERIES.get(name, 0), 0.5 if name == "say" else 2.0
    entrance = OutputProjector(Projector(width, 8, ProjectorConfig()), queries or 1, drop=0.3)
    denoiser: nn.Module = DiT(queries or MAX_TURN, config)
    if name == "mould":
        shape = Transformer(8, 12, 2, num_kv_heads=2, gated=True, norm="rms", biases=("query", "mlp"), qk_norm=True)
        denoiser = ShapedDenoiser(queries, shape, BLOCKS_MADE[name], ROW_DIMS_MADE[name])
    generator = Diffusion(denoiser, noise, vae)
    max_turn = 0 if queries else MAX_TURN
    return GeneratorModule(generator, entrance, queries, weight, learns, learns, max_turn=max_turn)
