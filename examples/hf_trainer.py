"""HF Trainer with batches that Motet balances: a subclass with one method.

pip install accelerate
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from vlm import VLM, Examples, Tiles

from motet.dispatch import prefetched


class Model(VLM):
    def forward(self, batch):
        return {"loss": batch.scale_sum(super().forward(batch))}


class BalancedTrainer(Trainer):
    loss_is_scaled_for_ga = True  # by `scale_sum`, over all ranks and microbatches of a step

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()  # its order, seeds and workers
        accumulate = self.args.gradient_accumulation_steps
        dtype = next(self.model.parameters()).dtype
        batches = prefetched(loader, {"image": Tiles()}, accumulate=accumulate, device=self.args.device, dtype=dtype)
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: {"batch": batch})


def train(dtype=torch.float32, **options):
    """The model after an epoch, and its losses. options: of TrainingArguments."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"dataloader_num_workers": 2, "logging_steps": 1, "ddp_find_unused_parameters": False}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.1, optim="sgd",
            lr_scheduler_type="constant", max_grad_norm=0.0, remove_unused_columns=False, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, **defaults | options,
        )  # fmt: skip
        trainer = BalancedTrainer(Model().to(dtype), arguments, data_collator=list, train_dataset=Examples())
        trainer.train()
    return trainer.model, [step["loss"] for step in trainer.state.log_history if "loss" in step]


if __name__ == "__main__":
    train()
    dist.destroy_process_group()
