"""Small jobs to plan."""

from functools import cache

from motet.core.cluster import Cluster, Device, Link
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.cost.analytic import Analytic
from motet.planner.job import Job

LLM = Transformer(512, 2048, 8, 2, gated=True, norm="rms", biases=(), causal=True)
ENCODER = Transformer(256, 1024, 4)


def model(*, frozen=False):
    """Two encoders; frozen: all but their projectors."""
    return multimodal(
        "small",
        language_model(LLM, 8, 4000, trained=not frozen),
        [
            connect(vit("image", ENCODER, 6, trained=not frozen), 512, "linear"),
            connect(audio_encoder("audio", ENCODER, 4, trained=not frozen), 512, "linear"),
        ],
    )


@cache
def workload(spread=0.0):
    """An image and a clip an example; spread: of all lengths."""
    lengths = {"image": 600, "audio": 800}
    items = {
        name: {"length": {"median": length, "spread": spread, "max": 4000}, "length_per_token": 4}
        for name, length in lengths.items()
    }
    task = {"name": "all", "text": {"median": 300, "spread": spread, "max": 4000}, "items": items}
    return Sampler.model_validate({"task": [task]}).workload(num_examples=512)


def job(spec=None, *, memory_mbytes=4000, num_nodes=2, batch_size=32, spread=0.0):
    device = Device("test", {"bf16": 2e13}, int(memory_mbytes * 1e6), 1e12)
    cluster = Cluster(device, num_nodes, 4, Link(1e11, 3e-6), Link(1e10, 1e-5))
    return Job(spec or model(), cluster, workload(spread), batch_size, Analytic(cluster))
