"""Checkpoints of the learner: weights, optimizer, random state and counters together, verified, never half written.

    checkpoints/version-00000012/   policy.safetensors  optimizer.safetensors  manifest.json
    checkpoints/newest              the name of the newest one, for people and scripts

A checkpoint is written beside its place, forced to disk, and renamed; its manifest holds the digest of every file. The
loader trusts names and digests only: it takes the newest checkpoint that is whole, whatever the pointer says.
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
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

FORMAT = 1
POLICY, OPTIMIZER, MANIFEST, NEWEST = "policy.safetensors", "optimizer.safetensors", "manifest.json", "newest"
_RANDOM_STATE = "random_state"
_CHUNK_BYTES = 1 << 24
_NAME = re.compile(r"version-(\d{8})")


class CheckpointMismatchError(ValueError):
    """A checkpoint of another model or optimizer."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is. `training_s` is the time spent in training so far; `files` maps names to digests."""

    format: int
    version: int
    training_s: float
    files: dict[str, str]


class Snapshot(NamedTuple):
    """Copies of everything that a checkpoint holds, so that training can go on while they are written."""

    version: int
    training_s: float
    files: dict[str, dict[str, torch.Tensor]]


def take_snapshot(
    version: int, training_s: float, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> Snapshot:
    """Copy the state to CPU memory."""
    policy = {name: _copy(parameter) for name, parameter in model.named_parameters()}
    state = {
        f"{index}.{name}": _copy(torch.as_tensor(value))
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    state[_RANDOM_STATE] = torch.get_rng_state()
    return Snapshot(version, training_s, {POLICY: policy, OPTIMIZER: state})


def restore_policy(folder: Path, model: PreTrainedModel) -> None:
    """Put a checkpoint's weights into `model`. Raises CheckpointMismatchError before anything is changed."""
    policy, parameters = load_file(folder / POLICY), dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found = {name: tuple(tensor.shape) for name, tensor in policy.items()}
    if shapes != found:
        different = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise CheckpointMismatchError(f"{folder} is of another model: {', '.join(different[:5])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(policy[name])


def restore(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's state into place, bit for bit. Raises CheckpointMismatchError before anything is changed."""
    restore_policy(folder, model)
    state = load_file(folder / OPTIMIZER)
    random_state = state.pop(_RANDOM_STATE)
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        index, _, name = key.partition(".")
        moments.setdefault(int(index), {})[name] = tensor
    # The groups, with learning rate and betas, are the topology's.
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(random_state)


def write_checkpoint(root: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write a checkpoint below `root` and remove all but the `keep` newest; returns its folder."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("*.staging"):  # of a process that was killed
        shutil.rmtree(left)
    folder = root / f"version-{snapshot.version:08d}"
    staging = folder.with_suffix(".staging")
    staging.mkdir()
    for name, tensors in snapshot.files.items():
        save_file(tensors, staging / name)
        _sync(staging / name)
    manifest = Manifest(
        format=FORMAT,
        version=snapshot.version,
        training_s=snapshot.training_s,
        files={name: _digest(staging / name) for name in snapshot.files},
    )
    _write(staging / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    _sync(staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    _sync(root)
    pointer = root / f"{NEWEST}.new"
    _write(pointer, folder.name.encode() + b"\n")
    pointer.rename(root / NEWEST)
    _prune(root, keep)
    return folder


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a whole checkpoint. Raises ValueError that says what is damaged."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        damaged = [name for name, digest in manifest.files.items() if _digest(folder / name) != digest]
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    if manifest.format != FORMAT:
        raise ValueError(f"{folder}: format {manifest.format}, this program reads {FORMAT}")
    if damaged or manifest.files.keys() != {POLICY, OPTIMIZER}:
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

    def __init__(self, root: Path, keep: int) -> None:
        """Write below `root`, keeping the `keep` newest."""
        self._root, self._keep = root, keep
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
            write_checkpoint(self._root, snapshot, self._keep)
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
    return tensor.detach().to("cpu", copy=True).contiguous()


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
