"""The torch engine with images: what a plain transformers loop gives, in any mix, with prefixes, across new weights."""

import numpy as np
import pytest
import torch

from seed_async.actors.engines.images import ImageReader, open_reader
from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.learner.scoring import load_policy
from seed_async.ports import Generation, Sampling
from tests.reference.engines import drain
from tests.reference.generate_reference import tiny_model, weights_of
from tests.reference.vision_models import (
    FAMILIES,
    PLACEHOLDER,
    check_greedy,
    image_processor,
    picture,
    prompt_with_images,
    submit_greedy,
    tiny_vision_model,
    vision_scores,
    vision_twin,
    write_vision_model,
)

SMALL, WIDE, TALL = picture(16, 16, seed=1), picture(41, 17, seed=2), picture(15, 47, seed=3, kind="JPEG")
PROMPTS = [
    (prompt_with_images(9, seed=1), []),
    (prompt_with_images("image", 5, seed=2), [SMALL]),
    (prompt_with_images(7, "image", 3, seed=3), [WIDE]),
    (prompt_with_images(2, "image", 4, "image", 2, seed=4), [TALL, SMALL]),
    (prompt_with_images(3, "image", "image", seed=5), [WIDE, WIDE]),
    (prompt_with_images(20, seed=6), []),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def make_engine(model, max_slots: int = 3, context: int = 96, **options) -> TorchEngine:
    reader = ImageReader(PLACEHOLDER, image_processor())
    return TorchEngine(model, max_slots=max_slots, max_context_tokens=context, image_reader=reader, **options)


def answer(engine: TorchEngine, prompt: np.ndarray, images: list[bytes], num_tokens: int) -> Generation:
    name = submit_greedy(engine, prompt, images, num_tokens)
    return drain(engine)[name]


def check(generation: Generation, twin, prompt: np.ndarray, images: list[bytes], num_tokens: int) -> None:
    assert generation.token_ids.size == num_tokens
    check_greedy(twin, prompt, images, generation.token_ids, generation.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefill_tokens_per_step", [5, 2048])
def test_greedy_responses_equal_a_plain_loop_in_any_mix_of_texts_and_images(family, prefill_tokens_per_step):
    model = tiny_vision_model(family)
    twin = vision_twin(model)
    engine = make_engine(model, prefill_tokens_per_step=prefill_tokens_per_step)
    rng = np.random.default_rng(prefill_tokens_per_step)
    asked, finished = {}, {}
    for index in rng.permutation(len(PROMPTS)).tolist():
        asked[submit_greedy(engine, *PROMPTS[index], 4)] = index
        for _ in range(rng.integers(0, 4)):
            finished.update((each.request_id, each) for each in engine.step())
    finished.update(drain(engine))
    for name, index in asked.items():
        check(finished[name], twin, *PROMPTS[index], 4)
    assert not engine._vision._features, "nothing is kept for requests that have ended"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_loads_with_the_names_that_the_learner_publishes(family, tmp_path):
    write_vision_model(tmp_path, tiny_vision_model(family))
    model, learner = load_model(tmp_path), load_policy(tmp_path)
    assert dict(model.named_parameters()).keys() == dict(learner.named_parameters()).keys()
    engine = TorchEngine(model, max_slots=1, max_context_tokens=96, image_reader=open_reader(tmp_path))
    new = tiny_vision_model(family, seed=1)
    learner.load_state_dict(new.state_dict())
    engine.load_weights(1, weights_of(learner))
    check(answer(engine, *PROMPTS[3], 4), vision_twin(new), *PROMPTS[3], 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_reuses_what_came_before_its_new_image(family):
    model = tiny_vision_model(family)
    twin = vision_twin(model)
    engine = make_engine(model)
    embedded = []
    model.base_model.visual.register_forward_pre_hook(lambda *_: embedded.append(1))
    prompt, images = prompt_with_images(4, "image", 3), [WIDE]
    cached = []
    for turn, image in enumerate((SMALL, TALL)):
        generation = answer(engine, prompt, images, 5)
        check(generation, twin, prompt, images, 5)
        cached.append(generation.cached_tokens)
        words = prompt_with_images(2, "image", 2, seed=turn)
        prompt, images = np.concatenate([prompt, generation.token_ids, words]), [*images, image]
    # The first prompt's words, marks and ten positions, and what was sampled but its last token.
    assert cached == [0, 4 + 2 + 10 + 3 + 4]
    assert len(embedded) == 2, "each image once"


@pytest.mark.parametrize("family", FAMILIES)
def test_two_prompts_that_differ_in_an_image_only_share_what_comes_before_it(family):
    model = tiny_vision_model(family)
    twin = vision_twin(model)
    engine = make_engine(model)
    prompt = prompt_with_images(6, "image", 5)
    answers = []
    for seed in (1, 2):
        images = [picture(24, 16, seed=seed)]
        answers.append(answer(engine, prompt, images, 6))
        check(answers[-1], twin, prompt, images, 6)
        assert answers[-1].prompt_tokens == 6 + 2 + 6 + 5
    assert [answer.cached_tokens for answer in answers] == [0, 7]
    assert np.abs(answers[0].logprobs - answers[1].logprobs).max() > 0.01, "the image matters"


def test_the_same_image_again_computes_only_the_last_token_and_no_features():
    model = tiny_vision_model("qwen2_5_vl")
    engine = make_engine(model)
    embedded = []
    model.base_model.visual.register_forward_pre_hook(lambda *_: embedded.append(1))
    prompt, images = PROMPTS[3]
    first, second = (answer(engine, prompt, images, 4) for _ in range(2))
    assert second.cached_tokens == second.prompt_tokens - 1 and len(embedded) == 2
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_a_prompt_that_ends_with_an_image_is_continued_from_within_it():
    """Its last position is computed anew, and needs the features of the whole image."""
    model = tiny_vision_model("qwen3_vl")
    twin = vision_twin(model)
    engine = make_engine(model)
    prompt = prompt_with_images(4, "image")[:-1]
    for cached in (0, 4 + 1 + 10 - 1):
        generation = answer(engine, prompt, [WIDE], 5)
        assert generation.cached_tokens == cached
        check(generation, twin, prompt, [WIDE], 5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 9])
def test_running_requests_see_their_images_with_the_new_vision_tower(family, steps):
    """After one step a prompt is half prefilled, after nine some tokens are sampled; only the tower changes."""
    model = tiny_vision_model(family)
    other = tiny_vision_model(family, seed=1)
    new = weights_of(model) | {name: value for name, value in weights_of(other).items() if ".visual." in name}
    twins = [vision_twin(model), vision_twin(model)]
    with torch.no_grad():
        for name, parameter in twins[1].named_parameters():
            parameter.copy_(torch.from_numpy(new[name]))
    engine = make_engine(model, prefill_tokens_per_step=8)
    prompt, images = PROMPTS[3]
    engine.submit("a", prompt, Sampling(temperature=1.0, max_new_tokens=10, seed=3), "act", images)
    for _ in range(steps):
        assert engine.step() == []
    engine.load_weights(1, new)
    generation = drain(engine)["a"]
    by_version = [vision_scores(twin, prompt, images, generation.token_ids) for twin in twins]
    expected = np.where(generation.versions == 0, *by_version)
    assert set(generation.versions.tolist()) == ({1} if steps == 1 else {0, 1})
    assert np.abs(generation.logprobs - expected).max() < 1e-4
    assert np.abs(by_version[0] - by_version[1]).max() > 0.01
    check(answer(engine, prompt, images, 4), twins[1], prompt, images, 4)


def test_a_request_that_is_cancelled_between_two_chunks_leaves_no_features():
    engine = make_engine(tiny_vision_model("qwen2_vl"), prefill_tokens_per_step=4)
    name = submit_greedy(engine, *PROMPTS[2], 4)
    for _ in range(3):
        engine.step()
    assert engine._vision._features
    engine.cancel(name)
    other = submit_greedy(engine, *PROMPTS[0], 1)
    assert drain(engine).keys() == {name, other}
    assert not engine._vision._features


def test_texts_are_computed_as_without_an_image_processor():
    """Bit by bit."""
    model = tiny_vision_model("qwen3_vl")
    engines = make_engine(model), TorchEngine(model, max_slots=3, max_context_tokens=96)
    for engine in engines:
        for index in (0, 5):
            engine.submit(str(index), PROMPTS[index][0], Sampling(temperature=1.0, max_new_tokens=9, seed=1), "act")
    with_images, without = map(drain, engines)
    for index in ("0", "5"):
        assert with_images[index].token_ids.tolist() == without[index].token_ids.tolist()
        assert with_images[index].logprobs.tolist() == without[index].logprobs.tolist()


def test_given_texts_are_scored_while_a_request_with_images_runs():
    """As the canary is: the request goes on as if nothing had been."""
    model = tiny_vision_model("qwen3_vl")
    twin = vision_twin(model)
    engine = make_engine(model, prefill_tokens_per_step=8)
    name = submit_greedy(engine, *PROMPTS[3], 4)
    engine.step()
    prompt, response = PROMPTS[5][0], PROMPTS[0][0]
    assert np.abs(engine.score(prompt, response) - vision_scores(twin, prompt, [], response)).max() < 1e-4
    check(drain(engine)[name], twin, *PROMPTS[3], 4)


def test_vision_models_of_other_families_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ValueError, match="'llava' takes images, but only qwen2_vl, qwen2_5_vl, qwen3_vl are served"):
        load_model(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    assert load_model(tmp_path) and open_reader(tmp_path) is None
