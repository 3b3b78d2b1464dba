"""What the tests of the vLLM engine compare: the tiny model, plain transformers, and weights that change in flight."""

import numpy as np
import torch

from seed_async.ports import Engine, Generation, Sampling
from seed_async.topology import Lora
from seed_async.weights.canary import canary_text
from tests.reference.engines import HEAD_DIM, drain, make_prompts
from tests.reference.generate_reference import VOCABULARY, add_random_adapters, plain_twin, tiny_model, weights_of

CONTEXT = 1600
NUM_SLOTS = 32
TOLERANCE = 1e-4
"""Nats: float32 sums in another order. Stale weights or keys move log-probs by more than a hundred times as much."""
CANARY = canary_text(VOCABULARY)


def model(seed: int = 0, *, tied: bool = False):
    return tiny_model(seed=seed, tied=tied, head_dim=HEAD_DIM, context=CONTEXT)


def logprobs_after(twin, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Log-probs float64 [T, V] of what comes at each place of the response, all from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = twin(input_ids=ids, use_cache=False).logits[0, prompt.size - 1 : -1].double()
    return torch.log_softmax(logits, dim=-1).numpy()


def update_in_flight(
    engine: Engine, *, tied: bool = False, lora: Lora | None = None, num_slots: int = NUM_SLOTS
) -> tuple[float, float]:
    """Change the weights while requests run in all slots; the largest log-prob gap before the change and after it.

    Every request must end, whole, with its border exactly there.
    """
    prompts = make_prompts(*np.random.default_rng(1).integers(3, 120, num_slots).tolist(), seed=1)
    if lora is None:
        twins = [plain_twin(model(seed, tied=tied)) for seed in (0, 1)]
        new = weights_of(model(1, tied=tied))
    else:
        twins = [plain_twin(model(tied=tied)) for _ in range(2)]
        old, new = (add_random_adapters(twin, lora, seed) for seed, twin in enumerate(twins))
        engine.load_weights(engine.health().version + 1, old)
    version = engine.health().version
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, Sampling(temperature=1.0, max_new_tokens=20, seed=index), "act")
    finished: dict[str, Generation] = {}
    for _ in range(8):
        finished.update((each.request_id, each) for each in engine.step())
    assert finished == {} and engine.health().running == num_slots
    sampled_before = engine.health().generated_tokens
    engine.load_weights(version + 1, new)
    finished = drain(engine)
    assert finished.keys() == {str(index) for index in range(num_slots)}
    gaps: list[list[float]] = [[], []]
    num_before = 0
    for index, prompt in enumerate(prompts):
        done = finished[str(index)]
        border = int((done.versions == version).sum())
        assert done.versions.tolist() == [version] * border + [version + 1] * (20 - border) and 0 < border < 20
        num_before += border
        scores = [logprobs_after(twin, prompt, done.token_ids)[np.arange(20), done.token_ids] for twin in twins]
        assert np.abs(scores[0] - scores[1]).max() > 0.1
        for gap, part, score in zip(gaps, (slice(0, border), slice(border, 20)), scores, strict=True):
            gap.append(np.abs(done.logprobs[part] - score[part]).max())
    assert num_before == sampled_before - engine.health().generated_tokens + 20 * num_slots
    return max(gaps[0]), max(gaps[1])
