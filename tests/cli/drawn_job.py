"""A job of seconds without files: a model of shapes, and a workload with items of two phases."""

from __future__ import annotations

from pathlib import Path

RECIPE = """\
[run]
batch_size = 8

[cluster]
device = "h100"
ranks_per_node = 2

[model.backbone]
num_layers = 2
hidden = 32
mlp = 48
num_heads = 4
num_kv_heads = 2
gated = true
norm = "rms"
biases = ["query", "key", "value"]
vocab_size = 64

[model.encoders.image]
kind = "vit"
num_layers = 2
hidden = 16
mlp = 32
num_heads = 2
row_dim = 12
projector = { downsample = 2 }

[model.encoders.audio]
kind = "audio"
num_layers = 1
hidden = 16
mlp = 32
num_heads = 2
num_mel_bins = 8
num_positions = 30
projector = { downsample = 2 }

[[workload.task]]
name = "image chat"
share = 3
text = { median = 10, spread = 0.7, min = 2, max = 40 }
answer = 0.5
[workload.task.items.image]
count = { choices = [1, 2] }
length = { median = 20, spread = 0.5, min = 2, max = 60 }
length_per_token = 2

[[workload.task]]
name = "text"
text = { median = 20, spread = 0.7, min = 2, max = 60 }

[[workload.task]]
name = "speech"
text = { median = 10, spread = 0.4, min = 2, max = 30 }
answer = 0.8
[workload.task.items.audio]
length = { median = 25, spread = 0.35, min = 4, max = 60 }
length_per_token = 4
"""


def write_drawn_job(folder: Path) -> Path:
    """Write the recipe; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "drawn.toml"
    recipe.write_text(RECIPE)
    return recipe
