"""Checkpoints of the learner: weights, optimizer, random state and counters together, verified, never half written.

    checkpoints/version-00000012/   policy/ optimizer/ (a safetensors file of each rank)  manifest.json
    checkpoints/newest              the name of the newest one, for people and scripts

A checkpoint is written beside its place, forced to disk, and renamed; its manifest holds the digest of every file. The
loader trusts names and digests only: it takes the newest checkpoint that is whole, whatever the pointer says. The
tensors go through torch's distributed checkpoints, so that any number of ranks reads what another number has written.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

FORMAT = 2
POLICY, OPTIMIZER, MANIFEST, NEWEST = "policy", "optimizer", "manifest.json", "newest"
STAGING = ".staging"
_RANDOM_STATE = "random_state"
_CHUNK_BYTES = 1 << 24
_NAME = re.compile(r"version-(\d{8})")

Tensors = dict[str, torch.Tensor]


class CheckpointMismatchError(ValueError):
    """A checkpoint of another model or optimizer."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written; the ones before are as they were."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is. `training_s` is the time spent in training so far; `files` maps names to digests."""

    format: int
    version: int
    training_s: float
    files: dict[str, str]


class Snapshot(NamedTuple):
    """Copies of everything that a checkpoint holds, so that training can go on while they are written.

    Of a sharded model the copies are this rank's shards.
    """

    version: int
    training_s: float
    policy: Tensors
    optimizer: Tensors


class Writers(NamedTuple):
    """The ranks that write one checkpoint together; alone without a `group`."""

    group: dist.ProcessGroup | None = None
    leads: bool = True


ALONE = Writers()


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name: all but a frozen base below adapters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def take_snapshot(
    version: int, training_s: float, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Snapshot:
    """Copy the state to CPU memory."""
    policy = {name: _copy(parameter) for name, parameter in trained_parameters(model).items()}
    moments = {name: _copy(tensor) for name, tensor in _moments(model, optimizer).items()}
    return Snapshot(version, training_s, policy, moments | {_RANDOM_STATE: torch.get_rng_state()})


def restore_policy(folder: Path, model: torch.nn.Module) -> None:
    """Put a checkpoint's weights into `model`. Raises CheckpointMismatchError before anything is changed."""
    _read(folder / POLICY, {name: each.detach() for name, each in trained_parameters(model).items()})


