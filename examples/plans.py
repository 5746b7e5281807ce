"""Plans of the five systems that Motet unites, with their papers' models and clusters, for `motet simulate`.

    python examples/plans.py OUT            # writes OUT/*.json
    motet simulate OUT/optimus.json --workload OUT/images.toml --html step.html

A Plan is plain data: change a number and simulate again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.core.spec import ModelSpec
from motet.cost.catalogue import cluster

WORKLOADS = {
    "images": """[[task]]
name = "one image of 1,024 patches, 1,024 tokens of text"
text = { value = 1024 }
[task.items.image]
length = { value = 1024 }
""",
    "tiles": """[[task]]
name = "9 tiles of 1,025 patches, 4,096 tokens in all"
text = { value = 1783 }
[task.items.image]
count = { value = 9 }
length = { value = 1025 }
length_per_token = 4
""",
    "mixture": """[[task]]
name = "text"
text = { median = 900, spread = 1.0, min = 16, max = 8192 }

[[task]]
name = "image chat"
text = { median = 90, spread = 0.8, min = 8, max = 4096 }
answer = 0.5
[task.items.image]
count = { choices = [1, 2, 4], weights = [6, 3, 1] }
length = { median = 1024, spread = 0.5, min = 64, max = 4096 }
length_per_token = 4

[[task]]
name = "speech"
text = { median = 40, spread = 0.5, min = 4, max = 400 }
[task.items.audio]
length = { median = 1200, spread = 0.4, min = 100, max = 3000 }
length_per_token = 4
""",
}


def orchmllm() -> Plan:
    """MLLM-84B (OrchMLLM Table 1) in hybrid-sharded data parallelism on 2,560 H100, every phase balanced."""
    llm = Transformer(8192, 29568, 64, 8, gated=True, norm="rms", biases=("query", "key", "value"), causal=True)
    model = multimodal(
        "MLLM-84B",
        language_model(llm, 80, 152_064),
        [
            connect(vit("image", Transformer(3200, 12800, 25), 45), 8192, downsample=4),
            connect(audio_encoder("audio", Transformer(3072, 12288, 24), 48), 8192, downsample=4),
        ],
    )
    stage = {"image": 45, "audio": 48, "backbone": 80}
    unit = Unit("all", (stage,), dp=2560, zero=3, shard_size=256, recompute=(stage,))
    return Plan(model, cluster("h100", 320), (unit,), 2560 * 30, 30, "data_parallel", balance="auto")


def disttrain() -> Plan:
    """MLLM-72B (MMScale Table 1), encoder and backbone disaggregated: 12 and 960 A800."""
    llm = Transformer(8192, 28672, 64, 8, gated=True, norm="rms", biases=(), causal=True)
    model = multimodal(
        "MLLM-72B",
        language_model(llm, 80, 128_256),
        [connect(vit("image", Transformer(1280, 5120, 16), 32), 8192)],
    )
    encoder = Unit("encoder", ({"image": 32},), dp=12)
    backbone = Unit("backbone", ({"backbone": 8},) * 10, first_rank=12, dp=12, pp=10, tp=8)
    return Plan(model, cluster("a800", 122), (encoder, backbone), 1920, 2, "1f1b")


def _vit_22b_gpt_175b() -> ModelSpec:
    gpt = Transformer(12288, 49152, 96, causal=True)
    encoder = connect(vit("image", Transformer(6144, 24576, 48), 48), 12288, "linear")
    return multimodal("ViT-22B + GPT-175B", language_model(gpt, 96, 51_200), [encoder])


def optimus(num_ranks: int = 3072) -> Plan:
    """ViT-22B in the bubbles of GPT-175B (Optimus Table 5): PP 8, TP 8, 12 chunks; the encoder with PP 4, TP 8."""
    data = num_ranks // 64
    backbone = Unit("backbone", ({"backbone": 1},) * 96, dp=data, pp=8, tp=8)
    encoder = Unit("encoder", ({"image": 12},) * 4, dp=data * 2, pp=4, tp=8)
    units = encoder, backbone
    model, hopper = _vit_22b_gpt_175b(), cluster("h100", num_ranks // 8)
    return Plan(model, hopper, units, 1536, 2, "interleaved_1f1b", deferred_warmup=True)


def cornstarch() -> Plan:
    """VALM-MM (Cornstarch Tables 1 and 2) on 24 A40: vision and audio in parallel, frozen but for their projectors."""
    llm = Transformer(4096, 14336, 32, 8, gated=True, norm="rms", biases=(), causal=True)
    vision, audio = Transformer(4096, 20480, 32), Transformer(3840, 15360, 30)
    model = multimodal(
        "VALM-MM",
        language_model(llm, 32, 128_256, trainable=False),
        [
            connect(vit("image", vision, 32, trainable=False), 4096, "linear"),
            connect(audio_encoder("audio", audio, 40, trainable=False), 4096, "linear"),
        ],
    )
    units = (
        Unit("vision", ({"image": 32},), first_rank=0, tp=2),
        Unit("audio", ({"audio": 40},), first_rank=2, tp=2),
        Unit("backbone", ({"backbone": 6}, *({"backbone": 5},) * 4, {"backbone": 6}), first_rank=4, pp=6, tp=2),
    )
    return Plan(model, cluster("a40", 4), units, 24, 1, "1f1b")


def omnibal() -> Plan:
    """InternVL-6B + InternLM2-20B (OmniBal Table 9) on 32 A100: one chain, cut where the stages are even.

    The paper has TP 2; InternViT's 25 heads cannot be divided.
    """
    llm = Transformer(6144, 16384, 48, 8, gated=True, norm="rms", biases=(), causal=True)
    encoder = connect(vit("image", Transformer(3200, 12800, 25), 45, class_row=True), 6144, downsample=4)
    model = multimodal("InternVL-Chat-1.5", language_model(llm, 48, 92_553), [encoder])
    stages = {"image": 22}, {"image": 23}, {"backbone": 24}, {"backbone": 24}
    unit = Unit("all", stages, dp=8, pp=4)
    return Plan(model, cluster("a100-80g", 4), (unit,), 64, 1, "1f1b")


PLANS = {plan.__name__: plan for plan in (orchmllm, disttrain, optimus, cornstarch, omnibal)}


def write_examples(folder: Path) -> None:
    """Write every plan, and the workloads to simulate them with."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PLANS.items():
        write_plan(make(), folder / f"{name}.json")
    for name, text in WORKLOADS.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_examples(Path(sys.argv[1]))
    print(f"Wrote {', '.join(PLANS)} to {sys.argv[1]}.")
