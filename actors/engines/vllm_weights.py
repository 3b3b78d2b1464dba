"""How published weights reach the workers of a vLLM engine: through vLLM's own weight-transfer interface.

`arrays` is a transfer engine of ours, for CPUs and GPUs: it is handed the published arrays themselves, in the worker's
own process, or by the name of a file in shared memory when the workers are other processes (tensor parallelism). `ipc`
and `nccl` are vLLM's: the arrays are copied to a GPU here and go on from there. They were never run.
"""

import contextlib
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from vllm import LLMEngine
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from seed_async.actors.engines.published import as_torch
from seed_async.messages import WeightsManifest
from seed_async.topology_roles import VllmOptions
from seed_async.weights.segments import SegmentStore, read_segment

ARRAYS = "seed_arrays"
"""The name of our transfer engine in vLLM's registry."""
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder for what workers in other processes read, memory-backed where the system has /dev/shm; then removed."""
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="seed-async-vllm-", dir=memory) as directory:
        yield Path(directory)


@dataclass
class ArrayUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The arrays themselves, or an encoded `WeightsManifest` of the file that holds them."""

    tensors: Mapping[str, np.ndarray] | None = None
    manifest: bytes = b""


class ArrayTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The worker's side of `arrays`.

    On the CPU the weights of linear layers are packed for oneDNN and freed, so they cannot be written in place: vLLM's
    layerwise reload makes each layer anew, loads it and packs it.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = ArrayUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nobody has to be met."""

    def start_weight_update(self) -> None:
        """Make room for the new layers."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ArrayUpdate) -> None:
        """Load the arrays, which may be read-only."""
        tensors = update_info.tensors
        if tensors is None:
            tensors = read_segment(msgspec.msgpack.decode(update_info.manifest, type=WeightsManifest))
        with torch.no_grad():
            self.model.load_weights(as_torch(tensors))

    def finish_weight_update(self) -> None:
        """Put the new layers in place, and pack the output layer again."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.refresh_packed_embeddings()

    def refresh_packed_embeddings(self) -> None:
        """Pack the embeddings that serve as an output layer again.

        With tied embeddings the reload of vLLM 0.32 for the CPU leaves the packed copy of the old ones in use, without
        a sign.
        """
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


def register() -> None:
    """Make `arrays` known to vLLM; it calls this once in each of its processes (an entry point in pyproject.toml)."""
    WeightTransferEngineFactory.register_engine(ARRAYS, ArrayTransferEngine)


class WeightSender(Protocol):
    """Replaces the weights of an engine's workers, between two steps."""

    def send(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Return when every worker has `tensors`, which fit the model."""
        ...


class WorkerClient:
    """vLLM's weight-sync client (`VLLMWeightSyncClient`) for an engine of this process."""

    def __init__(self, engine: LLMEngine) -> None:
        """Speak to the workers of `engine`."""
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers meet the sender."""
        self._engine.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._engine.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Send one part of it."""
        self._engine.collective_rpc("update_weights", args=(update_info,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put the new weights in place."""
        self._engine.collective_rpc("finish_weight_update")
        if weight_version is not None:
            self._engine.set_weight_version(weight_version)


class ArraySender:
    """The sending side of `arrays`: by reference to a worker of this process, else through a file in shared memory."""

    def __init__(self, client: WorkerClient, *, in_process: bool) -> None:
        """`in_process`: the only worker lives in this process."""
        self._client, self._in_process = client, in_process

    def send(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Return when every worker has `tensors`."""
        self._client.start_weight_update()
        if self._in_process:
            self._client.update_weights({"tensors": tensors})
        else:
            with folder_in_memory() as folder:
                manifest = SegmentStore(folder).stage(version, tensors)
                self._client.update_weights({"manifest": msgspec.msgpack.encode(manifest)})
        self._client.finish_weight_update(str(version))


class GpuArrays(WeightSource):  # type: ignore[misc]
    """The arrays of a version as tensors of a GPU, copied one by one as vLLM's senders ask for them."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is held yet."""
        self.tensors: Mapping[str, np.ndarray] = {}
        self._device = device

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor, in the order of iteration."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in as_torch(self.tensors)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor on the GPU."""
        for name, tensor in as_torch(self.tensors):
            yield name, tensor.to(self._device)


class GpuSender:
    """The sending side of `ipc` (the worker's own GPU) and `nccl` (a GPU of its own, behind those of the workers)."""

    def __init__(self, client: WorkerClient, options: VllmOptions) -> None:
        """Meet the workers. Raises ValueError without the GPU that the sender needs."""
        workers = options.tensor_parallel
        index = workers if options.weight_transfer == "nccl" else 0
        if torch.cuda.device_count() <= index:
            raise ValueError(
                f"roles.policy.vllm.weight_transfer {options.weight_transfer} needs {index + 1} GPUs, there are "
                f"{torch.cuda.device_count()}"
            )
        torch.cuda.set_device(index)
        self._client = client
        self._source = GpuArrays(torch.device("cuda", index))
        self._sender = WeightTransferTrainerFactory.trainer_init(
            _init_info(options.weight_transfer, workers), client=client, source=self._source
        )

    def send(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Return when every worker has `tensors`."""
        self._source.tensors = tensors
        self._sender.send_weights()
        self._source.tensors = {}


def _init_info(backend: str, workers: int) -> Any:
    """What vLLM's sender has to know."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=workers + 1, rank=0)


def open_sender(engine: LLMEngine, options: VllmOptions) -> WeightSender:
    """The sender that `options.weight_transfer` asks for."""
    client = WorkerClient(engine)
    if options.weight_transfer == "arrays":
        return ArraySender(client, in_process=options.tensor_parallel == 1)
    return GpuSender(client, options)
