"""Options of the smallest denoisers of diffusers, and of a VAE beside them, which tests of several folders take.

Channels are the tests' own.
"""

UNET = {
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "norm_num_groups": 2,
}
_TRANSFORMER = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 4, "sample_size": 6}
SD3 = _TRANSFORMER | {
    "joint_attention_dim": 6,
    "caption_projection_dim": 8,
    "pooled_projection_dim": 5,
    "pos_embed_max_size": 6,
}
PIXART = _TRANSFORMER | {"cross_attention_dim": 8, "caption_channels": 6}
