"""The torch engine samples what a plain transformers loop would, at the weights that it says it used."""

import numpy as np
import pytest
import torch

from seed_async.actors.engines.sampling import draw_tokens
from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.ports import Generation, Sampling
from tests.reference.generate_reference import (
    VOCABULARY,
    greedy_reference,
    plain_twin,
    sampled_reference,
    score_reference,
    tiny_model,
    weights_of,
)

FAMILIES = ["llama", "qwen2", "qwen3"]
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def make_prompts(*sizes: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, size).astype(np.int32) for size in sizes]


def drain(engine: TorchEngine) -> dict[str, Generation]:
    finished: dict[str, Generation] = {}
    for _ in range(2000):
        finished.update((each.request_id, each) for each in engine.step())
        health = engine.health()
        if health.running == health.waiting == 0:
            return finished
    raise AssertionError("the engine did not finish")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", [0, 1])
def test_greedy_responses_equal_a_plain_uncached_loop_in_any_arrival_order(family, order):
    model = tiny_model(family)
    twin = plain_twin(model)
    engine = TorchEngine(model, max_slots=3, max_context_tokens=64, prefill_tokens_per_step=16)
    prompts = make_prompts(1, 2, 17, 33, 60, 9)
    rng = np.random.default_rng(order)
    finished = {}
    for index in rng.permutation(len(prompts)).tolist():
        engine.submit(str(index), prompts[index], GREEDY, "act")
        for _ in range(rng.integers(0, 5)):
            finished.update((each.request_id, each) for each in engine.step())
    finished.update(drain(engine))
    for index, prompt in enumerate(prompts):
        generation = finished[str(index)]
        ids, scores = greedy_reference(twin, prompt, min(12, 64 - prompt.size))
        assert generation.token_ids.tolist() == ids
        assert np.abs(generation.logprobs - scores).max() < 1e-4
        assert generation.finish_reason == "length"


def test_a_model_saved_to_a_folder_loads_and_generates_the_same(tmp_path):
    model = tiny_model(tied=True)
    model.save_pretrained(tmp_path)
    engine = TorchEngine(load_model(tmp_path), max_slots=1, max_context_tokens=64)
    (prompt,) = make_prompts(10)
    engine.submit("a", prompt, GREEDY, "act")
    assert drain(engine)["a"].token_ids.tolist() == greedy_reference(plain_twin(model), prompt, 12)[0]


def test_sampled_responses_equal_numpy_inverse_cdf_draws_and_do_not_depend_on_the_batch_mix():
    model = tiny_model()
    prompts = make_prompts(5, 11, 23)
    samplings = [Sampling(temperature=t, max_new_tokens=10, seed=7 + i) for i, t in enumerate((0.7, 1.0, 1.6))]
    together = TorchEngine(model, max_slots=8, max_context_tokens=64)
    for index in (2, 0, 1):
        together.submit(str(index), prompts[index], samplings[index], "act")
    together.submit("other", prompts[1], GREEDY, "evaluate")
    mixed = drain(together)
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        alone = TorchEngine(model, max_slots=1, max_context_tokens=64)
        alone.submit("x", prompt, sampling, "act")
        expected = sampled_reference(plain_twin(model), prompt, 10, sampling.temperature, sampling.seed)
        assert drain(alone)["x"].token_ids.tolist() == mixed[str(index)].token_ids.tolist() == expected
        scores = score_reference(plain_twin(model), prompt, mixed[str(index)].token_ids, sampling.temperature)
        assert np.abs(mixed[str(index)].logprobs - scores).max() < 1e-4


def test_draws_follow_the_distribution_and_reach_both_ends_of_the_vocabulary():
    probabilities = np.array([0.2, 0.0, 0.5, 0.3])
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(probabilities), dtype=torch.float32).expand(1000, 4)
    draw = draw_tokens(logits, np.ones(1000, dtype=np.float32), (np.arange(1000) + 0.5) / 1000)
    assert np.bincount(draw.token_ids, minlength=4).tolist() == [200, 0, 500, 300]
    largest = draw_tokens(logits[:1], np.ones(1, dtype=np.float32), np.array([np.nextafter(1.0, 0.0)]))
    assert largest.token_ids.tolist() == [3]
    impossible_first = torch.tensor([[-torch.inf, 0.0]])
    assert draw_tokens(impossible_first, np.ones(1, dtype=np.float32), np.zeros(1)).token_ids.tolist() == [1]


