"""vLLM's worker for the CPU, with draws that chunked prefill does not break.

vLLM draws a token for the last position of every chunk, drops those in the middle of a prompt, and turns the request's
generator back by one draw. On the CPU (vLLM 0.32) that raises "CPU Generator does not use offset", which would end the
server at the first seeded prompt that is prefilled in two steps. Here each draw is seeded anew with the request's seed
and the number of its token, so there is nothing to turn back, and being preempted changes no draw either.
"""

from typing import Any

import torch
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


class SeededCpuRunner(CPUModelRunner):  # type: ignore[misc]
    """Seeds the generators before each step."""

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
