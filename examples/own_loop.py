"""A plain PyTorch FSDP2 loop of one's own in which Motet balances every phase: the same losses, other loads.

torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from motet.core.example import Media, TokenSequence
from motet.dispatch import ItemExchange, LoadedExample, Orchestrator, Packed, assemble, exchange

# What an image of sizes [num_images, 2] costs the encoder, and the tokens that it becomes: its patches, both.
PATCHES = SimpleNamespace(lengths=lambda sizes: sizes.prod(1), num_tokens=lambda sizes: sizes.prod(1))


class Examples(Dataset):
    """Eight tokens of text, and before them up to two images, small or large."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        edges = rng.integers(2, 15, rng.integers(0, 3))
        images = tuple(Media(rng.standard_normal((n * n, 12), np.float32), np.array([n, n])) for n in edges)
        tokens = rng.integers(0, 50, len(images) + 8)
        targets = np.arange(len(tokens)) >= len(images) + 4
        return LoadedExample(TokenSequence(tokens, targets, ("image",) * len(images), np.arange(len(images))), images)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32))
        self.embed, self.mix, self.head = nn.Embedding(50, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 50)

    def forward(self, batch, group):
        patches = batch.media["image"][0].reshape(-1, 12)  # a rank without an image is an ordinary case
        features = exchange(self.encoder(patches), batch.routes["image"], group)
        packed = batch.sequences
        hidden = self.embed(packed.tokens).index_copy(0, packed.feature_positions["image"], features)
        hidden = torch.cat([self.mix(one[None])[0][0] for one in hidden.split(packed.offsets.diff().tolist())])
        logits = self.head(hidden[packed.targets.roll(-1)])
        return nn.functional.cross_entropy(logits, packed.tokens[packed.targets], reduction="sum")


def train(balanced, group, host_group):
    """The losses of an epoch, and the mean of max/bound load over its steps and phases."""
    torch.manual_seed(0)
    model, data, losses, loads = fully_shard(Model()), Examples(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    orchestrator = Orchestrator({"backbone": Packed(), "image": Packed()}, group.size(), balanced)
    bring = ItemExchange(host_group, orchestrator, {"image": PATCHES})
    for examples in DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False), collate_fn=list):
        items = bring(examples)  # tokens to the rank that runs them, images to the rank that encodes them
        batch = assemble(items.decision, items.lengths, group.rank(), items.sequences, items.media)
        loss = model(batch, group) / batch.num_targets
        (loss * group.size()).backward()  # FSDP averages over ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(dist.all_reduce(loss.detach_()) or loss.item())
        loads += [placed.imbalance for placed in items.decision.assignments.values()]
    return losses, np.mean(loads)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    groups = dist.group.WORLD, dist.new_group()
    (plain, before), (balanced, after) = train((), *groups), train(("backbone", "image"), *groups)
    if dist.get_rank() == 0:
        print(*(f"loss {a:.6f} without, {b:.6f} with balancing" for a, b in zip(plain, balanced)), sep="\n")
        print(f"max/bound load {before:.3f} without, {after:.3f} with balancing")
    assert np.allclose(plain, balanced, rtol=1e-5), "balancing must not change the result"
