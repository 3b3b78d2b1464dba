"""Adapters in the torch engine: it computes what the learner does, at the adapters that it says it used."""

import numpy as np
import pytest
import torch

from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.learner.scoring import load_policy, score_canary
from seed_async.ports import Sampling
from seed_async.topology import Lora
from seed_async.weights.canary import canary_gap_nats, canary_text
from tests.reference.engines import drain, make_prompts
from tests.reference.generate_reference import (
    FAMILIES,
    VOCABULARY,
    add_random_adapters,
    plain_twin,
    score_reference,
    tiny_model,
    weights_of,
)

LORA = Lora(rank=3, alpha=6)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def open_adapted(folder, family: str = "llama", *, tied: bool = False, lora: Lora = LORA) -> TorchEngine:
    tiny_model(family, tied=tied).save_pretrained(folder)
    return TorchEngine(load_model(folder, lora=lora), max_slots=4, max_context_tokens=64)


@pytest.mark.parametrize(("family", "tied"), [(family, family == "qwen2") for family in FAMILIES])
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_published_adapters_give_what_the_learner_computes_to_the_bit(tmp_path, family, tied, targets):
    """No merging, no rounding: the same products."""
    lora = LORA.model_copy(update={"targets": targets})
    engine, text = open_adapted(tmp_path, family, tied=tied, lora=lora), canary_text(VOCABULARY)
    learner = load_policy(tmp_path)
    plain = score_canary(learner, "float32")
    assert canary_gap_nats(plain.logprobs, engine.score(*text)) == 0
    engine.load_weights(1, add_random_adapters(learner, lora, seed=1))
    adapted = score_canary(learner, "float32")
    assert canary_gap_nats(adapted.logprobs, engine.score(*text)) == 0
    assert canary_gap_nats(plain.logprobs, np.array(adapted.logprobs)) > 0.1


def test_tokens_around_new_adapters_match_those_of_their_version(tmp_path):
    engine, twins = open_adapted(tmp_path), [plain_twin(tiny_model()) for _ in range(2)]
    versions = [add_random_adapters(twin, LORA, seed) for seed, twin in enumerate(twins)]
    engine.load_weights(1, versions[0])
    prompts = make_prompts(3, 12, 25)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, Sampling(temperature=1.0, max_new_tokens=20, seed=index), "act")
    for _ in range(12):
        assert engine.step() == []
    engine.load_weights(2, versions[1])
    finished = drain(engine)
    for index, prompt in enumerate(prompts):
        generation = finished[str(index)]
        assert sorted(set(generation.versions.tolist())) == [1, 2]
        by_version = [score_reference(twin, prompt, generation.token_ids) for twin in twins]
        expected = np.where(generation.versions == 1, *by_version)
        assert np.abs(generation.logprobs - expected).max() < 1e-4
        assert np.abs(by_version[0] - by_version[1]).max() > 0.1


def test_what_does_not_fit_the_adapters_is_refused_and_the_old_ones_stay_whole(tmp_path):
    engine, text = open_adapted(tmp_path), canary_text(VOCABULARY)
    good = add_random_adapters(plain_twin(tiny_model()), LORA, seed=1)
    engine.load_weights(1, good)
    before, bad = engine.score(*text), add_random_adapters(plain_twin(tiny_model()), LORA, seed=2)
    name = next(reversed(bad))
    for tensors, error in (
        ({key: value for key, value in bad.items() if key != name}, KeyError),
        (bad | {"base_model.model.stranger.lora_A.weight": bad[name]}, KeyError),
        (bad | {name: bad[name][:-1]}, ValueError),
        (bad | {name: bad[name].astype(np.float64)}, ValueError),
        (weights_of(tiny_model()), KeyError),
    ):
        with pytest.raises(error):
            engine.load_weights(2, tensors)
        assert np.array_equal(engine.score(*text), before) and engine.health().version == 1
