"""Restores a model and its optimizer from a checkpoint, in place, under any sharding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from motet.core.errors import JointUserError, UserError
from motet.models.fused import NamedSlice
from motet.models.named_weights import is_lora
from motet.train.checkpoint.contents import Damaged, Progress, StoredTensor, read_state, read_tensors
from motet.train.checkpoint.state import (
    describe_tensor,
    is_step,
    is_weight,
    model_part,
    set_step,
    share_steps,
    tensors_of,
    weights_of,
    without_steps,
)
from motet.train.checkpoint.storage import Reader, StoredSlice, first_line


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Progress:
    """Read weights and optimizer state in place, resharded to the model's sharding. A collective.

    The caller has verified the checkpoint.
    group:    None without torch.distributed.
    together: a context in which an error of one rank becomes an error of all (`World.together`).
    Raises UserError for the first tensor that only the model or only the checkpoint has, or whose shape or dtype
    differs; and if the checkpoint cannot be read.
    """
    tensors = tensors_of(model, optimizer)
    with together(), _as_user_error(checkpoint):
        progress, stored = read_state(checkpoint).progress, read_tensors(checkpoint)
        if not any(is_step(key) for key in stored):
            tensors = without_steps(tensors)
            set_step(optimizer, progress.step - progress.num_skipped)
    _read(checkpoint, stored, tensors, group, together)
    share_steps(model, optimizer)
    return progress


def load_weights(
    checkpoint: Path,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    may_lack_adapters: bool = False,
) -> None:
    """As `load`, of weights alone: what the optimizer knows of another run is left.

    may_lack_adapters: a part that has no adapters in the checkpoint keeps those that it has.
    """
    with together(), _as_user_error(checkpoint):
        stored = {key: tensor for key, tensor in read_tensors(checkpoint).items() if is_weight(key)}
    tensors, adapted = weights_of(model), {model_part(key) for key in stored if is_lora(key)}
    if may_lack_adapters:
        tensors = {key: each for key, each in tensors.items() if not _is_adapter(key) or model_part(key) in adapted}
    _read(checkpoint, stored, tensors, group, together)


def _is_adapter(key: str) -> bool:
    """Whether a tensor is of an adapter: whole, or those of its rows that a rank trains."""
    part = NamedSlice.of(key)
    return is_lora(key if part is None else part.name)


@contextmanager
def _as_user_error(checkpoint: Path) -> Iterator[None]:
    """Raise a Damaged of the block as a UserError."""
    try:
        yield
    except Damaged as damage:
        raise UserError(f"The checkpoint {checkpoint} cannot be read: {damage}.") from damage


def _read(
    checkpoint: Path,
    stored: dict[str, StoredTensor],
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    together: Callable[[], AbstractContextManager[None]],
) -> None:
    """Read tensors in place. stored: those of the checkpoint that a model must have. Raises as `load`."""
    everywhere = _over_ranks(tensors.keys(), group)
    with together():
        slices = {key: StoredSlice(stored[of.name], of) for key in tensors if (of := _part_in(key, stored)) is not None}
        _check_fit(checkpoint, stored, stored | {key: each.tensor for key, each in slices.items()}, tensors, everywhere)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # As it is meant, without a group.
            dcp.load(dict(tensors), storage_reader=Reader(checkpoint, stored, slices), process_group=group)
    except CheckpointException as error:  # Raised by all ranks if any fails; no subclass of Exception.
        raise JointUserError(f"The checkpoint {checkpoint} cannot be read: {first_line(error)}.") from error


def _part_in(key: str, stored: Mapping[str, StoredTensor]) -> NamedSlice | None:
    """The part of a tensor of a checkpoint that a key asks for; None if it asks for a whole one, or for none there."""
    part = NamedSlice.of(key)
    return part if part is not None and part.name in stored else None


def _over_ranks(keys: Iterable[str], group: dist.ProcessGroup | None) -> set[str]:
    """The keys of all ranks, each of which may hold another part of the model. A collective."""
    if group is None:
        return set(keys)
    everywhere: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, list(keys), group=group)
    return set().union(*everywhere)


def _check_fit(
    checkpoint: Path,
    whole: dict[str, StoredTensor],
    stored: dict[str, StoredTensor],
    tensors: dict[str, Tensor],
    everywhere: set[str],
) -> None:
    """Raise UserError for the first tensor in which a checkpoint and a model differ.

    whole: the tensors of the checkpoint. stored: also parts of them. everywhere: keys of all ranks.
    """
    misfit = f"The checkpoint {checkpoint} does not fit the model"
    # Weights come before optimizer state, so that the sentence names a weight.
    if missing := [key for key in tensors if key not in stored]:
        raise UserError(f"{misfit}: it has no {describe_tensor(missing[0])}.")
    everywhere = {key if (part := NamedSlice.of(key)) is None else part.name for key in everywhere}
    if surplus := sorted(whole.keys() - everywhere):
        raise UserError(f"{misfit}: the model has no {describe_tensor(surplus[0])}.")
    for key, tensor in tensors.items():
        if stored[key].shape != tuple(tensor.shape):
            raise UserError(
                f"{misfit}: {describe_tensor(key)} has the shape {stored[key].shape} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model."
            )
        if stored[key].dtype != (dtype := str(tensor.dtype).removeprefix("torch.")):
            raise UserError(
                f"{misfit}: {describe_tensor(key)} is {stored[key].dtype} in the checkpoint and {dtype} in the model; "
                "run.dtype says which."
            )
