"""The vLLM engine samples what the torch engine and plain transformers do, at the weights that it says it used."""

import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from structlog import wrap_logger
from structlog.testing import LogCapture

from seed_async.actors.engines.opening import open_engine, prepare_vllm
from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.actors.weight_loader import WeightLoader
from seed_async.messages import Canary
from seed_async.metrics import Metrics
from seed_async.ports import Engine, Generation, RequestRefusedError, Sampling
from seed_async.topology import Lora
from seed_async.topology_roles import Policy, VllmOptions
from seed_async.weights import SegmentSource, SegmentStore, WeightReceiver
from seed_async.weights.canary import canary_gap_nats, canary_text
from tests.fakes.chat import save_tokenizer
from tests.fakes.weight_link import HeardLink
from tests.reference.engines import HEAD_DIM, drain, make_prompts, needs_vllm
from tests.reference.generate_reference import (
    VOCABULARY,
    add_random_adapters,
    plain_twin,
    score_reference,
    tiny_model,
    weights_of,
)

pytestmark = needs_vllm
CONTEXT = 1600
NUM_SLOTS = 32
TOLERANCE = 1e-4
"""Nats: float32 sums in another order. Stale weights or keys move log-probs by more than a hundred times as much."""


CANARY = canary_text(VOCABULARY)


def model(seed: int = 0, *, tied: bool = False):
    return tiny_model(seed=seed, tied=tied, head_dim=HEAD_DIM, context=CONTEXT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        model(tied=tied).save_pretrained(folder / str(tied))
        save_tokenizer(folder / str(tied))
    return folder


@pytest.fixture(scope="module")
def opened():
    """The engines of this process. vLLM's share their process groups: the first that is closed ends them all."""
    opened: dict[tuple[object, ...], Engine] = {}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="module")
def open_vllm(folders, opened):
    """Opens engines, once each; a test finds one idle, without a prefix, at the weights of seed 0.

    One with adapters is for one test.
    """
    prepare_vllm(threads=1)
    from tests.fakes.vllm_engines import open_variant

    def open_one(
        variant: str = "whole",
        *,
        tied: bool = False,
        max_slots: int = NUM_SLOTS,
        lora: Lora | None = None,
        **options,
    ) -> Engine:
        key = (variant, tied, max_slots, lora, *options.items())
        if key not in opened:
            opened[key] = open_variant(
                variant,
                folders / str(tied),
                max_slots=max_slots,
                max_context_tokens=CONTEXT,
                options=VllmOptions(**{"kv_cache_gib": 1 / 16, **options}),
                lora=lora,
            )
        else:
            assert lora is None
            drain(opened[key])
            opened[key].load_weights(opened[key].health().version + 1, weights_of(model(tied=tied)))
        return opened[key]

    return open_one


def logprobs_after(twin, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Log-probs float64 [T, V] of what comes at each place of the response, all from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = twin(input_ids=ids, use_cache=False).logits[0, prompt.size - 1 : -1].double()
    return torch.log_softmax(logits, dim=-1).numpy()


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


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_around_a_weight_load_match_the_weights_of_their_version(open_vllm, tied):
    before, after = update_in_flight(open_vllm(tied=tied), tied=tied)
    assert before < TOLERANCE and after < TOLERANCE


@pytest.mark.parametrize("lora", [Lora(rank=5, alpha=10), Lora(rank=8, targets=("q_proj", "down_proj"))])
def test_tokens_around_new_adapters_match_those_of_their_version(open_vllm, lora):
    """All linear layers, or one of three that vLLM packs; a rank that vLLM has no room of the size for."""
    engine = open_vllm(tied=True, max_slots=8, lora=lora)
    before, after = update_in_flight(engine, tied=True, lora=lora, num_slots=8)
    assert before < TOLERANCE and after < TOLERANCE
    twin = plain_twin(model(tied=True))
    engine.load_weights(engine.health().version + 1, add_random_adapters(twin, lora, seed=2))
    assert np.abs(engine.score(*CANARY) - score_reference(twin, *CANARY)).max() < TOLERANCE
    with pytest.raises(KeyError, match=r"lora_A.*embed_tokens"):
        engine.load_weights(9, weights_of(model(tied=True)))


@pytest.mark.parametrize("adapters", [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (1, 1, 1, 2, 2)])
def test_tokens_of_one_adapter_and_of_two_get_what_vllms_own_products_give_them(adapters):
    prepare_vllm(threads=1)
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from seed_async.actors.engines.vllm_cpu import OneAdapterWrapper

    torch.manual_seed(0)
    x, y = torch.randn(5, 6), torch.randn(5, 7)
    down, up = [torch.randn(2, 1, 3, 6) for _ in range(2)], [torch.randn(2, 1, size, 3) for size in (4, 3)]
    outputs = []
    for kind in (PunicaWrapperCPU, OneAdapterWrapper):
        wrapper, output = kind(16, 8, "cpu"), y.clone()
        wrapper.update_metadata(LoRAMapping(adapters, adapters, is_prefill=True), [1, 2], 3, VOCABULARY)
        wrapper.add_lora_linear(output, x, tuple(down), tuple(up), 0.5, (4, 3))
        outputs.append(output)
    torch.testing.assert_close(*outputs)
    assert (outputs[0] != y).all()


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
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="attention heads of 8"):
        open_engine(Policy(engine="vllm"), tmp_path, max_context_tokens=64)


