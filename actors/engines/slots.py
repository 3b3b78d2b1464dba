"""What each slot of the torch engine holds, as arrays over slots, so that a decode step needs no loop over requests.

Of a slot's `ids`, the first `length` are known and the first `cached` of those have keys and values of the present
weights. A step computes `ids[cached:length]` of the running slots and nothing else. A finished request leaves its ids
behind, so that a prompt which begins with them finds its prefix cached.
"""

import numpy as np

from seed_async.actors.engines.queueing import Request
from seed_async.ports import FinishReason, Generation

NO_TOKEN = -1


class SlotTable:
    """The slots of an engine.

    Arrays [slots, context] are indexed by position: ids, and for sampled tokens their log-prob, version and the uniform
    number that draws them. Arrays [slots] hold the state of each slot.
    """

    def __init__(self, num_slots: int, context: int, *, takes_images: bool = False) -> None:
        """Make `num_slots` empty slots of `context` tokens; `takes_images`: ids may be keys of images, of 64 bits."""
        self.context = context
        self.ids = np.zeros((num_slots, context), dtype=np.int64 if takes_images else np.int32)
        self.logprobs = np.zeros((num_slots, context), dtype=np.float32)
        self.versions = np.zeros((num_slots, context), dtype=np.int32)
        self.uniforms = np.zeros((num_slots, context), dtype=np.float64)
        self.requests: list[Request | None] = [None] * num_slots
        self.running = np.zeros(num_slots, dtype=bool)
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.length_limit = np.zeros(num_slots, dtype=np.int64)
        self.cached = np.zeros(num_slots, dtype=np.int64)
        self.reused = np.zeros(num_slots, dtype=np.int64)
        self.admission = np.zeros(num_slots, dtype=np.int64)
        self.last_used = np.zeros(num_slots, dtype=np.int64)
        self.temperatures = np.zeros(num_slots, dtype=np.float32)
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, dtype=np.int64)
        self._admissions = 0

    def longest_prefix(self, prompt_ids: np.ndarray) -> tuple[int, int]:
        """The slot with the most cached tokens in common with the prompt, and how many.

        At most P - 1: the prompt's last token is always computed, since its logits are needed. Of equal slots a free
        one is taken, which may be continued without a copy.
        """
        size = prompt_ids.size - 1
        if size == 0:
            return 0, 0
        differs = self.ids[:, :size] != prompt_ids[:size]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), size)
        shared = np.minimum(common, self.cached)
        slot = int((2 * shared + ~self.running).argmax())
        return slot, int(shared[slot])

    def choose_target(self, source: int, shared: int) -> int:
        """The free slot for a request that shares `shared` tokens with `source`.

        `source` itself when the request continues it, else the least recently used: a request which shares only its
        opening with another dialogue copies that opening and leaves the dialogue's history whole.
        """
        if not self.running[source] and 0 < self.cached[source] <= 2 * shared:
            return source
        free = np.flatnonzero(~self.running)
        return int(free[self.last_used[free].argmin()])

    def place(self, slot: int, request: Request, cached: int) -> None:
        """Start a request in a free slot whose first `cached` keys and values are those of its prompt."""
        size, sampling = request.prompt_ids.size, request.sampling
        limit = min(size + sampling.max_new_tokens, self.context)
        self.ids[slot, :size] = request.prompt_ids
        self.uniforms[slot, size:limit] = np.random.Generator(np.random.PCG64(sampling.seed)).random(limit - size)
        self.requests[slot], self.running[slot] = request, True
        self.prompt_length[slot] = self.length[slot] = size
        self.length_limit[slot] = limit
        self.cached[slot] = self.reused[slot] = cached
        self.temperatures[slot] = sampling.temperature
        self._set_stop_ids(slot, sampling.stop_ids)
        self._admissions += 1
        self.admission[slot] = self._admissions

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def pending(self, prefill_budget: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The slots to advance [B], how many tokens each [B], and how many of the slots decode; those come first.

        Every decoding slot gets its one token. Prefilling slots share the budget, the earliest admitted first.
        """
        lacking = np.where(self.running, self.length - self.cached, 0)
        decode = np.flatnonzero(lacking == 1)
        prefill = np.flatnonzero(lacking > 1)
        prefill = prefill[self.admission[prefill].argsort()]
        wanted = lacking[prefill]
        counts = np.minimum(wanted, prefill_budget - (wanted.cumsum() - wanted))
        prefill, counts = prefill[counts > 0], counts[counts > 0]
        slots = np.concatenate([decode, prefill])
        return slots, np.concatenate([np.ones(decode.size, dtype=np.int64), counts]), decode.size

    def pending_ids(self, slots: np.ndarray, counts: np.ndarray, num_decode: int) -> np.ndarray:
        """The ids to compute, int64 [T], in the order of `slots`."""
        decode = slots[:num_decode]
        pieces = [self.ids[decode, self.cached[decode]]]
        for slot, count in zip(slots[num_decode:].tolist(), counts[num_decode:].tolist(), strict=True):
            pieces.append(self.ids[slot, self.cached[slot] : self.cached[slot] + count])
        ids: np.ndarray = np.concatenate(pieces).astype(np.int64)
        return ids

    def append(
        self, slots: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray, version: int
    ) -> list[tuple[int, FinishReason]]:
        """Add one sampled token to each of `slots` [B]; returns the slots that ended with it."""
        at = self.length[slots]
        self.ids[slots, at] = token_ids
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = version
        self.length[slots] = at + 1
        stopped = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        ended = stopped | (at + 1 >= self.length_limit[slots])
        return [(int(slots[row]), "stop" if stopped[row] else "length") for row in np.flatnonzero(ended)]

    def finish(self, slot: int, reason: FinishReason) -> Generation:
        """Free a running slot; its ids stay for later prompts that begin with them."""
        request = self.requests[slot]
        if request is None:
            raise ValueError(f"slot {slot} has no request to finish")
        sampled = slice(self.prompt_length[slot], self.length[slot])
        self.requests[slot], self.running[slot] = None, False
        return Generation(
            request_id=request.request_id,
            token_ids=self.ids[slot, sampled].astype(np.int32),
            logprobs=self.logprobs[slot, sampled].copy(),
            versions=self.versions[slot, sampled].copy(),
            finish_reason=reason,
            prompt_tokens=int(self.prompt_length[slot]),
            cached_tokens=int(self.reused[slot]),
        )