def restore(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's state into place, bit for bit. Raises CheckpointMismatchError before anything is changed.

    Each rank of a sharded model calls it and reads its own shards.
    """
    parameters = trained_parameters(model)
    restore_policy(folder, model)
    random_state = torch.get_rng_state()
    stepped = set(HuggingFaceStorageReader(str(folder / OPTIMIZER)).read_metadata().state_dict_metadata)
    for name, parameter in parameters.items():
        if f"{name}.step" in stepped:
            optimizer.state[parameter] = {
                "step": torch.zeros(1),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    _read(folder / OPTIMIZER, _moments(model, optimizer) | {_RANDOM_STATE: random_state})
    for state in optimizer.state.values():
        state["step"] = state["step"].reshape(())
    torch.set_rng_state(random_state)


def _moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by parameter name; a count has one dimension, since readers cut tensors by dimensions."""
    return {
        f"{name}.{key}": tensor.reshape(1) if tensor.dim() == 0 else tensor
        for name, parameter in trained_parameters(model).items()
        for key, tensor in optimizer.state[parameter].items()
    }


def _read(folder: Path, tensors: Tensors) -> None:
    """Fill `tensors` from what any number of ranks has written. Raises CheckpointMismatchError before any changes."""
    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata().state_dict_metadata
    found = {name: tuple(each.size) for name, each in metadata.items() if isinstance(each, TensorStorageMetadata)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != found:
        different = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise CheckpointMismatchError(f"{folder} is of another model: {', '.join(different[:5])}")
    load(dict(tensors), storage_reader=reader, no_dist=not _is_sharded(tensors))


def _is_sharded(tensors: Tensors) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write_checkpoint(root: Path, snapshot: Snapshot, keep: int, writers: Writers = ALONE) -> Path:
    """Write a checkpoint below `root` and remove all but the `keep` newest; returns its folder.

    Each rank of a sharded model calls it with its own snapshot; the leader makes it valid once all have written. Raises
    CheckpointError.
    """
    folder = root / f"version-{snapshot.version:08d}"
    staging = folder.with_suffix(STAGING)
    try:
        if writers.leads:
            root.mkdir(parents=True, exist_ok=True)
            for left in root.glob(f"*{STAGING}"):  # of a process that was killed
                shutil.rmtree(left)
            staging.mkdir()
        for name, tensors in ((POLICY, snapshot.policy), (OPTIMIZER, snapshot.optimizer)):
            writer = HuggingFaceStorageWriter(str(staging / name), save_distributed=True)
            save(dict(tensors), storage_writer=writer, process_group=writers.group, no_dist=writers.group is None)
        if writers.leads:
            _make_valid(root, staging, folder, snapshot)
            _prune(root, keep)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(staging, ignore_errors=True)  # what it holds may be what the disk lacks
        raise CheckpointError(f"{folder} was not written: {_reason(error)}") from error
    return folder


def _reason(error: OSError | CheckpointException) -> str:
    """What went wrong, on each rank where something did."""
    if isinstance(error, OSError):
        return str(error)
    return "; ".join(f"rank {rank}: {fault[0]!r}" for rank, fault in error.failures.items())


def _make_valid(root: Path, staging: Path, folder: Path, snapshot: Snapshot) -> None:
    """Force everything to disk, write the manifest, and give the checkpoint its name."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    for path in [*files, staging / POLICY, staging / OPTIMIZER]:
        _sync(path)
    manifest = Manifest(
        format=FORMAT,
        version=snapshot.version,
        training_s=snapshot.training_s,
        files={str(path.relative_to(staging)): _digest(path) for path in files},
    )
    _write(staging / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    _sync(staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    _sync(root)
    pointer = root / f"{NEWEST}.new"
    _write(pointer, folder.name.encode() + b"\n")
    pointer.rename(root / NEWEST)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a whole checkpoint. Raises ValueError that says what is damaged."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        damaged = [name for name, digest in manifest.files.items() if _digest(folder / name) != digest]
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    if manifest.format != FORMAT:
        raise ValueError(f"{folder}: format {manifest.format}, this program reads {FORMAT}")
    if damaged or {Path(name).parts[0] for name in manifest.files} != {POLICY, OPTIMIZER}:
        raise ValueError(f"{folder}: damaged files: {', '.join(damaged) or 'some are missing'}")
    return manifest


def newest_checkpoint(root: Path, on_damaged: Callable[[str], None] = lambda _: None) -> tuple[Path, Manifest] | None:
    """Return the newest whole checkpoint; `on_damaged` is told of each newer one that is not."""
    for folder in sorted(_folders(root), reverse=True):
        try:
            return folder, read_manifest(folder)
        except ValueError as error:
            on_damaged(str(error))
    return None


class CheckpointWriter:
    """Writes checkpoints on a thread of its own, one at a time."""

    def __init__(self, root: Path, keep: int, writers: Writers = ALONE) -> None:
        """Write below `root`, keeping the `keep` newest."""
        self._root, self._keep, self._writers = root, keep, writers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Write `snapshot` in the background; waits for the one before and raises its error."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything is on disk. Raises the writer's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_checkpoint(self._root, snapshot, self._keep, self._writers)
        except BaseException as error:  # handed to the learner's own thread
            self._error = error


def _folders(root: Path) -> list[Path]:
    return [path for path in root.glob("version-*") if _NAME.fullmatch(path.name)] if root.is_dir() else []


def _prune(root: Path, keep: int) -> None:
    """Remove the oldest ones, but none before `keep` newer ones are known to be whole."""
    whole = 0
    for folder in sorted(_folders(root), reverse=True):
        if whole >= keep:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            read_manifest(folder)
        except ValueError:
            continue
        whole += 1


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()  # of a DTensor: of its own shard


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)
