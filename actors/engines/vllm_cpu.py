"""vLLM's worker for the CPU, with draws that chunked prefill does not break, and adapters that do not copy themselves.

vLLM draws a token for the last position of every chunk, drops those in the middle of a prompt, and turns the request's
generator back by one draw. On the CPU (vLLM 0.32) that raises "CPU Generator does not use offset", which would end the
server at the first seeded prompt that is prefilled in two steps. Here each draw is seeded anew with the request's seed
and the number of its token, so there is nothing to turn back, and being preempted changes no draw either.

For adapters vLLM 0.32 on the CPU copies A and B once for each token of a step, and then multiplies batch by batch:
gigabytes in a prefill. Here the tokens of a step that all have one adapter are multiplied with it in place.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

WORKER = f"{__name__}.SeededCpuWorker"
"""What EngineArgs calls the worker."""
_MASK = (1 << 64) - 1


def draw_seed(seed: int, index: int) -> int:
    """The seed, below 2**63, of a request's draw number `index`: the index-th output of SplitMix64 from `seed`."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class DrawGenerator(torch.Generator):
    """A generator that is seeded before each draw; what vLLM asks of its offset has no effect."""

    def get_offset(self) -> int:
        """No draw is remembered."""
        return 0

    def set_offset(self, offset: int) -> "DrawGenerator":
        """Turn nothing back: the next draw of the request has the same seed again."""
        return self


class OneAdapterWrapper(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM has no types
    """What adapters add to the output of a linear layer, for T tokens of a step."""

    def _shrink_prefill(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        """Set y [T, rank] = scale * x A', of x [T, in] and A [rank, in] = w_t_all[adapter, 0]."""
        if self.no_lora or self.batch_size != 1:
            super()._shrink_prefill(y, x, w_t_all, scale)
            return
        down = w_t_all[self._adapter, 0].to(y.dtype)
        y[:, : down.shape[0]] = scale * (x.to(y.dtype) @ down.T)

    def _expand_slice_prefill(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool,
    ) -> None:
        """Add to y [T, offset : offset + size] x B', of x [T, rank] and B [size, rank] = w_t_all[adapter, 0]."""
        if self.no_lora or self.batch_size != 1 or not add_inputs:
            super()._expand_slice_prefill(y, x, w_t_all, y_offset, y_slice_size, add_inputs)
            return
        up = w_t_all[self._adapter, 0].to(y.dtype)
        y[:, y_offset : y_offset + y_slice_size] += x.to(y.dtype) @ up.T

    @property
    def _adapter(self) -> int:
        """The slot of the one adapter; `batch_size` counts the runs of tokens that have the same."""
        return int(self._lora_indices_per_batch[0])


class SeededCpuRunner(CPUModelRunner):  # type: ignore[misc]
    """Seeds the generators before each step."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load it; vLLM has no way to name another class for what adapters compute."""
        super().load_model(load_dummy_weights)
        if self.lora_config:
            for wrapper in self.lora_manager._adapter_manager.punica_wrapper_mapping.values():
                wrapper.__class__ = OneAdapterWrapper

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        corrections = super()._update_states(scheduler_output)
        for index in self.input_batch.generators:
            state = self.requests[self.input_batch.req_ids[index]]
            if not isinstance(state.generator, DrawGenerator):
                state.generator = DrawGenerator()
            state.generator.manual_seed(draw_seed(state.sampling_params.seed, len(state.output_token_ids)))
            self.input_batch.generators[index] = state.generator
        return corrections


class SeededCpuWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker with that runner."""

    def init_device(self) -> None:
        """Make the runner; vLLM has no way to name another class."""
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise RuntimeError(f"{type(self.model_runner).__name__} is not vLLM's runner for the CPU")
        self.model_runner.__class__ = SeededCpuRunner
