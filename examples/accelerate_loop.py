"""A loop with accelerate in which Motet balances every phase. The loader is given to `prefetched`, not to `prepare`.

pip install accelerate
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler
from vlm import VLM, Examples, Tiles

from motet.dispatch import prefetched


def train(accumulate=1, dtype=torch.float32, **options):
    """The model after an epoch, and its losses. options: of Accelerator."""
    accelerator = Accelerator(**options)  # which sees no loader, so it cannot know where an epoch's last step ends
    torch.manual_seed(0)
    model, data = VLM().to(dtype), Examples()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False), collate_fn=list, num_workers=2)
    losses = []
    for batch in prefetched(loader, {"image": Tiles()}, accumulate=accumulate, device=accelerator.device, dtype=dtype):
        with nullcontext() if batch.ends_step else accelerator.no_sync(model):
            loss = batch.scale_sum(model(batch))
            accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        if batch.ends_step:
            optimizer.step()
            optimizer.zero_grad()
    return model, torch.stack(losses)


if __name__ == "__main__":
    _, losses = train(cpu=True)
    if dist.get_rank() == 0:
        print(*(f"loss {loss:.4f}" for loss in losses), sep="\n")
    dist.destroy_process_group()
