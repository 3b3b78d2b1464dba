"""The vLLM engine: the same seam over vLLM's LLMEngine in this process.

LLMEngine and not AsyncLLM: the owner's loop advances an engine step by step, and LLMEngine is just that. AsyncLLM puts
an event loop and a process between the two, so that a change of weights has to pause and resume generation, and
where it falls between two tokens is known only afterwards. Here nothing runs between two calls of `step`, which makes
that border exact. It costs some overlap of scheduling and computing.

vLLM schedules (paged KV cache, chunked prefill, prefix cache) and samples; which requests enter, and in which order, is
the queue's work as in the torch engine. The queue hands over no more than `max_slots` at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from seed_async.actors.engines.images import MAX_IMAGES, decode_image, open_reader
from seed_async.actors.engines.published import check_tensors, loadable_parameters
from seed_async.actors.engines.queueing import Request, RequestQueue
from seed_async.actors.engines.stopping import StopStrings
from seed_async.actors.engines.vllm_adapters import SERVED_ADAPTER, AdapterSender, adapter_args, zero_adapters
from seed_async.actors.engines.vllm_cpu import WORKER as CPU_WORKER
from seed_async.actors.engines.vllm_scoring import SoloScorer
from seed_async.actors.engines.vllm_weights import ARRAYS, WeightSender, open_sender
from seed_async.adapters import add_adapters
from seed_async.ports import EngineHealth, FinishReason, Generation, RequestKind, Sampled, Sampling, TextStream
from seed_async.topology import Lora
from seed_async.topology_roles import VllmOptions
from seed_async.weights.canary import PROMPT_TOKENS, RESPONSE_TOKENS

MIN_TEMPERATURE = 0.01
"""Smallest temperature above 0: vLLM raises a smaller one to this without a sign."""
SCORED_TOKENS = PROMPT_TOKENS + RESPONSE_TOKENS + 1
"""Room for the canary, with the token that vLLM samples after it, where the context is shorter."""
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
"""vLLM's reasons, without those of requests that it gave up."""


@dataclass
class _Running:
    """A request in vLLM's hands and what it has sampled so far."""

    request: Request
    internal_id: str
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def generation(self, reason: FinishReason) -> Generation:
        """The answer."""
        return Generation(
            request_id=self.request.request_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            prompt_tokens=self.request.prompt_ids.size,
            cached_tokens=self.cached_tokens,
        )


