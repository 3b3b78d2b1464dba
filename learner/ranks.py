"""The ranks of a learner: processes that hold one model in shards (FSDP2) and act as one.

Every rank runs the same loop; the leader (rank 0) alone talks to the rest of the system and tells the others what it
got. One rank is the plain case: no process group, no shards, and every method here does nothing.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from seed_async.codec import decode, encode
from seed_async.learner.adapters import ParameterSource, plain_parameters
from seed_async.learner.checkpoint import ALONE, Writers
from seed_async.learner.scoring import SCORE_METHOD, score_packed
from seed_async.messages import Message

LEADER: Final = 0
JOIN_TIMEOUT: Final = timedelta(minutes=5)
"""Of the group's making: every rank loads torch and the model first. Also of each collective on the shards."""
WAIT_TIMEOUT: Final = timedelta(days=30)
"""Of what the leader tells the others: it may wait for a batch as long as it takes. A dead leader closes the
connection, and a rank that hangs is killed for its pulse, so this is no deadline that anybody relies on."""
POLL_S: Final = 0.002


class Ranks:
    """This process's place among the ranks."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu", beat: Callable[[], None] = lambda: None):
        """Of a group that is open already when there is more than one; `beat` is called while this rank waits."""
        self.rank, self.size, self._beat = rank, size, beat
        self.device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if size > 1:
            self._mesh = init_device_mesh(device, (size,))
            self._told = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)
            self._saving = dist.new_group(backend="gloo", timeout=JOIN_TIMEOUT)

    @classmethod
    def join(
        cls, rank: int, size: int, device: str, meeting: Path, interface: str, beat: Callable[[], None]
    ) -> "Ranks":
        """Join the other ranks of this host; they find each other by the file `meeting`, a new one for each group."""
        if device == "cuda":
            torch.cuda.set_device(rank)
        if size > 1:
            os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=size,
                timeout=JOIN_TIMEOUT,
            )
        return cls(rank, size, device, beat)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks to the rest of the system."""
        return self.rank == LEADER

    def shard(self, model: PreTrainedModel) -> PreTrainedModel:
        """Cut a model into shards in place, a unit for each decoder layer; gradients are summed over the ranks.

        Its own scoring method runs like a forward pass: it gathers the shards and reduces the gradients.
        """
        torch.nn.Module.to(model, self.device)
        if self.size == 1:
            return model
        for layer in [each for each in model.modules() if type(each).__name__ in (model._no_split_modules or ())]:
            fully_shard(layer, mesh=self._mesh)
        # The outermost unit too is freed after a forward pass: one without a backward would leave it there, and the
        # next pass would run on weights from before the optimizer's step.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True)
        setattr(model, SCORE_METHOD, MethodType(score_packed, model))
        register_fsdp_forward_method(model, SCORE_METHOD)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are divided by the whole batch's number of tokens already; gloo can only sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def tell(self, message: Message | None) -> Message | None:
        """Return the leader's message, on every rank; the others' argument is ignored."""
        if self.size == 1:
            return message
        frames = encode(message) if message is not None and self.leads else []
        sizes = torch.tensor([len(frame) for frame in [*frames, b"", b""][:2]])
        self._broadcast(sizes)
        parts = []
        for number, size in enumerate(sizes.tolist()):
            part = torch.empty(size, dtype=torch.uint8)
            if self.leads and size:
                part = torch.frombuffer(bytearray(frames[number]), dtype=torch.uint8)
            if size:
                self._broadcast(part)
                parts.append(part.numpy().tobytes())
        return decode(parts) if parts else None

    def tell_number(self, number: int) -> int:
        """Return the leader's number, on every rank."""
        if self.size == 1:
            return number
        value = torch.tensor(number)
        self._broadcast(value)
        return int(value)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over the ranks."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def most(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of `values` over the ranks."""
        if self.size == 1:
            return values
        most = values.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a sharded tensor; every rank must ask for it."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def gather(self, model: PreTrainedModel, parameters: ParameterSource = plain_parameters) -> dict[str, torch.Tensor]:
        """Return whole tensors by name on the leader: all weights, adapters merged, or what `parameters` yields.

        {} on the others, which must ask for them too.
        """
        gathered = {}
        for name, tensor in parameters(model, self.whole):
            if self.leads:
                gathered[name] = tensor
        return gathered

    def writers(self) -> Writers:
        """Who writes a checkpoint: all ranks together."""
        return Writers(self._saving, self.leads) if self.size > 1 else ALONE

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, LEADER, group=self._told, async_op=True)
        assert work is not None
        while not work.is_completed():
            self._beat()
            time.sleep(POLL_S)
        work.wait()
