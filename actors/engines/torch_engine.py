"""The default generation engine: continuous batching with transformers models on a slotted KV cache.

Every step runs one packed forward pass over all tokens that are pending in any slot: the chunks of prompts that are not
cached yet, and one token for each request that is decoding. A slot knows its ids and how many of them are cached; a
change of weights sets that number to zero, so nothing computed by old weights is ever read again.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from seed_async.actors.engines.attention import (
    ATTENTION_NAME,
    AttentionPlan,
    PrefillSegment,
    SlotCache,
    register_slotted_attention,
)
from seed_async.ports import EngineHealth, FinishReason, Generation, RequestKind, RequestRefusedError, Sampling


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a Hugging Face causal language model from a local folder with the engine's attention, for inference."""
    register_slotted_attention()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    return model.eval().requires_grad_(False)


@dataclass
class _Request:
    request_id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    max_new_tokens: int
    draws: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    def result(self, reason: FinishReason) -> Generation:
        return Generation(
            request_id=self.request_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
        )


@dataclass
class _Slot:
    """`ids[:length]` are known, `ids[:cached]` have keys and values of the present weights."""

    index: int
    ids: np.ndarray
    length: int = 0
    cached: int = 0
    request: _Request | None = None
    last_used: int = 0

    def common_prefix(self, prompt: np.ndarray) -> int:
        """Cached tokens that `prompt` shares; its last token is always computed, for its logits."""
        size = min(self.cached, prompt.size - 1)
        different = np.flatnonzero(self.ids[:size] != prompt[:size])
        return int(different[0]) if different.size else size


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
    ) -> None:
        """Reserve `max_slots` slots of `max_context_tokens`; `model` comes from `load_model`."""
        self._model = model
        self._cache = SlotCache(model.config, max_slots, max_context_tokens, model.dtype)
        self._slots = [_Slot(index, np.zeros(max_context_tokens, dtype=np.int32)) for index in range(max_slots)]
        self._context, self._max_waiting, self._prefill_budget = max_context_tokens, max_waiting, prefill_tokens_per_step
        self._version = version
        self._waiting: OrderedDict[RequestKind, deque[_Request]] = OrderedDict(
            (kind, deque()) for kind in ("act", "evaluate", "analyse")
        )
        self._known: set[str] = set()
        self._cancelled: set[str] = set()
        self._steps = self._generated = self._prefilled = self._cached_tokens = 0

    def submit(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind) -> None:
        """Queue a request. Raises RequestRefusedError, naming the limit."""
        self._check(request_id, prompt_ids, sampling)
        room = self._context - prompt_ids.size
        draws = np.random.Generator(np.random.PCG64(sampling.seed))
        request = _Request(request_id, prompt_ids, sampling, min(sampling.max_new_tokens, room), draws)
        self._waiting[kind].append(request)
        self._known.add(request_id)

    def _check(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling) -> None:
        vocabulary = int(self._model.config.vocab_size)
        faults = {
            f"request {request_id} is already running": request_id in self._known,
            "the prompt is empty": prompt_ids.size == 0,
            f"the prompt has {prompt_ids.size} tokens, the context {self._context}": prompt_ids.size >= self._context,
            f"max_new_tokens is {sampling.max_new_tokens}, at least 1 is needed": sampling.max_new_tokens < 1,
            f"temperature {sampling.temperature} is not a finite number of at least 0": not 0 <= sampling.temperature < np.inf,
            f"{self._max_waiting} requests are waiting already": sum(map(len, self._waiting.values())) >= self._max_waiting,
            f"a token id is outside the vocabulary of {vocabulary}": prompt_ids.size > 0
            and not (0 <= prompt_ids.min() and prompt_ids.max() < vocabulary),
        }
        for fault, present in faults.items():
            if present:
                raise RequestRefusedError(fault)

    def cancel(self, request_id: str) -> None:
        """Finish a request at the next step with what it has."""
        if request_id in self._known:
            self._cancelled.add(request_id)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance every running request; see `ports.Engine`."""
        finished = self._drop_cancelled()
        self._admit()
        pending = self._pending()
        if not pending:
            return finished
        self._steps += 1
        logits, ends = self._forward(pending)
        if ends:
            finished += self._sample(logits, ends)
        return finished

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Replace all weights and forget every cached key and value; see `ports.Engine`."""
        if version <= self._version:
            raise ValueError(f"version {version} is not newer than {self._version}")
        own = dict(self._model.named_parameters())
        if own.keys() != tensors.keys():
            raise KeyError(f"tensor names differ: {sorted(own.keys() ^ tensors.keys())[:5]}")
        new: dict[str, torch.Tensor] = {}
        for name, parameter in own.items():
            array = tensors[name]
            bits = torch.uint16 if parameter.dtype == torch.bfloat16 else parameter.dtype
            if array.shape != tuple(parameter.shape) or torch.from_numpy(np.empty(0, array.dtype)).dtype != bits:
                raise ValueError(f"{name}: {array.dtype}{list(array.shape)} does not fit {bits}{list(parameter.shape)}")
            new[name] = torch.from_numpy(array.copy()).view(parameter.dtype)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(new[name])
        for slot in self._slots:
            slot.cached = 0
        self._version = version

    def health(self) -> EngineHealth:
        """Return the current load and counters."""
        return EngineHealth(
            version=self._version,
            running=sum(slot.request is not None for slot in self._slots),
            waiting=sum(map(len, self._waiting.values())),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached_tokens,
        )

    def _drop_cancelled(self) -> list[Generation]:
        finished = []
        for queue in self._waiting.values() if self._cancelled else ():
            for request in [each for each in queue if each.request_id in self._cancelled]:
                queue.remove(request)
                finished.append(self._finish(request, "cancelled"))
        for slot in self._slots if self._cancelled else ():
            if slot.request and slot.request.request_id in self._cancelled:
                finished.append(self._finish(slot.request, "cancelled"))
                slot.request = None
        self._cancelled.clear()
        return finished

    def _finish(self, request: _Request, reason: FinishReason) -> Generation:
        self._known.discard(request.request_id)
        return request.result(reason)

    def _admit(self) -> None:
        """Give free slots to waiting requests, one of each kind in turn, to the slot that shares the longest prefix."""
        free = [slot for slot in self._slots if slot.request is None]
        while free and any(self._waiting.values()):
            kind = next(iter(self._waiting))
            self._waiting.move_to_end(kind)
            if not self._waiting[kind]:
                continue
            request = self._waiting[kind].popleft()
            slot = max(free, key=lambda each: (each.common_prefix(request.prompt_ids), -each.last_used))
            free.remove(slot)
            request.cached_tokens = slot.cached = slot.common_prefix(request.prompt_ids)
            self._cached_tokens += slot.cached
            slot.length = request.prompt_ids.size
            slot.ids[: slot.length] = request.prompt_ids
            slot.request = request

    def _pending(self) -> list[tuple[_Slot, int]]:
        """The slots to advance and how many tokens each, decoding ones first, prefill within the step's budget."""
        running = [slot for slot in self._slots if slot.request]
        decode = [(slot, 1) for slot in running if slot.length - slot.cached == 1]
        budget = self._prefill_budget
        prefill = []
        for slot in sorted((slot for slot in running if slot.length - slot.cached > 1), key=lambda each: each.last_used):
            tokens = min(slot.length - slot.cached, budget)
            if tokens:
                prefill.append((slot, tokens))
                budget -= tokens
        return decode + prefill

    def _forward(self, pending: list[tuple[_Slot, int]]) -> tuple[torch.Tensor, list[_Slot]]:
        """Compute the pending tokens; returns the logits [B, V] of the B slots whose last known id was among them."""
        plan = self._plan(pending)
        ids = np.concatenate([slot.ids[slot.cached : slot.cached + tokens] for slot, tokens in pending])
        hidden = self._model.base_model(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None],
            position_ids=plan.positions[None],
            plan=plan,
            use_cache=False,
        ).last_hidden_state[0]
        ends, rows, stop = [], [], 0
        for slot, tokens in pending:
            stop += tokens
            slot.cached += tokens
            slot.last_used = self._steps
            if slot.cached == slot.length:
                ends.append(slot)
                rows.append(stop - 1)
        self._prefilled += int(ids.size) - plan.num_decode
        head = self._model.get_output_embeddings()
        return head(hidden[rows]).float(), ends

    def _plan(self, pending: list[tuple[_Slot, int]]) -> AttentionPlan:
        num_decode = sum(slot.length - slot.cached == 1 for slot, _ in pending)
        indices = np.array([slot.index for slot, _ in pending])
        counts = np.array([tokens for _, tokens in pending])
        prefixes = np.array([slot.cached for slot, _ in pending])
        stops = np.cumsum(counts)
        positions = np.arange(stops[-1]) - np.repeat(stops - counts, counts) + np.repeat(prefixes, counts)
        num_slots = longest = 0
        mask = None
        if num_decode:
            num_slots = int(indices[:num_decode].max()) + 1
            longest = int(prefixes[:num_decode].max()) + 1
            lengths = np.zeros(num_slots, dtype=np.int64)
            lengths[indices[:num_decode]] = prefixes[:num_decode] + 1
            mask = (torch.arange(longest)[None] < torch.from_numpy(lengths)[:, None])[:, None, None]
        segments = tuple(
            PrefillSegment(int(stop - count), int(stop), int(index), int(prefix), _prefill_mask(int(prefix), int(count)))
            for stop, count, index, prefix in zip(
                stops[num_decode:], counts[num_decode:], indices[num_decode:], prefixes[num_decode:], strict=True
            )
        )
        slots = torch.from_numpy(np.repeat(indices, counts))
        return AttentionPlan(
            self._cache, slots, torch.from_numpy(positions), num_decode, num_slots, longest, mask, segments
        )

    def _sample(self, logits: torch.Tensor, slots: list[_Slot]) -> list[Generation]:
        """Draw one token a slot; returns the requests that ended with it."""
        requests = [slot.request for slot in slots if slot.request]
        temperatures = torch.tensor([each.sampling.temperature or 1.0 for each in requests])[:, None]
        log_probs = torch.log_softmax(logits / temperatures, dim=-1)
        cumulative = log_probs.double().exp().cumsum(dim=-1)
        uniform = torch.tensor([each.draws.random() for each in requests], dtype=torch.float64)[:, None]
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
        greedy = torch.tensor([each.sampling.temperature == 0 for each in requests])
        chosen = torch.where(greedy, log_probs.argmax(dim=-1), drawn.clamp(max=logits.shape[-1] - 1))
        scores = log_probs.gather(1, chosen[:, None])[:, 0].tolist()
        finished = []
        for slot, request, token, logprob in zip(slots, requests, chosen.tolist(), scores, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            self._generated += 1
            if slot.length < self._context:
                slot.ids[slot.length] = token
                slot.length += 1
            stopped = token in request.sampling.stop_ids
            if stopped or len(request.token_ids) >= request.max_new_tokens:
                finished.append(self._finish(request, "stop" if stopped else "length"))
                slot.request = None
        return finished


def _prefill_mask(prefix: int, count: int) -> torch.Tensor | None:
    """Causal mask [count, prefix + count] of a segment behind a prefix; None where plain causal attention does."""
    if prefix == 0:
        return None
    return torch.ones(count, prefix + count, dtype=torch.bool).tril_(prefix)