class VllmEngine:
    """Engine (see `ports.Engine`) over vLLM. `opening.open_engine` sets the environment that vLLM is imported in.

    Draws differ from those of the torch engine with the same seed; each request has its own generator, so that they do
    not depend on the batch mix either. `health().prefilled_tokens` counts what a change of weights computes anew
    without the prefixes that requests share, and nothing of what is scored.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_slots: int,
        max_context_tokens: int,
        max_waiting: int = 1024,
        options: VllmOptions | None = None,
        version: int = 0,
        array_transfer: str = ARRAYS,
        open_stream: Callable[[], TextStream] | None = None,
        lora: Lora | None = None,
    ) -> None:
        """Load the checkpoint folder `path`; `max_slots` requests run at once, as far as the KV cache holds them.

        `array_transfer` names the transfer engine behind `weight_transfer: arrays`. With `lora` versions are adapters
        of this checkpoint, which change nothing until the first is loaded. Raises ValueError when a single context does
        not fit into the KV cache, and for a model whose attention heads vLLM has no CPU kernel for.
        """
        options = options or VllmOptions()
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        self._reader = open_reader(path)
        auto_class = AutoModelForCausalLM if self._reader is None else AutoModelForImageTextToText
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=getattr(torch, options.dtype))  # type: ignore[no-untyped-call]  # no annotation
            if lora is not None:
                add_adapters(model, lora, seed=0)
        _check_heads(model.config.get_text_config())
        self._parameters = loadable_parameters(model)
        text = config.get_text_config()
        context = min(max_context_tokens, getattr(text, "max_position_embeddings", max_context_tokens))
        args = _engine_args(path, max_slots, context, options, array_transfer, takes_images=self._reader is not None)
        if lora is not None:
            args = replace(args, **adapter_args(model, lora))
        self._engine = LLMEngine.from_engine_args(args)
        self._adapter = None if lora is None else SERVED_ADAPTER
        self._sender: WeightSender = (
            open_sender(self._engine, options) if lora is None else AdapterSender(self._engine, lora)
        )
        if lora is not None:
            self._sender.send(version, zero_adapters(self._parameters))
        self._scorer = SoloScorer(self._engine, self._adapter)
        # The first log-probs compile what finds them, for seconds: now, while the process is still given time to start.
        self._scorer.score([0] * (SCORED_TOKENS - 1))
        self._max_slots, self._context, self._version = max_slots, context, version
        self._stops = StopStrings(open_stream)
        self._queue = RequestQueue(
            vocabulary=int(text.vocab_size),
            context=context,
            max_waiting=max_waiting,
            min_temperature=MIN_TEMPERATURE,
            stop_strings=self._stops.known,
            image_reader=self._reader,
        )
        self._running: dict[str, _Running] = {}
        self._generated = self._prefilled = self._reused = 0

    def submit(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        kind: RequestKind,
        images: Sequence[bytes] = (),
    ) -> None:
        """Queue a request; see `ports.Engine`. Raises RequestRefusedError, naming the limit."""
        self._queue.add(request_id, prompt_ids, sampling, kind, images)

    def cancel(self, request_id: str) -> None:
        """Finish a request with reason `cancelled` at the next step; unknown ids are ignored."""
        self._queue.cancel(request_id)

    def step(self) -> list[Generation]:
        """Advance every running request by one token and return those that finished; [] when idle."""
        finished, running = self._queue.take_cancelled()
        for request_id in running:
            cancelled = self._running.pop(request_id)
            self._engine.abort_request([cancelled.internal_id], internal=True)
            finished.append(cancelled.generation("cancelled"))
        for request in self._queue.take(self._max_slots - len(self._running)):
            self._start(request)
        if self._running:
            for output in self._engine.step():
                reason = self._append(output)
                if reason is not None:
                    finished.append(self._running.pop(output.request_id).generation(reason))
        self._queue.close(finished)
        self._stops.forget(finished)
        return finished

    def sampled(self, request_id: str) -> Sampled:
        """What a request has so far; see `ports.Streamer`."""
        running = self._running.get(request_id)
        if running is None:
            return Sampled.nothing()
        return Sampled(np.array(running.token_ids, dtype=np.int32), np.array(running.logprobs, dtype=np.float32))

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray], *, rollback: bool = False) -> None:
        """Replace all weights, or all adapters, between two steps and forget every cached key and value.

        See `ports.Engine`. Tensors have the engine's dtype, or float32, which is rounded to it.
        """
        if version <= self._version and not rollback:
            raise ValueError(f"version {version} is not newer than the present {self._version}")
        check_tensors(self._parameters, tensors, also=[torch.float32])
        self._sender.send(version, tensors)
        self._forget_prefixes()
        self._version = version

    def score(self, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
        """Log-probs of given tokens; see `ports.Scorer`.

        Requests that run are prefilled anew, unless nothing has run since `load_weights`. Raises ValueError for tokens
        that do not fit into the context.
        """
        if self._scorer.num_running:
            self._forget_prefixes()
        logprobs = self._scorer.score(np.concatenate([prompt_ids, response_ids]).tolist())
        return np.array(logprobs[prompt_ids.size - 1 :], dtype=np.float32)

    def health(self) -> EngineHealth:
        """Return the current load and counters."""
        return EngineHealth(
            version=self._version,
            running=len(self._running),
            waiting=len(self._queue),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._reused,
        )

    def close(self) -> None:
        """Give memory and worker processes back."""
        self._engine.engine_core.shutdown()

    def _forget_prefixes(self) -> None:
        """Empty the KV cache: running requests go back to vLLM's queue and are prefilled anew, then they go on."""
        if self._scorer.num_running:
            self._prefilled += sum(
                each.request.prompt_ids.size + len(each.token_ids) for each in self._running.values() if each.token_ids
            )
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._reader is not None:
            self._engine.reset_encoder_cache()

    def _start(self, request: Request) -> None:
        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            seed=sampling.seed % (1 << 63),
            max_tokens=min(sampling.max_new_tokens, self._context - request.prompt_ids.size),
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the caller's stop ids alone decide
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if self._reader is not None and request.images:
            # vLLM puts the positions of an image where its placeholder is.
            prompt = {
                "prompt_token_ids": self._reader.compact(request.prompt).tolist(),
                "multi_modal_data": {"image": [decode_image(image.content) for image in request.images]},
            }
        internal_id = self._engine.add_request(request.request_id, prompt, params, lora_request=self._adapter)
        self._running[request.request_id] = _Running(request, internal_id)
        self._stops.watch(request.request_id, sampling.stop)

    def _append(self, output: RequestOutput) -> FinishReason | None:
        """Take over what a step sampled for a request; the reason when it ended with it."""
        running, (completion,) = self._running[output.request_id], output.outputs
        if not running.token_ids:
            running.cached_tokens = output.num_cached_tokens or 0
            self._reused += running.cached_tokens
            self._prefilled += running.request.prompt_ids.size - running.cached_tokens
        for token_id, ranked in zip(completion.token_ids, completion.logprobs, strict=True):
            logprob = ranked[token_id].logprob
            if math.isnan(logprob):
                raise FloatingPointError("the model's logits are not finite")
            running.token_ids.append(token_id)
            running.logprobs.append(logprob)
            running.versions.append(self._version)
        self._generated += len(completion.token_ids)
        # A step samples one token a request, so none comes after the one that completes a stop string.
        stopped = any([self._stops.completed(output.request_id, token_id) for token_id in completion.token_ids])
        if stopped and not output.finished:
            self._engine.abort_request([running.internal_id], internal=True)
        if stopped:
            return "stop"
        if not output.finished:
            return None
        if completion.finish_reason not in FINISH_REASONS:
            raise RuntimeError(f"vLLM gave request {output.request_id} up: {completion.finish_reason}")
        return FINISH_REASONS[completion.finish_reason]