def test_logits_that_are_not_finite_raise():
    with pytest.raises(FloatingPointError):
        draw_tokens(torch.tensor([[0.0, float("nan")]]), np.ones(1, dtype=np.float32), np.array([0.5]))


def test_a_stop_id_ends_the_response_and_is_part_of_it():
    model = tiny_model()
    (prompt,) = make_prompts(8)
    ids, _ = greedy_reference(plain_twin(model), prompt, 12)
    engine = TorchEngine(model, max_slots=1, max_context_tokens=64)
    stop = ids[5]
    engine.submit("a", prompt, Sampling(temperature=0.0, max_new_tokens=12, stop_ids=(VOCABULARY - 1, stop)), "act")
    generation = drain(engine)["a"]
    assert generation.token_ids.tolist() == ids[: ids.index(stop) + 1]
    assert generation.finish_reason == "stop"
    engine.submit("b", prompt, GREEDY, "act")
    assert drain(engine)["b"].token_ids.tolist() == ids


@pytest.mark.parametrize("prefill_tokens_per_step", [7, 2048])
def test_tokens_around_a_weight_load_match_the_weights_of_their_version(prefill_tokens_per_step):
    models = [tiny_model(seed=0), tiny_model(seed=1)]
    twins = [plain_twin(model) for model in models]
    engine = TorchEngine(models[0], max_slots=4, max_context_tokens=64, prefill_tokens_per_step=prefill_tokens_per_step)
    prompts = make_prompts(3, 12, 25)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, Sampling(temperature=1.0, max_new_tokens=20, seed=index), "act")
    for _ in range(12):
        assert engine.step() == []
    engine.load_weights(1, weights_of(models[1]))
    finished = drain(engine)
    for index, prompt in enumerate(prompts):
        generation = finished[str(index)]
        assert sorted(set(generation.versions.tolist())) == [0, 1]
        assert (np.diff(generation.versions) >= 0).all()
        by_version = [score_reference(twin, prompt, generation.token_ids) for twin in twins]
        expected = np.where(generation.versions == 0, *by_version)
        assert np.abs(generation.logprobs - expected).max() < 1e-4
        assert np.abs(by_version[0] - by_version[1]).max() > 0.1


def test_no_prefix_that_old_weights_cached_is_used_after_a_weight_load():
    models = [tiny_model(seed=0), tiny_model(seed=1)]
    engine = TorchEngine(models[0], max_slots=2, max_context_tokens=64)
    (prompt,) = make_prompts(30)
    engine.submit("old", prompt, GREEDY, "act")
    drain(engine)
    engine.load_weights(1, weights_of(models[1]))
    engine.submit("new", prompt, GREEDY, "act")
    generation = drain(engine)["new"]
    assert generation.cached_tokens == 0
    ids, scores = greedy_reference(plain_twin(models[1]), prompt, 12)
    assert generation.token_ids.tolist() == ids
    assert np.abs(generation.logprobs - scores).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_reuses_its_earlier_turns_and_stays_exact(family):
    model = tiny_model(family)
    twin = plain_twin(model)
    engine = TorchEngine(model, max_slots=3, max_context_tokens=128)
    prompts = dict(zip("ab", make_prompts(20, 14), strict=True))
    expected_total = 0
    for turn in range(3):
        for name, prompt in prompts.items():
            engine.submit(name, prompt, Sampling(temperature=0.0, max_new_tokens=6), "act")
        finished = drain(engine)
        for name, generation in finished.items():
            ids, scores = greedy_reference(twin, prompts[name], 6)
            assert generation.token_ids.tolist() == ids
            assert np.abs(generation.logprobs - scores).max() < 1e-4
            # The last token of a turn was sampled but never computed.
            assert generation.cached_tokens == (0 if turn == 0 else prompts[name].size - 5 - 1)
            expected_total += generation.cached_tokens
            (words,) = make_prompts(5, seed=turn)
            prompts[name] = np.concatenate([prompts[name], generation.token_ids, words])
    assert engine.health().cached_tokens == expected_total