def test_the_factory_opens_the_engine_of_the_topology(open_vllm, opened, folders):
    policy = Policy(engine="vllm", max_slots=2, vllm=VllmOptions(kv_cache_gib=1 / 128))
    engine = opened["factory",] = open_engine(policy, folders / "True", max_context_tokens=32, version=-1)
    assert type(engine) is type(open_vllm()) and engine.health().version == -1
    assert engine.score(*CANARY).shape == (16,), "though the canary is longer than its context"
    assert isinstance(open_engine(Policy(max_slots=2), folders / "True", max_context_tokens=64), TorchEngine)


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


def canary_gap(engine, twin) -> float:
    return canary_gap_nats(score_reference(twin, *CANARY), engine.score(*CANARY))


def test_scores_are_those_of_plain_transformers_in_float32_and_near_them_in_bfloat16(open_vllm):
    # Small steps prefill the text in pieces. Nothing of it is taken from the cache that its first round has filled.
    for options in ({}, {"max_num_batched_tokens": 64}, {"tied": True}):
        engine = open_vllm(**options)
        for seed in (1, 0):
            engine.load_weights(engine.health().version + 1, weights_of(model(seed, tied=options.get("tied", False))))
            before, twin = engine.health(), plain_twin(model(seed, tied=options.get("tied", False)))
            assert max(canary_gap(engine, twin) for _ in range(2)) < TOLERANCE
            prompt, response = np.split(*make_prompts(300), [200])
            assert np.abs(engine.score(prompt, response) - score_reference(twin, prompt, response)).max() < TOLERANCE
            assert engine.health() == before
    gap = canary_gap(open_vllm(tied=True, dtype="bfloat16"), plain_twin(model(tied=True)))
    assert TOLERANCE < gap < 0.5, "the default of weights.canary_tolerance"


def test_scoring_disturbs_none_of_32_requests_that_run(open_vllm):
    engine, twin = open_vllm(), plain_twin(model())
    prompts = make_prompts(*np.random.default_rng(6).integers(3, 200, NUM_SLOTS + 8).tolist(), seed=6)

    def play(loads: bool, scores: bool) -> dict[str, Generation]:
        for index, prompt in enumerate(prompts):
            sampling = Sampling(temperature=index % 2, max_new_tokens=20 + index, seed=index)
            engine.submit(str(index), prompt, sampling, "act")
        finished: dict[str, Generation] = {}
        for _ in range(4):
            finished.update((each.request_id, each) for _ in range(4) for each in engine.step())
            if loads:
                engine.load_weights(engine.health().version + 1, weights_of(model()))
            before = engine.health()
            assert before.running == NUM_SLOTS
            if scores:
                assert canary_gap(engine, twin) < TOLERANCE
                after = engine.health()
                # Requests that hold no keys need not be prefilled again for it.
                assert after == before if loads else after.prefilled_tokens > before.prefilled_tokens
                assert (after.running, after.generated_tokens) == (before.running, before.generated_tokens)
        return finished | drain(engine)

    expected = play(loads=False, scores=False)
    for loads in (False, True):
        found = play(loads, scores=True)
        assert {name: each.token_ids.tolist() for name, each in found.items()} == {
            name: each.token_ids.tolist() for name, each in expected.items()
        }
        assert all(np.abs(each.logprobs - expected[name].logprobs).max() < TOLERANCE for name, each in found.items())


