"""The vLLM engine scores given tokens between two steps, and refuses weights by it that it has not taken over."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from structlog import wrap_logger
from structlog.testing import LogCapture

from seed_async.actors.weight_loader import WeightLoader
from seed_async.messages import Canary
from seed_async.metrics import Metrics
from seed_async.ports import Generation, Sampling
from seed_async.weights import SegmentSource, SegmentStore, WeightReceiver
from seed_async.weights.canary import canary_gap_nats
from tests.fakes.weight_link import HeardLink
from tests.reference.engines import drain, make_prompts, needs_vllm
from tests.reference.generate_reference import VOCABULARY, plain_twin, score_reference, weights_of
from tests.reference.vllm_checks import CANARY, CONTEXT, NUM_SLOTS, TOLERANCE, logprobs_after, model

pytestmark = needs_vllm


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
