"""HF models trained under a Plan in a plain loop: the image encoder on one rank, the language model on the other.

torchrun --standalone --nproc-per-node 2 examples/apply_plan.py
"""

import torch
import torch.distributed as dist
from hf_parts import batches, language_model, vision_tower

import motet

ALONE = {"pp": 1, "dp": 1, "tp": 1, "cp": 1}
DEGREES = {"image": ALONE, "backbone": ALONE}  # What is not said is planned: here, which part stands on which rank.


def train(plan=DEGREES, dtype=torch.float32):
    """The losses of an epoch, and this rank's part of the model. plan: degrees, a Plan, or its file."""
    torch.manual_seed(0)
    mllm = motet.compose(language_model().to(dtype), {"image": vision_tower().to(dtype)})
    steps = batches()
    parallel = motet.apply(mllm, plan, lambda part: torch.optim.AdamW(part, 1e-2), batch=steps[0])
    return [parallel.step(batch).loss for batch in steps], parallel.model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, _ = train()
    if dist.get_rank() == 0:
        print(*(f"loss {loss:.4f}" for loss in losses), sep="\n")
    dist.destroy_process_group()
