"""The torch engine as a service: refusals, cancellation, fairness, bounded memory, weight loads that fail."""

import numpy as np
import pytest
import torch

from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import Generation, RequestRefusedError, Sampling
from tests.reference.generate_reference import VOCABULARY, greedy_reference, plain_twin, tiny_model, weights_of

PROMPT = np.arange(5, dtype=np.int32)
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def make_engine(max_slots: int = 2, max_context_tokens: int = 32, max_waiting: int = 4, **options) -> TorchEngine:
    return TorchEngine(
        tiny_model(),
        max_slots=max_slots,
        max_context_tokens=max_context_tokens,
        max_waiting=max_waiting,
        **options,
    )


def run_steps(engine: TorchEngine, num_steps: int) -> dict[str, Generation]:
    return {each.request_id: each for _ in range(num_steps) for each in engine.step()}


@pytest.mark.parametrize(
    ("prompt", "changes", "named"),
    [
        (PROMPT[:0], {}, "one or more"),
        (PROMPT[None], {}, "one or more"),
        (PROMPT.astype(np.float32), {}, "integer"),
        (np.zeros(32, dtype=np.int32), {}, "context of 32"),
        (np.array([0, VOCABULARY]), {}, f"vocabulary of {VOCABULARY}"),
        (np.array([-1, 0]), {}, "vocabulary"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (PROMPT, {"temperature": -0.5}, "temperature -0.5"),
        (PROMPT, {"temperature": float("nan")}, "temperature nan"),
        (PROMPT, {"temperature": float("inf")}, "temperature inf"),
        (PROMPT, {"temperature": 1e-30}, "temperature 1e-30"),
        (PROMPT, {"seed": -1}, "seed -1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_reason_and_leaves_nothing(prompt, changes, named):
    engine = make_engine()
    with pytest.raises(RequestRefusedError, match=named):
        engine.submit("a", prompt, Sampling(**{"temperature": 1.0, "max_new_tokens": 4, **changes}), "act")
    assert engine.health().waiting == 0
    engine.submit("a", PROMPT, GREEDY, "act")
    assert run_steps(engine, 6)["a"].token_ids.size == 6


def test_an_id_is_refused_while_it_is_open_and_free_again_after():
    engine = make_engine()
    engine.submit("a", PROMPT, GREEDY, "act")
    with pytest.raises(RequestRefusedError, match="has not finished"):
        engine.submit("a", PROMPT, GREEDY, "act")
    run_steps(engine, 6)
    engine.submit("a", PROMPT, GREEDY, "act")


def test_the_waiting_queue_is_bounded():
    engine = make_engine(max_waiting=3)
    for index in range(3):
        engine.submit(str(index), PROMPT, GREEDY, "act")
    with pytest.raises(RequestRefusedError, match="3 requests are waiting"):
        engine.submit("one more", PROMPT, GREEDY, "evaluate")
    engine.step()
    engine.submit("one more", PROMPT, GREEDY, "evaluate")


def test_no_more_requests_run_than_there_are_slots_and_the_cache_never_grows():
    engine = make_engine(max_slots=2, max_waiting=100)
    blocks = [engine._cache.keys[0].data_ptr(), engine._cache.values[1].data_ptr()]
    for index in range(20):
        engine.submit(str(index), PROMPT + index, GREEDY, "act")
    num_finished = 0
    for _ in range(60):
        num_finished += len(engine.step())
        assert engine.health().running <= 2
    assert num_finished == 20
    assert engine._cache.keys[0].shape[0] == 2
    assert blocks == [engine._cache.keys[0].data_ptr(), engine._cache.values[1].data_ptr()]


def test_the_engine_keeps_its_own_copy_of_a_prompt():
    engine = make_engine()
    prompt = PROMPT.copy()
    engine.submit("a", prompt, GREEDY, "act")
    prompt[:] = 0
    expected = greedy_reference(plain_twin(tiny_model()), PROMPT, 6)[0]
    assert run_steps(engine, 6)["a"].token_ids.tolist() == expected


def test_a_response_ends_with_the_context():
    engine = make_engine(max_context_tokens=32)
    engine.submit("a", np.arange(29, dtype=np.int32), Sampling(temperature=1.0, max_new_tokens=50), "act")
    generation = run_steps(engine, 4)["a"]
    assert (generation.token_ids.size, generation.finish_reason) == (3, "length")


def test_a_step_without_requests_returns_nothing_and_computes_nothing():
    engine = make_engine()
    assert engine.step() == []
    assert engine.health().prefilled_tokens == 0


def test_a_cancelled_request_answers_at_the_next_step_with_what_it_has_and_frees_its_slot():
    engine = make_engine(max_slots=1)
    engine.submit("running", PROMPT, GREEDY, "act")
    engine.submit("waiting", PROMPT, GREEDY, "act")
    engine.submit("next", PROMPT[:3], GREEDY, "act")
    run_steps(engine, 2)
    for name in ("running", "waiting", "unknown"):
        engine.cancel(name)
    finished = {each.request_id: each for each in engine.step()}
    assert finished.keys() == {"running", "waiting"}
    assert {each.finish_reason for each in finished.values()} == {"cancelled"}
    assert finished["running"].token_ids.tolist() == greedy_reference(plain_twin(tiny_model()), PROMPT, 2)[0]
    assert finished["running"].logprobs.size == finished["running"].versions.size == 2
    assert finished["waiting"].token_ids.size == 0
    rest = run_steps(engine, 6)
    assert rest["next"].token_ids.tolist() == greedy_reference(plain_twin(tiny_model()), PROMPT[:3], 6)[0]
    assert engine.health().running == engine.health().waiting == 0


def test_kinds_take_turns_when_slots_are_short_and_a_kind_is_served_in_order():
    engine = make_engine(max_slots=1, max_waiting=100)
    one = Sampling(temperature=0.0, max_new_tokens=1)
    for index in range(4):
        engine.submit(f"act {index}", PROMPT, one, "act")
    for index in range(2):
        engine.submit(f"evaluate {index}", PROMPT, one, "evaluate")
        engine.submit(f"analyse {index}", PROMPT, one, "analyse")
    order = list(run_steps(engine, 8))
    kinds = [name.split()[0] for name in order]
    assert set(kinds[:3]) == set(kinds[3:6]) == {"act", "evaluate", "analyse"}
    for kind in set(kinds):
        assert [name for name in order if name.startswith(kind)] == sorted(n for n in order if n.startswith(kind))


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


def test_counters_add_up():
    engine = make_engine()
    engine.submit("a", PROMPT, GREEDY, "act")
    run_steps(engine, 6)
    health = engine.health()
    assert (health.generated_tokens, health.prefilled_tokens, health.cached_tokens) == (6, 5, 0)


def change(tensors: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    return {**tensors, name: value} if value is not None else {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("lm_head.weight", None, KeyError),
        ("stranger", np.zeros(1, dtype=np.float32), KeyError),
        ("lm_head.weight", np.zeros((VOCABULARY, 31), dtype=np.float32), ValueError),
        ("lm_head.weight", np.zeros((VOCABULARY, 32), dtype=np.float64), ValueError),
    ],
)
def test_a_weight_load_that_fails_leaves_the_old_weights_whole(name, value, error):
    engine = make_engine()
    engine.submit("before", PROMPT, GREEDY, "act")
    run_steps(engine, 2)
    with pytest.raises(error, match=name):
        engine.load_weights(1, change(weights_of(tiny_model(seed=1)), name, value))
    generation = run_steps(engine, 4)["before"]
    assert generation.token_ids.tolist() == greedy_reference(plain_twin(tiny_model()), PROMPT, 6)[0]
    assert generation.versions.tolist() == [0] * 6


@pytest.mark.parametrize("version", [3, 2])
def test_weights_that_are_not_newer_are_refused(version):
    engine = make_engine(version=3)
    with pytest.raises(ValueError, match="not newer"):
        engine.load_weights(version, weights_of(tiny_model(seed=1)))
    engine.submit("a", PROMPT, GREEDY, "act")
    generation = run_steps(engine, 6)["a"]
    assert generation.token_ids.tolist() == greedy_reference(plain_twin(tiny_model()), PROMPT, 6)[0]
    assert generation.versions.tolist() == [3] * 6


def test_tied_weights_are_loaded_once_from_read_only_arrays_and_stay_tied():
    engine = TorchEngine(tiny_model(tied=True), max_slots=1, max_context_tokens=32)
    new = tiny_model(seed=1, tied=True)
    tensors = weights_of(new)
    assert "lm_head.weight" not in tensors
    for array in tensors.values():
        array.setflags(write=False)
    engine.load_weights(1, tensors)
    engine.submit("a", PROMPT, GREEDY, "act")
    assert run_steps(engine, 6)["a"].token_ids.tolist() == greedy_reference(plain_twin(new), PROMPT, 6)[0]


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
