"""Log-probs of given tokens from a vLLM engine, between two steps and without advancing the requests in its hands.

vLLM has no call for that: a request that asks for the log-probs of its prompt is scheduled among all others. LLMEngine
has its scheduler in this process, though, so its queue can be set aside while one such request runs by itself. This is
the one place that reaches into the scheduler. Read in the source of vLLM 0.32:

- `LLMEngine.reset_prefix_cache(reset_running_requests=True)` puts every running request back into the queue, with
  nothing lost but its keys and values. So one queue is all there is to set aside, and whatever the requests hold,
  there are blocks and a place in the batch for one more. To set running requests aside as they are would leave neither
  when they fill the cache or all of `max_num_seqs` (vLLM's second model runner keeps their places).
- A request with `prompt_logprobs` does not read the prefix cache: its log-probs come from the present weights alone.
- Prompt tokens pass by the samplers' processors: whatever `logprobs_mode` says of log-probs and the temperature, theirs
  are the log-softmax in float32 of the model's own logits.
"""

from collections.abc import Sequence

from vllm import LLMEngine, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PromptLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

REQUEST_ID = "scored"
# The one token that vLLM must sample is greedy, so that it takes nothing from any generator.
_PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
)


class SoloScorer:
    """Runs one request of an engine by itself."""

    def __init__(self, engine: LLMEngine, adapter: LoRARequest | None = None) -> None:
        """Find the scheduler. Raises RuntimeError where it is not what this was written for.

        `adapter` is what the engine's other requests name too.
        """
        self._engine, self._adapter, self._scheduler = engine, adapter, _find_scheduler(engine)

    @property
    def num_running(self) -> int:
        """Requests that hold keys and values: none right after `reset_prefix_cache(reset_running_requests=True)`."""
        return len(self._scheduler.running)

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-prob of each of `ids` [T] after those before it, from the second on: [T - 1].

        Nothing may run. Raises ValueError for ids that the engine would not take as a prompt. The queue is as it was
        before, whatever happens.
        """
        scheduler = self._scheduler
        waiting = scheduler.waiting
        if len(waiting) != len(scheduler.requests):
            raise RuntimeError(
                f"{len(scheduler.requests) - len(waiting)} of vLLM's {len(scheduler.requests)} requests are not in its "
                "queue: they would be advanced while the engine scores"
            )
        scheduler.waiting = create_request_queue(scheduler.policy)
        try:
            ranked = self._run(ids)
        finally:
            scheduler.waiting = waiting
        return [ranked[place][ids[place]].logprob for place in range(1, len(ids))]

    def _run(self, ids: Sequence[int]) -> PromptLogprobs:
        """Step until the only request has ended."""
        try:
            internal_id = self._engine.add_request(
                REQUEST_ID, {"prompt_token_ids": list(ids)}, _PARAMS, lora_request=self._adapter
            )
        except VLLMValidationError as error:  # which is no ValueError
            raise ValueError(f"{len(ids)} tokens cannot be scored: {error}") from error
        try:
            for _ in ids:  # each step prefills one token or more
                outputs = self._engine.step()
                if outputs:
                    return outputs[0].prompt_logprobs
        finally:
            self._engine.abort_request([internal_id], internal=True)  # nothing to do once it has ended
        raise RuntimeError(f"vLLM did not score {len(ids)} tokens in as many steps")


def _find_scheduler(engine: LLMEngine) -> Scheduler:
    """The scheduler of an engine."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError(
            f"{type(engine.engine_core).__name__}: vLLM's engine core is not in this process; "
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0 before an engine is made"
        )
    scheduler = getattr(core, "scheduler", None)
    # Its subclass schedules a step ahead, so that tokens are on their way between two steps.
    as_known = (
        type(scheduler) is Scheduler
        and isinstance(getattr(scheduler, "waiting", None), RequestQueue)
        and isinstance(getattr(scheduler, "running", None), list)
        and isinstance(getattr(scheduler, "requests", None), dict)
        and hasattr(scheduler, "policy")
    )
    if not as_known:
        raise RuntimeError(f"{type(scheduler).__name__} is not the scheduler of vLLM 0.32 that this engine knows")
    return scheduler
