"""A plain PyTorch loop in which Motet balances every phase, with DDP or FSDP2.

torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from vlm import VLM, Examples, Tiles

from motet.dispatch import prefetched

MEASURES = {"image": Tiles()}


def train(wrap=DistributedDataParallel, measures=MEASURES, accumulate=1, dtype=torch.float32):
    """The model after an epoch, and its losses. measures=None: index mode."""
    torch.manual_seed(0)
    model, data = wrap(VLM().to(dtype)), Examples()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, 4, sampler=sampler, collate_fn=list, num_workers=2)
    losses = []
    for batch in prefetched(loader, measures, accumulate=accumulate, dtype=dtype):
        loss = batch.scale_sum(model(batch))
        loss.backward()
        losses.append(loss.detach())
        if batch.ends_step:  # behind `accumulate` batches, and behind the epoch's last
            optimizer.step()
            optimizer.zero_grad()
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return model, losses / dist.get_world_size()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _, losses = train()
    if dist.get_rank() == 0:
        print(*(f"loss {loss:.4f}" for loss in losses), sep="\n")
    dist.destroy_process_group()
