"""Generators of the tiny model that Plans are tried on: "draw" makes rasters, and "say" sequences; "paint" makes
rasters of pixels, whose latents a VAE of diffusers makes, in two blocks; "recall" makes rasters of what was said in a
turn. "etch" and "retell" are as "draw" and "recall", of three blocks; "mould" is a model of shapes of as many, and
makes sequences; "recast" is another, of turns.
"carve" and "weave" are transformers of diffusers of as many: one of SD3, and one of PixArt that is given turns. Both
make rasters whose sides can be halved.
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
from motet.models.pixart import PixArt
from motet.models.projector import Projector, ProjectorConfig
from motet.models.sd3 import SD3
from motet.models.vae import VAE

QUERIES = {"draw": 3, "say": 2, "paint": 2, "etch": 2, "mould": 2, "carve": 3}
ROW_DIMS_MADE = {"draw": 5, "say": 4, "paint": 4, "recall": 3, "etch": 5, "retell": 3, "mould": 4} | {
    "recast": 4,
    "carve": 3,
    "weave": 2,
}
SIZE_DIMS_MADE = dict.fromkeys(ROW_DIMS_MADE, 2) | {"say": 1, "mould": 1, "recast": 1}
BLOCKS_MADE = {"etch": 3, "retell": 3, "mould": 3, "recast": 3, "carve": 3, "weave": 3, "paint": 2}
"""Others are of one block."""
_HEADS = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 4}
MAX_TURN = 300
LATENTS = 3


def tiny_vae() -> VAE:
    """Four pixels make a row of latents. diffusers is imported for it alone: that takes seconds on each rank."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    channels = {"in_channels": 1, "out_channels": 1, "latent_channels": LATENTS, "block_out_channels": (4, 8)}
    return VAE(AutoencoderKL(**blocks, **channels, norm_num_groups=2, scaling_factor=0.7, shift_factor=0.1))


def tiny_sd3(num_conditions: int, channels: int) -> SD3:
    """Its first block has a second attention. diffusers is imported as in `tiny_vae`."""
    from diffusers import SD3Transformer2DModel

    rows = {"joint_attention_dim": 6, "caption_projection_dim": 8, "pooled_projection_dim": 5, "pos_embed_max_size": 4}
    kinds = {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    model = SD3Transformer2DModel(in_channels=channels, out_channels=channels, sample_size=4, **_HEADS, **rows, **kinds)
    return SD3(num_conditions, model)


def tiny_pixart(num_conditions: int, channels: int) -> PixArt:
    """It has learned the variance, too. diffusers is imported as in `tiny_vae`."""
    from diffusers import PixArtTransformer2DModel

    sizes = {"in_channels": channels, "out_channels": 2 * channels, "sample_size": 4, "norm_num_groups": 1}
    return PixArt(
        num_conditions, PixArtTransformer2DModel(cross_attention_dim=8, caption_channels=6, **_HEADS, **sizes)
    )


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
    denoiser: nn.Module = DiT(queries or MAX_TURN, config)
    if name in ("mould", "recast"):
        shape = Transformer(8, 12, 2, num_kv_heads=2, gated=True, norm="rms", biases=("query", "mlp"), qk_norm=True)
        denoiser = ShapedDenoiser(queries or MAX_TURN, shape, BLOCKS_MADE[name], ROW_DIMS_MADE[name])
    if name == "carve":
        denoiser, noise = tiny_sd3(queries, ROW_DIMS_MADE[name]), NoiseConfig(schedule="flow", shift=3.0)
    if name == "weave":
        denoiser = tiny_pixart(MAX_TURN, ROW_DIMS_MADE[name])
    entrance = OutputProjector(Projector(width, denoiser.condition_dim, ProjectorConfig()), queries or 1, drop=0.3)
    generator = Diffusion(denoiser, noise, vae)
    max_turn = 0 if queries else MAX_TURN
    return GeneratorModule(generator, entrance, queries, weight, learns, learns, max_turn=max_turn)
