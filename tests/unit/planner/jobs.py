"""Small jobs to plan, and, for properties, jobs of all kinds."""

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from motet.core.cluster import Cluster, Device, Link
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.cost.analytic import Analytic
from motet.planner.job import Job
from motet.schedule import check_fit, program_of, validate
from motet.simulate.predict.predict import predict

LLM = Transformer(512, 2048, 8, 2, gated=True, norm="rms", biases=(), causal=True)
ENCODER = Transformer(256, 1024, 4)


def model(*, frozen=False, tied=False):
    """Two encoders; frozen: all but their projectors. tied: embedding and output layer."""
    return multimodal(
        "small",
        language_model(LLM, 8, 4000, trainable=not frozen, tied=tied),
        [
            connect(vit("image", ENCODER, 6, trainable=not frozen), 512, "linear", downsample=4),
            connect(audio_encoder("audio", ENCODER, 4, trainable=not frozen), 512, "linear", downsample=2),
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


def predicted(given_job, candidate, rounding=0.0):
    """The Prediction of a proposed Plan, which fits its cluster, can be executed, and takes at least its bound.

    rounding: relative, where the bound is a sum in another order than the step."""
    check_fit(candidate.plan)
    validate(program_of(candidate.plan))
    prediction = predict(candidate.plan, given_job.workload, given_job.cost, seed=given_job.seed)
    assert prediction.peak_bytes.max() <= given_job.capacity_bytes
    assert candidate.bound_s <= prediction.step_s * (1 + rounding)
    return prediction


@st.composite
def jobs(draw):
    """One or two encoders, trained, frozen, or all frozen but for projectors; GQA, windows, tied weights, and a
    generator or none; on 2 to 16 ranks, to be doubled."""
    trainable, window = draw(st.sampled_from(["all", "backbone", "projectors"])), draw(st.sampled_from([0, 64]))
    hidden = draw(st.sampled_from([512, 1024]))
    shape = Transformer(draw(st.sampled_from([256, 768])), 2048, 4, window=window)
    llm = Transformer(hidden, 4 * hidden, 8, draw(st.sampled_from([2, 8])), gated=draw(st.booleans()), causal=True)
    length = {"median": 600, "spread": draw(st.sampled_from([0.0, 0.7])), "max": 4000}
    layers = st.sampled_from([3, 6, 12])
    encoders = [vit("image", shape, draw(layers), trainable=trainable == "all")]
    if draw(st.booleans()):
        encoders.append(audio_encoder("audio", shape, draw(layers), trainable=trainable == "all"))
    generators = [vit("picture", shape, 3)] if draw(st.booleans()) else []
    spec = multimodal(
        "any",
        language_model(
            llm, draw(st.sampled_from([4, 8])), 4000, trainable=trainable != "projectors", tied=draw(st.booleans())
        ),
        [connect(encoder, hidden, "linear") for encoder in encoders],
        generators,
    )
    names = [module.name for module in (*encoders, *generators)]
    items = {name: {"length": length, "length_per_token": 4} for name in names}
    text = {"median": 300, "spread": draw(st.sampled_from([0.0, 0.8])), "max": 4000}
    lengths = Sampler.model_validate({"task": [{"name": "all", "text": text, "items": items}]})
    num_nodes, ranks_per_node = draw(st.sampled_from([(1, 2), (1, 4), (1, 8), (2, 2), (3, 2), (2, 4), (3, 4), (2, 8)]))
    gbytes, batch_size = draw(st.sampled_from([0.4, 0.8, 1.5, 4.0])), draw(st.sampled_from([6, 8, 16, 24, 48]))
    device = Device("test", {"bf16": 2e13}, int(gbytes * 1e9), 1e12)
    cluster = Cluster(device, num_nodes, ranks_per_node, Link(1e11, 3e-6), Link(1e10, 1e-5))
    return Job(spec, cluster, lengths.workload(num_examples=64), batch_size, Analytic(cluster))


def scaled(job, *, nodes=1, memory=1):
    """The same job on more devices, or on devices with more memory, or less."""
    device = replace(job.cluster.device, memory_bytes=int(memory * job.cluster.device.memory_bytes))
    cluster = replace(job.cluster, device=device, num_nodes=nodes * job.cluster.num_nodes)
    return replace(job, cluster=cluster, cost=Analytic(cluster))