def _check_heads(config: PretrainedConfig) -> None:
    """Refuse what vLLM would only notice at its first step."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if current_platform.is_cpu() and size not in sizes:
        raise ValueError(f"attention heads of {size} (hidden_size / heads): vLLM has CPU kernels for {sizes}")


def _engine_args(
    path: Path, max_slots: int, context: int, options: VllmOptions, array_transfer: str, *, takes_images: bool
) -> EngineArgs:
    """What LLMEngine is built from; `takes_images`: whether the model does."""
    arrays = options.weight_transfer == "arrays"
    # A GPU's memory can be handed to another process only, never within one.
    executor = "uni" if arrays and options.tensor_parallel == 1 else "mp"
    cache = options.kv_cache_gib
    memory = (
        {} if options.gpu_memory_utilization is None else {"gpu_memory_utilization": options.gpu_memory_utilization}
    )
    return EngineArgs(
        model=str(path),
        skip_tokenizer_init=not takes_images,  # vLLM's image processors want a tokenizer beside them
        limit_mm_per_prompt={"image": MAX_IMAGES, "video": 0} if takes_images else {},
        generation_config="vllm",
        dtype=options.dtype,
        seed=0,
        max_model_len=max(context, SCORED_TOKENS),
        max_num_seqs=max_slots,
        max_num_batched_tokens=max(options.max_num_batched_tokens, max_slots),
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        block_size=options.block_tokens,
        kv_cache_memory_bytes=None if cache is None else int(cache * (1 << 30)),
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend=executor,
        worker_cls=CPU_WORKER if current_platform.is_cpu() else "auto",
        enforce_eager=options.eager,
        async_scheduling=False,  # a step would return the tokens of the one before
        logprobs_mode="processed_logprobs",  # at the sampling temperature
        weight_transfer_config=WeightTransferConfig(backend=array_transfer if arrays else options.weight_transfer),
        disable_log_stats=True,
        **memory,
    )
