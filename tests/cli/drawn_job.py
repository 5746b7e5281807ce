"""A job of seconds without files: a model of shapes, and a workload with items of two phases; perhaps a generator."""

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

MADE = """
[model.generators.picture]
kind = "vit"
num_layers = 2
hidden = 16
mlp = 24
num_heads = 2
row_dim = 6
num_queries = 2

[[workload.task]]
name = "drawing"
share = 3
text = { median = 8, spread = 0.5, min = 2, max = 30 }
answer = 0.5
[workload.task.items.picture]
count = { choices = [1, 2] }
length = { median = 12, spread = 0.4, min = 4, max = 30 }
num_tokens = 2

[[workload.task]]
name = "drawing anew"
text = { value = 6 }
[workload.task.items.image]
length = { value = 8 }
length_per_token = 2
[workload.task.items.picture]
length = { value = 9 }
num_tokens = 2
"""
"""A generator, and tasks with items for it to make."""


def write_drawn_job(folder: Path, recipe: str = RECIPE) -> Path:
    """Write the recipe; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "drawn.toml"
    file.write_text(recipe)
    return file