def test_what_goes_wrong_while_scoring_leaves_every_request_as_it_was(open_vllm):
    from tests.fakes.vllm_engines import scorer_of

    engine = open_vllm()
    prompts, sampling = make_prompts(40, 50, 60), Sampling(temperature=0.0, max_new_tokens=8)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, sampling, "act")
    engine.step()
    with pytest.raises(RuntimeError, match="3 of vLLM's 3 requests are not in its queue"):
        scorer_of(engine).score(np.concatenate(CANARY).tolist())
    with pytest.raises(ValueError, match="1610 tokens cannot be scored"):
        engine.score(*make_prompts(CONTEXT, 10))
    with pytest.raises(RuntimeError, match="stumbled"):
        scorer_of(engine, stumbles=True).score(np.concatenate(CANARY).tolist())
    assert canary_gap(engine, plain_twin(model())) < TOLERANCE
    finished = drain(engine)
    for index, prompt in enumerate(prompts):
        token_ids = finished[str(index)].token_ids
        assert token_ids.tolist() == logprobs_after(plain_twin(model()), prompt, token_ids).argmax(axis=1).tolist()


def test_the_engine_core_stays_in_this_process_whatever_the_environment_said(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prepare_vllm(threads=1)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_vllm_whose_scheduler_is_not_the_known_one_is_refused(open_vllm):
    from seed_async.actors.engines.vllm_scoring import SoloScorer

    with pytest.raises(RuntimeError, match="VLLM_ENABLE_V1_MULTIPROCESSING must be 0"):
        SoloScorer(SimpleNamespace(engine_core=None))
    other = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler={})))
    with pytest.raises(RuntimeError, match="dict is not the scheduler"):
        SoloScorer(other)


def test_the_canary_refuses_a_version_that_the_output_layer_has_not_taken_over(open_vllm, tmp_path):
    store, tolerance_nats = SegmentStore(tmp_path), 1e-3  # the default in float32

    def update(version: int, seed: int, scale: float = 1.0):
        new = model(seed, tied=True)
        canary = Canary(vocabulary=VOCABULARY, logprobs=tuple(score_reference(plain_twin(new), *CANARY).tolist()))
        tensors = {name: tensor * np.float32(scale) for name, tensor in weights_of(new).items()}
        return msgspec.structs.replace(store.stage(version, tensors), canary=canary), tensors

    (prompt,) = make_prompts(60)
    for variant, wrong in (("keeps packed head", {"seed": 1}), ("whole", {"seed": 1, "scale": np.nan})):
        engine, metrics, link, log = open_vllm(variant, tied=True), Metrics("policy", "0"), HeardLink(), LogCapture()
        receiver = WeightReceiver(link, SegmentSource(), "policy-0:1", "policy")
        logger = wrap_logger(None, processors=[log])
        loader = WeightLoader(engine, receiver, "policy-0", tolerance_nats, metrics, logger)
        old = engine.health().version + 1
        assert loader.load(update(old, seed=0))
        assert 0 < metrics.registry.get_sample_value("seed_async_canary_gap_nats") < TOLERANCE < tolerance_nats
        engine.submit("runs", prompt, Sampling(temperature=0.0, max_new_tokens=8), "act")
        engine.step()
        refused = update(old + 1, **wrong)
        assert not loader.load(refused)
        (alarm,) = [line for line in log.entries if line["log_level"] == "error"]
        assert (alarm["engine"], alarm["version"], alarm["serves"]) == ("policy-0", old + 1, old)
        assert alarm["gap_nats"] > 100 * tolerance_nats
        assert (link.heard.version, link.heard.refused, link.heard.refusal) == (old, refused[0].key, "canary")
        done = drain(engine)["runs"]
        likeliest = logprobs_after(plain_twin(model(tied=True)), prompt, done.token_ids).argmax(axis=1)
        assert done.token_ids.tolist() == likeliest.tolist() and set(done.versions.tolist()) == {old}
    assert loader.load(update(old + 2, seed=1)) and link.heard.version == old + 2
