"""The vLLM engine samples what the torch engine and plain transformers do, at the weights that it says it used."""

import os

import numpy as np
import pytest
import torch

from seed_async.actors.engines.opening import open_engine, prepare_vllm
from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import Engine, Generation, RequestRefusedError, Sampling
from seed_async.topology_roles import Policy, VllmOptions
from tests.fakes.chat import tiny_chat
from tests.reference.engines import drain, make_prompts, needs_vllm
from tests.reference.generate_reference import VOCABULARY, plain_twin, score_reference, tiny_model, weights_of
from tests.reference.vllm_checks import (
    CANARY,
    CONTEXT,
    NUM_SLOTS,
    TOLERANCE,
    logprobs_after,
    model,
    update_in_flight,
)

pytestmark = needs_vllm


def play(engine: Engine, prompts: list[np.ndarray], order: np.ndarray, lengths: np.ndarray) -> dict[str, Generation]:
    """Submit the prompts in `order`, a few at a time with steps in between."""
    rng = np.random.default_rng(5)
    finished: dict[str, Generation] = {}
    for index in order.tolist():
        engine.submit(str(index), prompts[index], Sampling(temperature=0, max_new_tokens=int(lengths[index])), "act")
        for _ in range(int(rng.integers(0, 3))):
            finished.update((each.request_id, each) for each in engine.step())
    return finished | drain(engine)


def test_greedy_responses_of_200_prompts_equal_those_of_the_torch_engine_and_of_plain_transformers(open_vllm):
    rng = np.random.default_rng(0)
    prompts = make_prompts(*rng.integers(20, 1501, 200).tolist())
    lengths = rng.integers(4, 17, len(prompts))
    own = TorchEngine(model(), max_slots=NUM_SLOTS, max_context_tokens=CONTEXT)
    by_torch = play(own, prompts, rng.permutation(len(prompts)), lengths)
    by_vllm = play(open_vllm(), prompts, rng.permutation(len(prompts)), lengths)
    twin = plain_twin(model())
    gaps = []
    for index, prompt in enumerate(prompts):
        found = by_vllm[str(index)]
        assert found.token_ids.tolist() == by_torch[str(index)].token_ids.tolist()
        # Each token is the likeliest after the ones before it: this is the response of a plain greedy loop.
        expected = logprobs_after(twin, prompt, found.token_ids)
        assert found.token_ids.tolist() == expected.argmax(axis=1).tolist()
        assert found.token_ids.size == lengths[index]
        gaps.append(np.abs(found.logprobs - expected.max(axis=1)).max())
    print(f"\nlargest log-prob gap {max(gaps):.1e} over {lengths.sum()} tokens")
    assert max(gaps) < TOLERANCE


def test_sampled_responses_follow_their_seed_alone_and_their_log_probs_the_temperature(open_vllm):
    engine = open_vllm()
    prompts = make_prompts(5, 40, 90)
    samplings = [Sampling(temperature=t, max_new_tokens=10, seed=s) for t, s in ((0.7, 3), (1.0, 2**63 - 1), (1.6, 5))]
    for index in (2, 0, 1):
        engine.submit(str(index), prompts[index], samplings[index], "act")
    engine.submit("greedy", prompts[1], Sampling(temperature=0.0, max_new_tokens=20), "evaluate")
    mixed = drain(engine)
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.submit("alone", prompt, sampling, "act")
        assert drain(engine)["alone"].token_ids.tolist() == mixed[str(index)].token_ids.tolist()
        scores = score_reference(plain_twin(model()), prompt, mixed[str(index)].token_ids, sampling.temperature)
        assert np.abs(mixed[str(index)].logprobs - scores).max() < TOLERANCE
    other = Sampling(temperature=1.0, max_new_tokens=10, seed=1)
    engine.submit("other seed", prompts[1], other, "act")
    assert drain(engine)["other seed"].token_ids.tolist() != mixed["1"].token_ids.tolist()


