"""The default generation engine: continuous batching with transformers models on a slotted KV cache.

Each step runs one packed forward pass over all tokens that are pending in any slot: chunks of prompts that are not
cached yet, and one token for each request that is decoding. A change of weights marks every slot as not cached, so
nothing that old weights computed is read again; running requests are prefilled anew and go on.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from seed_async.actors.engines.attention import (
    ATTENTION_NAME,
    AttentionPlan,
    SlotCache,
    make_plan,
    register_slotted_attention,
)
from seed_async.actors.engines.images import ImageReader
from seed_async.actors.engines.published import as_torch, check_tensors, loadable_parameters
from seed_async.actors.engines.queueing import RequestQueue
from seed_async.actors.engines.sampling import draw_tokens
from seed_async.actors.engines.slots import SlotTable
from seed_async.actors.engines.stopping import StopStrings
from seed_async.actors.engines.vision import Vision, takes_images
from seed_async.adapters import add_adapters
from seed_async.ports import EngineHealth, FinishReason, Generation, RequestKind, Sampled, Sampling, TextStream
from seed_async.topology import Lora

MIN_TEMPERATURE = 1e-4
"""Smallest temperature above 0: logits divided by much less overflow float32."""

VISION_ATTENTION = {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}
"""Of a vision model only the language model attends over slots."""


def load_model(
    path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", lora: Lora | None = None
) -> PreTrainedModel:
    """Load a Hugging Face causal language model from a local folder with the engine's attention, for inference.

    With its vision tower, if it has one. With `lora` it gets adapters, which change nothing yet, and versions are those
    of the adapters. Raises ValueError for a vision model that is not known here.
    """
    register_slotted_attention()
    sees = takes_images(AutoConfig.from_pretrained(path, local_files_only=True))
    auto_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_pretrained(
        path, local_files_only=True, dtype=dtype, attn_implementation=VISION_ATTENTION if sees else ATTENTION_NAME
    )
    if lora is not None:
        add_adapters(model, lora, seed=0)
    model.requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]  # the library's decorator hides the signature
    return model


class TorchEngine:
    """Engine (see `ports.Engine`) over a transformers causal language model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int,
        max_context_tokens: int,
        max_waiting: int = 1024,
        prefill_tokens_per_step: int = 2048,
        version: int = 0,
        open_stream: Callable[[], TextStream] | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        """Reserve `max_slots` slots of `max_context_tokens`; `model` has the engine's attention (see `load_model`).

        `open_stream` is for stop strings: see `stopping`. Without `image_reader` (see `images.open_reader`) every
        image is refused.
        """
        config = model.config.get_text_config()
        _check_model(config)
        self._model, self._decoder = model, getattr(model.base_model, "language_model", model.base_model)
        self._parameters = loadable_parameters(model)
        self._head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._cache = SlotCache(config, max_slots, max_context_tokens, model)
        self._table = SlotTable(max_slots, max_context_tokens, takes_images=image_reader is not None)
        self._vision = None if image_reader is None else Vision(model, image_reader, self._table)
        self._stops = StopStrings(open_stream)
        self._queue = RequestQueue(
            vocabulary=int(config.vocab_size),
            context=max_context_tokens,
            max_waiting=max_waiting,
            min_temperature=MIN_TEMPERATURE,
            stop_strings=self._stops.known,
            image_reader=image_reader,
        )
        self._prefill_budget, self._version = prefill_tokens_per_step, version
        self._steps = self._generated = self._prefilled = self._reused = 0

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

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance every running request by one token and return those that finished; [] when idle."""
        finished = self._take_cancelled()
        self._admit()
        table = self._table
        slots, counts, num_decode = table.pending(self._prefill_budget)
        if slots.size > 0:
            logits, ready = self._forward(slots, counts, num_decode)
            if ready.size > 0:
                draw = draw_tokens(logits, table.temperatures[ready], table.uniforms[ready, table.length[ready]])
                self._generated += ready.size
                ended = dict(table.append(ready, draw.token_ids, draw.logprobs, self._version))
                ended |= self._stopped(ready, draw.token_ids)
                finished += [table.finish(slot, reason) for slot, reason in ended.items()]
        self._queue.close(finished)
        self._stops.forget(finished)
        return finished

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray], *, rollback: bool = False) -> None:
        """Replace all weights, or all adapters of a model that has some, between two steps; see `ports.Engine`.

        Every cached key and value is forgotten.
        """
        if version <= self._version and not rollback:
            raise ValueError(f"version {version} is not newer than the present {self._version}")
        check_tensors(self._parameters, tensors)
        with torch.no_grad():
            for name, tensor in as_torch(tensors):
                self._parameters[name].copy_(tensor)
        self._table.cached[:] = 0
        if self._vision is not None:
            self._vision.forget_all()
        self._version = version

    def sampled(self, request_id: str) -> Sampled:
        """What a request has so far; see `ports.Streamer`."""
        table = self._table
        for slot, request in enumerate(table.requests):
            if request is not None and request.request_id == request_id:
                part = slice(table.prompt_length[slot], table.length[slot])
                return Sampled(table.ids[slot, part].copy(), table.logprobs[slot, part].copy())
        return Sampled.nothing()

    @torch.inference_mode()
    def score(self, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
        """Log-probs of given tokens; see `ports.Scorer`. A cache of one slot for this call leaves the others alone."""
        ids = np.concatenate([prompt_ids, response_ids]).astype(np.int64)
        cache = SlotCache(self._model.config.get_text_config(), 1, ids.size, self._model)
        plan = make_plan(cache, np.zeros(1, np.int64), np.array([ids.size]), np.zeros(1, np.int64), num_decode=0)
        hidden = self._decode(_text_inputs(ids, plan), plan)[prompt_ids.size - 1 : -1]
        logprobs = torch.log_softmax(self._head(hidden).float(), dim=-1).cpu().numpy()
        scored: np.ndarray = logprobs[np.arange(response_ids.size), response_ids]
        return scored

    def health(self) -> EngineHealth:
        """Return the current load and counters."""
        return EngineHealth(
            version=self._version,
            running=int(self._table.running.sum()),
            waiting=len(self._queue),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._reused,
        )

    def _stopped(self, slots: np.ndarray, token_ids: np.ndarray) -> dict[int, FinishReason]:
        """The slots [B] whose sampled token [B] completes a stop string."""
        stopped: dict[int, FinishReason] = {}
        if not self._stops.watching:
            return stopped
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            request = self._table.requests[slot]
            if request is not None and self._stops.completed(request.request_id, token_id):
                stopped[slot] = "stop"
        return stopped

    def _take_cancelled(self) -> list[Generation]:
        """Free the slots and queue places of cancelled requests."""
        finished, running = self._queue.take_cancelled()
        if running:
            for slot, request in enumerate(self._table.requests):
                if request is not None and request.request_id in running:
                    finished.append(self._table.finish(slot, "cancelled"))
            if self._vision is not None:
                self._vision.forget_done()
        return finished

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
        for request in self._queue.take(int((~self._table.running).sum())):
            source, shared = self._table.longest_prefix(request.prompt_ids)
            target = self._table.choose_target(source, shared)
            if target != source and shared > 0:
                self._cache.copy_prefix(source, target, shared)
            self._table.place(target, request, shared)
            if self._vision is not None:
                self._vision.place(target, request)
            self._stops.watch(request.request_id, request.sampling.stop)
            self._reused += shared

    def _forward(self, slots: np.ndarray, counts: np.ndarray, num_decode: int) -> tuple[torch.Tensor, np.ndarray]:
        """Compute the pending tokens.

        Returns float32 logits [B, V] of the B slots whose last known id was among them, and these slots [B]. Slots that
        prefill in several chunks have none until the last one.
        """
        table, prefixes = self._table, self._table.cached[slots]
        plan = make_plan(self._cache, slots, counts, prefixes, num_decode)
        ids = table.pending_ids(slots, counts, num_decode)
        vision = self._vision
        inputs = _text_inputs(ids, plan) if vision is None else vision.inputs(ids, slots, counts, prefixes)
        hidden = self._decode(inputs, plan)
        self._steps += 1
        table.last_used[slots] = self._steps
        table.cached[slots] = prefixes + counts
        if self._vision is not None:
            self._vision.forget_done()
        self._prefilled += int(counts.sum()) - int((prefixes >= table.prompt_length[slots])[:num_decode].sum())
        complete = table.cached[slots] == table.length[slots]
        if num_decode < slots.size:
            hidden = hidden[torch.from_numpy(counts.cumsum()[complete] - 1).to(hidden.device)]
        return self._head(hidden).float(), slots[complete]

    def _decode(self, inputs: Mapping[str, Any], plan: AttentionPlan) -> torch.Tensor:
        """Hidden states [T, d] of a packed row."""
        hidden: torch.Tensor = self._decoder(**inputs, slot_plan=plan, use_cache=False).last_hidden_state[0]
        return hidden


def _text_inputs(ids: np.ndarray, plan: AttentionPlan) -> dict[str, Any]:
    """What a language model takes for a packed row of ids int64 [T]."""
    packed = torch.from_numpy(ids).to(plan.positions.device)[None]
    return {"input_ids": packed, "position_ids": plan.positions[None]}


def _check_model(config: PretrainedConfig) -> None:
    """Refuse models whose attention or logits the engine would get wrong without a sign."""
    if config._attn_implementation != ATTENTION_NAME:
        raise ValueError(f"attention {config._attn_implementation!r} is not {ATTENTION_NAME!r}: use load_model")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"layer types {sorted(layer_types)}: only full attention is served")
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) is not None:
            raise ValueError(f"the model has {name}, which the engine does not apply")
