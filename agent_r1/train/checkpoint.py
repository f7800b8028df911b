"""Checkpoints: a Hugging Face directory plus trainer state, written completely or not at all.

Large tensors of the state are written by `torch.distributed.checkpoint`, each rank its part, and can be read by any
number of ranks; `trainer_state.pt` holds the rest, with placeholders for them. All ranks must see the same disk. A kill
or a full disk at any moment leaves the earlier checkpoints untouched.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import empty as empty_shards

from agent_r1.disk import remove_leftovers, write_atomically
from agent_r1.errors import DataError, DiskError
from agent_r1.ranks.crew import OneProcess
from agent_r1.runs.reader import list_checkpoints

STATE_FILE = "trainer_state.pt"
TENSORS = "trainer_state"  # the folder of the large tensors


# Classes that torch pickles into the metadata of its checkpoints: sizes and places of tensors.
METADATA = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StorageWriterTransforms"},
    "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int8", "uint8"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}


class _DataOnly(Unpickler):
    """Refuses a pickle that could run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name not in METADATA.get(module_name, ()):
            raise UnpicklingError(f"it refers to {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


class Saveable(Protocol):
    def save_pretrained(self, save_directory: str) -> Any: ...


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: Saveable,
    input_files: Saveable,
    state: dict[str, Any],
    keep: int,
    ranks: OneProcess | None = None,
) -> Path:
    """Write `folder/step_N` atomically, then drop all but the newest `keep` checkpoints. All ranks must take part: the
    model may have to be gathered. Fails on all of them if one fails."""
    ranks = ranks or OneProcess()
    final = folder / f"step_{step:06d}"
    if ranks.broadcast(final.exists()):  # the state is a function of run and step, so it would be the same
        return final
    tensors: dict[str, Tensor] = {}
    rest = _map_large(state, lambda path, tensor: _placeholder(tensors, path, tensor))
    parts: list[Path] = []

    def begin() -> None:
        remove_leftovers(folder, older_than=0.0)  # the run is locked: no other process is writing here
        parts.append(stack.enter_context(write_atomically(final)))
        parts[0].mkdir()
        input_files.save_pretrained(str(parts[0]))
        torch.save(rest, parts[0] / STATE_FILE)

    try:
        with ExitStack() as stack:
            _together(ranks, begin if ranks.is_main else None)
            part = ranks.broadcast(parts[0] if parts else final)
            _together(ranks, lambda: model.save_pretrained(str(part)))
            if tensors:
                _together(ranks, lambda: save_shards(tensors, **_where(part, ranks)))
            _together(ranks, stack.close)  # the folder gets its name
    except (OSError, RuntimeError, SafetensorError) as error:  # how Python, torch and safetensors report a full disk
        raise DiskError(
            f"could not save checkpoint {final}: {error}. {_free(folder)} Earlier checkpoints are intact"
        ) from error
    if ranks.is_main:
        for _, old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load_state(checkpoint: Path, ranks: OneProcess | None = None) -> dict[str, Any]:
    """Read the trainer state. With several ranks, each reads its part of the large tensors."""
    path, tensors, ranks = checkpoint / STATE_FILE, dict[str, Tensor](), ranks or OneProcess()
    if not path.is_file():
        raise DataError(f"{checkpoint} has no {STATE_FILE}: it is a model, not a checkpoint of a training run")
    try:
        rest = torch.load(path, map_location="cpu", weights_only=True)
        state: dict[str, Any] = _map_large(rest, lambda name, meta: _room_for(tensors, name, meta, ranks))
        if tensors:
            path = checkpoint / TENSORS
            with (path / ".metadata").open("rb") as file:
                _DataOnly(file).load()  # torch reads it without checks
            _reveal(lambda: load_shards(tensors, **_where(checkpoint, ranks)))
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition(". ")[0]  # torch goes on to suggest unpickling the file without checks
        raise DataError(
            f"{path} is damaged: {reason}. Restore it, or remove {checkpoint} to continue from an earlier checkpoint"
        ) from error
    return state


def _map_large(value: Any, function: Callable[[str, Tensor], Any], path: str = "state") -> Any:
    """Apply a function to the large tensors of nested dicts and lists: all but scalars and random states, which are
    vectors of integers."""
    if isinstance(value, Tensor) and value.ndim > (not value.is_floating_point()):
        return function(path, value)
    if isinstance(value, dict):
        return {key: _map_large(each, function, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_map_large(each, function, f"{path}.{index}") for index, each in enumerate(value)]
    return value


def _placeholder(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> Tensor:
    tensors[path] = tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _room_for(tensors: dict[str, Tensor], path: str, meta: Tensor, ranks: OneProcess) -> Tensor:
    """An empty tensor on the host in place of a placeholder, sharded like the parameters of a sharded model."""
    if not meta.is_meta:  # states of older versions hold the tensors themselves
        return meta
    if ranks.size == 1:
        tensors[path] = torch.empty(meta.shape, dtype=meta.dtype)
    else:
        mesh = init_device_mesh("cpu", (ranks.size,))
        tensors[path] = empty_shards(meta.shape, dtype=meta.dtype, device_mesh=mesh, placements=[Shard(0)])
    return tensors[path]


def _where(checkpoint: Path, ranks: OneProcess) -> dict[str, Any]:
    return {"checkpoint_id": checkpoint / TENSORS, "process_group": ranks.objects, "no_dist": ranks.size == 1}


def _together(ranks: OneProcess, action: Callable[[], Any] | None) -> None:
    """Do this rank's part. If any rank fails, raise on all of them; otherwise the others would wait for it."""
    error: Exception | None = None
    try:
        if action is not None:
            _reveal(action)
    except (OSError, RuntimeError, SafetensorError) as caught:
        error = caught
    failed = [reason for reason in ranks.gather(None if error is None else str(error)) if reason is not None]
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(failed[0])


def _reveal(action: Callable[[], Any]) -> None:
    """Raise the error of one rank as it is: torch wraps it in a BaseException with the tracebacks of all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as expected in one process
            action()
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise (reason if isinstance(reason, Exception) else RuntimeError(str(reason))) from None


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there."
    except OSError:
        return ""
