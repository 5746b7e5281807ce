"""InternLM2 from a directory as published, beside a plain computation of it; and the directory that comes back."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, silu

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.build import BackboneConfig, ModelConfig, build_backbone, build_mllm
from motet.models.export import export_hf
from motet.models.spec import spec_of_directory
from motet.train.export import check_adapters

WIDTH, INNER, LAYERS, HEADS, GROUPS, VOCAB, EPS, THETA = 24, 40, 2, 6, 2, 50, 1e-5, 100.0
DIM = WIDTH // HEADS
CONFIG = {
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "model_type": "internlm2",
    "attn_implementation": "eager",
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "pad_token_id": 2,
    "rms_norm_eps": EPS,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
}
OF_LAYER = {
    "attention.wqkv.weight": ((HEADS + 2 * GROUPS) * DIM, WIDTH),
    "attention.wo.weight": (WIDTH, WIDTH),
    "feed_forward.w1.weight": (INNER, WIDTH),
    "feed_forward.w3.weight": (INNER, WIDTH),
    "feed_forward.w2.weight": (WIDTH, INNER),
    "attention_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
}


def written(folder, **options):
    """The directory; its weights."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"model.tok_embeddings.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {"output.weight": (VOCAB, WIDTH)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in OF_LAYER.items()}
    config = CONFIG | options
    if config["bias"]:
        shapes |= {
            f"model.layers.{layer}.attention.wqkv.bias": OF_LAYER["attention.wqkv.weight"][:1] for layer in (0, 1)
        }
        shapes |= {f"model.layers.{layer}.attention.wo.bias": (WIDTH,) for layer in (0, 1)}
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder, {name: weight.double().requires_grad_() for name, weight in weights.items()}


def turned(rows):
    """Halves of each head [rows, heads, DIM] turned with the position; angles are float32, as InternLM2 has them."""
    frequencies = 1.0 / THETA ** (torch.arange(0, DIM, 2).float() / DIM)
    angles = torch.arange(len(rows)).float()[:, None] * frequencies
    cos, sin = (torch.cat([each, each], 1).double()[:, None] for each in (angles.cos(), angles.sin()))
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat([-second, first], -1) * sin


def normed(rows, weight):
    return weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)


def plain_loss(weights, tokens, targets):
    """The sum over targets of one document."""
    hidden, count = weights["model.tok_embeddings.weight"][tokens], len(tokens)
    for layer in range(LAYERS):
        own = {name.removeprefix(f"model.layers.{layer}."): each for name, each in weights.items()}
        rows = normed(hidden, own["attention_norm.weight"])
        joined = rows @ own["attention.wqkv.weight"].T + own.get("attention.wqkv.bias", 0)
        groups = joined.view(count, GROUPS, HEADS // GROUPS + 2, DIM)
        query, key, value = turned(groups[:, :, :-2].flatten(1, 2)), turned(groups[:, :, -2]), groups[:, :, -1]
        key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        hidden = hidden + attended @ own["attention.wo.weight"].T + own.get("attention.wo.bias", 0)
        rows = normed(hidden, own["ffn_norm.weight"])
        gate, up = (rows @ own[f"feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        hidden = hidden + (silu(gate) * up) @ own["feed_forward.w2.weight"].T
    logits = normed(hidden, weights["model.norm.weight"]) @ weights["output.weight"].T
    return cross_entropy(logits[:-1][targets[1:]], tokens[1:][targets[1:]], reduction="sum")


def in_groups(gradients, layer, kind):
    """The gradients of queries, keys and values as one of all groups."""
    parts = [gradients[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
    return torch.cat([part.view(GROUPS, -1, DIM, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


def by_their_names(gradients, names):
    """Gradients by the names in a directory. gradients: by those of Llama."""
    places = {"w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj", "wo": "self_attn.o_proj"}
    places |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    outside = {"model.tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    found = {}
    for name in names:
        if "wqkv" in name:
            found[name] = in_groups(gradients, int(name.split(".")[2]), name.rpartition(".")[2])
        elif name.startswith("model.layers"):
            kind = name.split(".")[-2]
            found[name] = gradients[f"model.layers.{name.split('.')[2]}.{places[kind]}.{name.rpartition('.')[2]}"]
        else:
            found[name] = gradients[outside.get(name, name)]
    return found


@pytest.mark.parametrize("options", [{}, {"bias": True, "rope_scaling": None}])
def test_loss_and_gradients_are_those_of_a_plain_computation(tiny, tmp_path, options):
    folder, weights = written(tmp_path / "model", **options)
    backbone = build_backbone(BackboneConfig(family="internlm2", path=folder), VOCAB, torch.float64, 0)
    packed = tiny.Packed.of([9, 1, 14, 6])
    documents = [packed.document(number) for number in range(4)]
    expected = sum(plain_loss(weights, each.tokens, each.targets) for each in documents)
    loss, _ = backbone(packed, {})
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward(), expected.backward()
    names = plain_names(backbone.causal_lm)
    gradients = {names[name]: each.grad for name, each in backbone.causal_lm.named_parameters()}
    for name, found in by_their_names(gradients, weights).items():
        torch.testing.assert_close(found, weights[name].grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_directory_comes_back_bit_for_bit(tmp_path):
    folder, _ = written(tmp_path / "model", bias=True)
    config = ModelConfig(backbone=BackboneConfig(family="internlm2", path=folder), encoders={})
    export_hf(build_mllm(config, VOCAB, torch.float32), tmp_path / "out")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out/backbone"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    stored = json.loads((tmp_path / "out/backbone/config.json").read_text())
    assert {name: stored[name] for name in CONFIG if name != "attn_implementation"} == {
        name: each for name, each in (CONFIG | {"bias": True}).items() if name != "attn_implementation"
    }
    assert not stored.keys() & {"rope_parameters", "attention_bias", "mlp_bias", "scaling"}


def test_documents_end_where_frequencies_would_change(tmp_path):
    bounded, free = (
        build_backbone(
            BackboneConfig(family="internlm2", path=written(tmp_path / name, rope_scaling=scaling)[0]),
            VOCAB,
            torch.float32,
            0,
        )
        for name, scaling in (("bounded", {"type": "dynamic", "factor": 1.0}), ("free", None))
    )
    assert (bounded.max_rows, free.max_rows) == (64, None)
    assert spec_of_directory(tmp_path / "free").num_parameters == sum(each.numel() for each in free.parameters())
    folder, _ = written(tmp_path / "linear", rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(UserError, match=r'rope_scaling is .*; of InternLM2 it must be null, or of type "dynamic"'):
        build_backbone(BackboneConfig(family="internlm2", path=folder), VOCAB, torch.float32, 0)


@pytest.mark.parametrize(("part", "said"), [("backbone", "Llama, which InternLM2"), ("image", "CLIP, which EVA-CLIP")])
def test_adapters_with_names_of_other_layers_are_not_saved(part, said):
    recipe = SimpleNamespace(modules=SimpleNamespace(lora={part: None}), export=SimpleNamespace(adapter="saved"))
    recipe.model = ModelConfig(backbone={"family": "internlm2"}, encoders={"image": {"family": "eva_clip"}})
    with pytest.raises(UserError, match=rf'layers of {said}.s own code has not; set export.adapter = "merged"'):
        check_adapters(recipe)
