"""What only the torch engine promises: its slots, its order of prefilling, and which models it takes."""

import numpy as np
import pytest
import torch

from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import Generation, Sampling
from tests.reference.generate_reference import plain_twin, tiny_model

PROMPT = np.arange(5, dtype=np.int32)
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def make_engine(max_slots: int = 2, **options) -> TorchEngine:
    return TorchEngine(tiny_model(), max_slots=max_slots, max_context_tokens=32, **options)


def run_steps(engine: TorchEngine, num_steps: int) -> dict[str, Generation]:
    return {each.request_id: each for _ in range(num_steps) for each in engine.step()}


def test_the_cache_never_grows():
    engine = make_engine(max_waiting=100)
    blocks = [engine._cache.keys[0].data_ptr(), engine._cache.values[1].data_ptr()]
    for index in range(20):
        engine.submit(str(index), PROMPT + index, GREEDY, "act")
    assert len(run_steps(engine, 60)) == 20
    assert engine._cache.keys[0].shape[0] == 2
    assert blocks == [engine._cache.keys[0].data_ptr(), engine._cache.values[1].data_ptr()]


def test_long_prompts_prefill_in_chunks_while_others_decode():
    engine = make_engine(max_slots=3, prefill_tokens_per_step=4)
    engine.submit("short", PROMPT[:2], GREEDY, "act")
    engine.step()
    engine.submit("long", np.arange(20, dtype=np.int32), GREEDY, "act")
    before = engine.health()
    engine.step()
    after = engine.health()
    assert after.generated_tokens == before.generated_tokens + 1
    assert after.prefilled_tokens == before.prefilled_tokens + 4


def test_the_request_that_was_admitted_first_prefills_first():
    engine = make_engine(max_slots=2, prefill_tokens_per_step=4)
    one = Sampling(temperature=0.0, max_new_tokens=1)
    engine.submit("in slot 0", PROMPT[:2], one, "act")
    engine.submit("early", np.arange(12, dtype=np.int32) + 20, one, "act")
    assert [each.request_id for each in engine.step()] == ["in slot 0"]
    engine.submit("late, in slot 0", np.arange(8, dtype=np.int32) + 40, one, "act")
    assert list(run_steps(engine, 6)) == ["early", "late, in slot 0"]


def test_bfloat16_weights_travel_as_their_bits():
    engine = TorchEngine(tiny_model().to(torch.bfloat16), max_slots=1, max_context_tokens=32)
    new = tiny_model(seed=1).to(torch.bfloat16)
    bits = {name: value.detach().view(torch.uint16).numpy() for name, value in new.named_parameters()}
    engine.load_weights(1, bits)
    for mine, theirs in zip(engine._model.parameters(), new.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    engine.submit("a", PROMPT, GREEDY, "act")
    assert run_steps(engine, 6)["a"].token_ids.size == 6


def test_models_that_the_engine_would_get_wrong_are_refused():
    with pytest.raises(ValueError, match="load_model"):
        TorchEngine(plain_twin(tiny_model()), max_slots=1, max_context_tokens=32)
    sliding = tiny_model("qwen2")
    sliding.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        TorchEngine(sliding, max_slots=1, max_context_tokens=32)
