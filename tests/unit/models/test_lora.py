"""LoRA adapters against peft's own model in float64: losses, gradients, weights after five steps; what is saved."""

import json
from contextlib import contextmanager

import peft
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.build import ModelConfig, build_mllm
from motet.models.exact import keep_float64
from motet.models.export import export_hf
from motet.models.fused import SplitLinear
from motet.models.lora import LoraConfig, LoraLinear, SplitLora, add_lora, lora_layers
from motet.models.materialise import materialise
from motet.models.named_weights import is_lora

LENGTHS = [9, 14, 6]
BACKBONES = ["qwen2", "llama", "mistral", "gemma2", "phi3", "olmo2", "gpt2"]
ENCODERS = ["siglip", "dinov2", "qwen2_vl", "whisper"]


def built(tiny, lora, family="qwen2", encoder="", dtype=torch.float64, **model):
    """A model whose adapters add something: B is not 0."""
    encoders = {"image": {"family": encoder, "config": tiny.encoders[encoder]}} if encoder else {}
    backbone = {"family": family, "config": tiny.options_of(family)}
    mllm = build_mllm(ModelConfig(backbone=backbone, encoders=encoders, lora=lora, **model), tiny.vocab, dtype, seed=4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in mllm.named_parameters():
            if is_lora(name) or parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return mllm


def relative(got, wanted):
    return ((got - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()


@contextmanager
def wide_softmax():
    """In the block, HF's own attention does not round its weights to float32."""
    softmax = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
        yield


def pefts_own(folder, part="backbone"):
    """The model that peft makes of what was exported."""
    stored = AutoModelForCausalLM.from_pretrained(folder / part, dtype=torch.float64)
    base = type(stored)(stored.config)  # Its buffers are float32, as in a model of any dtype.
    for parameter in base.parameters():
        parameter.data = parameter.data.double()
    base.load_state_dict(stored.state_dict())
    keep_float64(base)
    return peft.PeftModel.from_pretrained(base, folder / "adapters" / part, is_trainable=True)


def loss_of_peft(model, packed):
    total = 0.0
    for number in range(len(packed.offsets) - 1):
        document = packed.document(number)
        rows = document.targets[1:]
        logits = model(input_ids=document.tokens[None], use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits[rows], document.tokens[1:][rows], reduction="sum")
    return total


@pytest.mark.parametrize("family", BACKBONES)
def test_five_steps_are_those_of_pefts_own_model(tiny, tmp_path, family):
    lora = {"rank": 3, "alpha": 5.0, "rank_stabilized": family == "llama"}
    if family == "mistral":
        lora["targets"] = ["q_proj", "mlp.*"]
    mllm = built(tiny, {"backbone": lora}, family)
    export_hf(mllm, tmp_path / "export")
    theirs, ours = pefts_own(tmp_path / "export"), mllm.backbone
    names = plain_names(ours.causal_lm)
    learns = {names[name]: weight for name, weight in ours.causal_lm.named_parameters() if weight.requires_grad}
    mine = {f"base_model.model.{name}": weight for name, weight in learns.items()}
    its = {name.replace(".default", ""): each for name, each in theirs.named_parameters() if each.requires_grad}
    assert mine.keys() == its.keys() and all(map(is_lora, mine))
    optimizers = [torch.optim.AdamW(weights.values(), lr=1e-2) for weights in (mine, its)]
    packed = tiny.Packed.of(LENGTHS)
    with wide_softmax():
        for _ in range(5):
            losses = ours(packed, {})[0], loss_of_peft(theirs, packed)
            assert relative(*losses) < 1e-11
            for loss, optimizer in zip(losses, optimizers):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert max(relative(weight.grad, its[name].grad) for name, weight in mine.items()) < 1e-10
    assert max(relative(weight, its[name]) for name, weight in mine.items()) < 1e-10
    assert all(weight.grad is None for name, weight in ours.causal_lm.named_parameters() if not is_lora(name))


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoders_rows_and_gradients_are_those_of_pefts_layers(tiny, tmp_path, family):
    """peft's layers are put into the same encoder, from the directory that was saved."""
    mllm = built(tiny, {"image": {"rank": 2, "alpha": 3.0}}, encoder=family)
    export_hf(mllm, tmp_path)
    plain = build_mllm(
        ModelConfig(
            backbone={"family": "qwen2", "config": tiny.backbone_options},
            encoders={"image": {"family": family, "path": tmp_path / "encoders" / "image"}},
        ),
        tiny.vocab,
        torch.float64,
    ).encoders["image"]
    model, names = plain.encoder.model, plain_names(mllm.encoders["image"].encoder.model)
    for block in plain.blocks[: plain.num_encoder_blocks]:  # peft finds its layers by their names without Blocks.
        owner = next(each for each in model.modules() if block in each._modules.values())
        owner._modules[next(key for key, each in owner._modules.items() if each is block)] = block.inner
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapters" / "encoders" / "image", is_trainable=True)
    sizes = tiny.sizes(family)
    values = tiny.values(family, sizes)
    ours = mllm.encoders["image"].encoder(values.double(), sizes)
    theirs = plain.encoder(values.double(), sizes)
    assert relative(ours, theirs) < 1e-12
    weights = {names[name]: each for name, each in mllm.encoders["image"].encoder.model.named_parameters()}
    mine = {f"base_model.model.{name}": each for name, each in weights.items() if each.requires_grad}
    its = {name.replace(".default", ""): each for name, each in wrapped.named_parameters() if each.requires_grad}
    assert mine.keys() == its.keys()
    seeds = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got, wanted = (
        torch.autograd.grad((rows * seeds).sum(), [weights[name] for name in mine])
        for rows, weights in ((ours, mine), (theirs, its))
    )
    assert max(map(relative, got, wanted)) < 1e-10


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gpt2"])
def test_merged_weights_give_the_same_loss_as_adapters_beside_them(tiny, tmp_path, family):
    mllm = built(tiny, {"backbone": {"rank": 4}}, family)
    export_hf(mllm, tmp_path, adapter="merged")
    assert not (tmp_path / "adapters").exists()
    config = ModelConfig(backbone={"family": family, "path": tmp_path / "backbone"})
    packed = tiny.Packed.of(LENGTHS)
    loaded = build_mllm(config, tiny.vocab, torch.float64)
    assert relative(loaded.backbone(packed, {})[0], mllm.backbone(packed, {})[0]) < 1e-12
    export_hf(mllm, tmp_path / "saved")
    theirs = pefts_own(tmp_path / "saved").merge_and_unload().state_dict()
    mine, names = loaded.backbone.causal_lm.state_dict(), plain_names(loaded.backbone.causal_lm)
    assert max(relative(mine[name], theirs[names[name]]) for name in mine) < 1e-12


def test_weights_that_are_in_a_directory_are_not_written_once_more(tiny, tmp_path):
    first = build_mllm(ModelConfig(backbone={"family": "llama", "config": tiny.backbone_options}), tiny.vocab)
    export_hf(first, tmp_path / "base")
    base = tmp_path / "base" / "backbone"
    config = ModelConfig(backbone={"family": "llama", "path": base}, lora={"backbone": {"rank": 2}})
    mllm = build_mllm(config, tiny.vocab)
    for _ in range(2):  # The second takes the place of the first.
        export_hf(mllm, tmp_path / "export", bases=config.paths)
    written = sorted(str(path.relative_to(tmp_path / "export")) for path in (tmp_path / "export").rglob("*.*"))
    adapter = "adapters/backbone/adapter_"
    assert written == [f"{adapter}config.json", f"{adapter}model.safetensors"]
    saved = json.loads((tmp_path / "export" / f"{adapter}config.json").read_text())
    assert saved["base_model_name_or_path"] == str(base) and saved["r"] == 2 and saved["lora_alpha"] == 4
    assert sorted(saved["target_modules"]) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_adapters_start_at_nothing_and_do_not_depend_on_each_other(tiny):
    def weights(**lora):
        config = ModelConfig(backbone={"family": "qwen2", "config": tiny.backbone_options}, lora={"backbone": lora})
        return dict(build_mllm(config, tiny.vocab, seed=7).backbone.causal_lm.named_parameters())

    some, every = weights(rank=2, targets=["v_proj"]), weights(rank=2)
    name = "model.layers.1.inner.self_attn.v_proj.lora_A.weight"
    assert torch.equal(some[name], every[name])
    assert not any(weight.any() for name, weight in every.items() if "lora_B" in name)
    drawn = [weight for name, weight in every.items() if "lora_A" in name and weight.shape == every[name].shape]
    assert len({float(weight.sum()) for weight in drawn}) == len(drawn)
    # As torch draws linear layers: uniform up to 1 / sqrt(in), whose deviation is 1 / sqrt(3 in).
    assert every[name].abs().max() <= tiny.dim**-0.5
    assert every[name].std().item() == pytest.approx((3 * tiny.dim) ** -0.5, rel=0.2)


@pytest.mark.parametrize(
    ("family", "target", "widths"), [("phi3", "qkv_proj", [32, 16, 16]), ("gpt2", "c_attn", [32, 32, 32])]
)
def test_split_products_are_those_of_the_whole(tiny, family, target, widths):
    mllm = built(tiny, {"backbone": {"rank": 3, "targets": [target]}}, family)
    (_, layer), _ = lora_layers(mllm.backbone.causal_lm)
    rows = torch.randn(5, layer.in_features, dtype=torch.float64)
    split = SplitLora(layer, widths)
    assert isinstance(layer, LoraLinear) and isinstance(split, SplitLinear)
    assert relative(split(rows), layer(rows)) < 1e-14


def test_what_is_refused(tiny):
    backbone = {"family": "qwen2", "config": tiny.backbone_options}

    def refused(match, lora, error=UserError, **model):
        with pytest.raises(error, match=match):
            build_mllm(ModelConfig(**({"backbone": backbone} | model), lora=lora), tiny.vocab)

    refused(
        r"model.lora.backbone.targets: no linear layer .* ends with 'lm_head'",
        {"backbone": {"rank": 1, "targets": ["lm_head"]}},
    )
    refused(
        r"lora.image` has no effect, as the model has no such part; it has backbone", {"image": {"rank": 1}}, ValueError
    )
    refused(
        r"gives adapters to a part that does not learn; remove `backbone.train = false`",
        {"backbone": {"rank": 1}},
        ValueError,
        backbone=backbone | {"train": False},
    )
    of_others = build_mllm(ModelConfig(backbone=backbone), tiny.vocab)
    for block in of_others.backbone.blocks:
        for name, layer in list(block.named_modules()):
            if isinstance(layer, torch.nn.Linear):
                owner, _, key = name.rpartition(".")
                setattr(block.get_submodule(owner), key, torch.nn.Identity())
    with pytest.raises(UserError, match=r"model.lora.backbone: Qwen2ForCausalLM has no linear layers in its blocks"):
        add_lora(of_others, {"backbone": LoraConfig(rank=1)}, seed=0)
    own = {"image": {"module": "parity.tiny:ToyEncoder", "args": {"row_dim": 4, "cost": "packed"}}}
    refused(r"model.lora.image: 'image' is a module of your own", {"image": {"rank": 1}}, encoders=own)
    with pytest.raises(ValueError, match=r"'q_proj' is neither \"all-linear\" nor a list of names of layers"):
        LoraConfig(rank=1, targets="q_proj")


def test_patterns_name_adapters_too(tiny):
    mllm = built(tiny, {"backbone": {"rank": 2}}, freeze=("*.lora_A.weight",))
    learns = [name for name, weight in mllm.named_parameters() if weight.requires_grad]
    assert learns and all(name.endswith("lora_B.weight") for name in learns)


@pytest.mark.parametrize("deferred", [False, True])
def test_adapters_start_from_those_that_peft_has_saved(tiny, tmp_path, deferred):
    """What an export wrote, and peft would load, is what a model starts with: read at once, or row by row."""
    lora = {"backbone": {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "mlp.*"]}}
    first = built(tiny, lora, "llama")
    export_hf(first, tmp_path)
    saved = tmp_path / "adapters" / "backbone"
    config = ModelConfig(
        backbone={"family": "llama", "path": tmp_path / "backbone"},
        lora={"backbone": lora["backbone"] | {"path": saved}},
    )
    second = build_mllm(config, tiny.vocab, torch.float64, seed=9, deferred=deferred)
    materialise(second, config, 9, torch.device("cpu"))
    expected = first.backbone.state_dict()
    assert any(weight.any() for name, weight in expected.items() if name.endswith("lora_B.weight"))
    assert all(torch.equal(weight, expected[name]) for name, weight in second.backbone.state_dict().items())

    def complaint(**changes):
        given = LoraConfig(**(lora["backbone"] | {"path": saved} | changes))
        with pytest.raises(UserError) as caught:
            build_mllm(config.model_copy(update={"lora": {"backbone": given}}), tiny.vocab, deferred=True)
        return str(caught.value)

    assert "model.lora.backbone: the adapter in" in (told := complaint(alpha=6.0)) and "says 2." in told
    assert "model.lora.backbone.rank: " in complaint(rank=6, alpha=10.0)
    assert "has no adapter of model.layers.0.self_attn.k_proj" in complaint(targets=["q_proj", "k_proj", "mlp.*"])
    assert "has an adapter of model.layers.0.mlp.down_proj" in complaint(targets=["q_proj"])
    assert "there is no" in complaint(path=tmp_path)
    stored = json.loads((saved / "adapter_config.json").read_text())
    for changes, words in (({"use_dora": True}, "has use_dora = True"), ({"r": "three"}, "states no rank and alpha")):
        (saved / "adapter_config.json").write_text(json.dumps(stored | changes))
        assert words in complaint()
    (saved / "adapter_config.json").write_text(json.dumps(stored))
    (saved / "adapter_model.safetensors").write_bytes(b"cut")
    assert "adapter_model.safetensors cannot be read" in complaint()