def test_a_repeated_prompt_computes_only_its_last_token():
    engine = TorchEngine(tiny_model(), max_slots=2, max_context_tokens=64)
    (prompt,) = make_prompts(30)
    engine.submit("a", prompt, GREEDY, "act")
    first = drain(engine)["a"]
    prefilled = engine.health().prefilled_tokens
    engine.submit("b", prompt, GREEDY, "act")
    second = drain(engine)["b"]
    assert (first.cached_tokens, second.cached_tokens) == (0, 29)
    assert engine.health().prefilled_tokens == prefilled + 1
    assert second.token_ids.tolist() == first.token_ids.tolist()


def test_a_request_that_shares_only_an_opening_copies_it_and_leaves_the_dialogue_cached():
    model = tiny_model()
    twin = plain_twin(model)
    engine = TorchEngine(model, max_slots=2, max_context_tokens=64)
    opening, tail, other = make_prompts(8, 24, 24)
    dialogue, stranger = np.concatenate([opening, tail]), np.concatenate([opening, other])
    engine.submit("dialogue", dialogue, GREEDY, "act")
    drain(engine)
    engine.submit("stranger", stranger, GREEDY, "act")
    generation = drain(engine)["stranger"]
    assert generation.cached_tokens == 8
    assert generation.token_ids.tolist() == greedy_reference(twin, stranger, 12)[0]
    engine.submit("again", dialogue, GREEDY, "act")
    generation = drain(engine)["again"]
    assert generation.cached_tokens == dialogue.size - 1
    assert generation.token_ids.tolist() == greedy_reference(twin, dialogue, 12)[0]


def test_a_prefix_of_a_request_that_is_still_running_is_shared():
    model = tiny_model()
    engine = TorchEngine(model, max_slots=2, max_context_tokens=64)
    (prompt,) = make_prompts(20)
    engine.submit("first", prompt, GREEDY, "act")
    engine.step()
    engine.submit("second", prompt, GREEDY, "act")
    finished = drain(engine)
    assert finished["second"].cached_tokens == 19
    expected = greedy_reference(plain_twin(model), prompt, 12)[0]
    assert finished["first"].token_ids.tolist() == finished["second"].token_ids.tolist() == expected


def test_of_two_equal_prefixes_the_free_slot_is_continued_rather_than_the_running_one_copied():
    engine = TorchEngine(tiny_model(), max_slots=3, max_context_tokens=64)
    bystander, prompt = make_prompts(15, 20)
    one = Sampling(temperature=0.0, max_new_tokens=1)
    engine.submit("running", prompt, Sampling(temperature=0.0, max_new_tokens=40), "act")
    # The bystander's slot is the least recently used: a copy would go there.
    for name, ids in (("bystander", bystander), ("finished", prompt), ("again", prompt)):
        engine.submit(name, ids, one, "act")
        engine.step()
    engine.submit("same bystander", bystander, one, "act")
    assert drain(engine)["same bystander"].cached_tokens == bystander.size - 1


def test_the_least_recently_used_free_slot_is_given_up_first():
    engine = TorchEngine(tiny_model(), max_slots=2, max_context_tokens=64)
    a, b, c = make_prompts(20, 21, 22)
    for prompt in (a, b, a, c):
        engine.submit("x", prompt, GREEDY, "act")
        drain(engine)
    engine.submit("x", a, GREEDY, "act")
    assert drain(engine)["x"].cached_tokens == a.size - 1
    engine.submit("x", b, GREEDY, "act")
    assert drain(engine)["x"].cached_tokens == 0