def test_draws_follow_the_distribution(open_vllm):
    engine = open_vllm()
    (prompt,) = make_prompts(12)
    for seed in range(900):
        engine.submit(str(seed), prompt, Sampling(temperature=1.0, max_new_tokens=1, seed=seed), "act")
    drawn = np.bincount([each.token_ids[0] for each in drain(engine).values()], minlength=VOCABULARY)
    expected = 900 * np.exp(logprobs_after(plain_twin(model()), prompt, np.zeros(1))[0])
    likely = expected >= 5
    statistic = ((drawn - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < likely.sum() + 4 * np.sqrt(2 * likely.sum())  # chi-squared: mean k, variance 2k


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_around_a_weight_load_match_the_weights_of_their_version(open_vllm, tied):
    before, after = update_in_flight(open_vllm(tied=tied), tied=tied)
    assert before < TOLERANCE and after < TOLERANCE


def test_without_emptying_the_cache_tokens_would_come_from_two_versions(open_vllm):
    engine = open_vllm("keeps prefixes")
    before, after = update_in_flight(engine)
    assert before < TOLERANCE and after > 100 * TOLERANCE


def test_no_prefix_that_old_weights_cached_is_used_after_a_weight_load(open_vllm):
    (prompt,) = make_prompts(100)
    cached, gaps = [], []
    for variant in ("whole", "keeps prefixes"):
        engine = open_vllm(variant)
        engine.load_weights(engine.health().version + 1, weights_of(model()))
        for name, seed in (("old", 0), ("new", 1)):
            engine.load_weights(engine.health().version + 1, weights_of(model(seed)))
            engine.submit(name, prompt, Sampling(temperature=0.0, max_new_tokens=6), "act")
            done = drain(engine)[name]
        cached.append(done.cached_tokens)
        expected = logprobs_after(plain_twin(model(1)), prompt, done.token_ids)[np.arange(6), done.token_ids]
        gaps.append(np.abs(done.logprobs - expected).max())
    assert cached == [0, 96]
    assert gaps[0] < TOLERANCE and gaps[1] > 100 * TOLERANCE


def test_without_packing_the_output_layer_again_tied_embeddings_would_stay_old_there(open_vllm):
    before, after = update_in_flight(open_vllm("keeps packed head", tied=True), tied=True)
    assert before < TOLERANCE and after > 100 * TOLERANCE


def test_a_dialogue_reuses_whole_blocks_of_its_earlier_turns_and_stays_exact(open_vllm):
    engine, twin = open_vllm(), plain_twin(model())
    (prompt,) = make_prompts(70)
    before = engine.health().cached_tokens
    cached = []
    for turn in range(3):
        engine.submit("turn", prompt, Sampling(temperature=0.0, max_new_tokens=20), "act")
        done = drain(engine)["turn"]
        assert done.token_ids.tolist() == logprobs_after(twin, prompt, done.token_ids).argmax(axis=1).tolist()
        cached.append(done.cached_tokens)
        prompt = np.concatenate([prompt, done.token_ids, *make_prompts(15, seed=turn)])
    assert cached == [0, 64, 96] and engine.health().cached_tokens == before + sum(cached)


def test_weights_of_another_dtype_are_rounded_to_the_engines(open_vllm):
    engine = open_vllm(tied=True, dtype="bfloat16")
    (prompt,) = make_prompts(20)
    new = model(1, tied=True)
    bits = {name: value.detach().bfloat16().view(torch.uint16).numpy() for name, value in new.named_parameters()}
    responses = []
    for version, tensors in enumerate((weights_of(new), bits), start=1):
        engine.load_weights(version, tensors)
        engine.submit("a", prompt, Sampling(temperature=0.0, max_new_tokens=8), "act")
        responses.append(drain(engine)["a"])
    assert responses[0].token_ids.tolist() == responses[1].token_ids.tolist()
    assert np.array_equal(responses[0].logprobs, responses[1].logprobs)
    exact = logprobs_after(plain_twin(new), prompt, responses[0].token_ids)[np.arange(8), responses[0].token_ids]
    assert np.abs(responses[0].logprobs - exact).max() < 0.5


def test_what_vllm_would_change_or_fail_at_later_is_refused(open_vllm, tmp_path):
    with pytest.raises(RequestRefusedError, match=r"at least 0\.01"):
        open_vllm().submit("a", *make_prompts(3), Sampling(temperature=0.005, max_new_tokens=1), "act")
    tiny_model(head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attention heads of 8"):
        open_engine(Policy(engine="vllm"), tmp_path, tiny_chat(), max_context_tokens=64)


def test_the_factory_opens_the_engine_of_the_topology(open_vllm, opened, folders):
    policy = Policy(engine="vllm", max_slots=2, vllm=VllmOptions(kv_cache_gib=1 / 128))
    engine = opened[("factory",)] = open_engine(
        policy, folders / "True", tiny_chat(), max_context_tokens=32, version=-1
    )
    assert type(engine) is type(open_vllm()) and engine.health().version == -1
    assert engine.score(*CANARY).shape == (16,), "though the canary is longer than its context"
    assert isinstance(
        open_engine(Policy(max_slots=2), folders / "True", tiny_chat(), max_context_tokens=64), TorchEngine
    )


def test_prompts_that_are_prefilled_in_many_steps_sample_the_same_with_and_without_company(open_vllm):
    small, large = open_vllm(max_num_batched_tokens=64), open_vllm()
    prompts = make_prompts(300, 150, 90, 10, seed=3)
    responses = []
    for engine in (small, large):
        for index, prompt in enumerate(prompts):
            engine.submit(str(index), prompt, Sampling(temperature=1.0, max_new_tokens=12, seed=index), "act")
        responses.append(drain(engine))
    for index, prompt in enumerate(prompts):
        chunked, whole = (finished[str(index)] for finished in responses)
        assert chunked.token_ids.tolist() == whole.token_ids.tolist()
        assert (
            np.abs(chunked.logprobs - score_reference(plain_twin(model()), prompt, chunked.token_ids)).max() < TOLERANCE
        )


def test_requests_that_do_not_fit_into_the_cache_together_wait_and_end_as_they_would_alone(open_vllm):
    # Room for two contexts and a half: requests that grow beyond it are put back and prefilled again.
    tight, roomy = open_vllm(kv_cache_gib=2.6 * CONTEXT * 1024 / (1 << 30)), open_vllm()
    prompts = make_prompts(*[500] * 8, seed=4)
    responses = []
    for engine in (tight, roomy):
        for index, prompt in enumerate(prompts):
            engine.submit(str(index), prompt, Sampling(temperature=1.0, max_new_tokens=150, seed=index), "act")
        responses.append(drain(engine))
    assert [each.token_ids.size for each in responses[0].values()] == [150] * 8
    for index in range(8):
        assert responses[0][str(index)].token_ids.tolist() == responses[1][str(index)].token_ids.tolist()


def test_the_engine_core_stays_in_this_process_whatever_the_environment_said(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prepare_vllm(threads=1)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
