"""Either engine as a service: refusals, cancellation, fairness, bounded memory, weight loads that fail."""

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch

from seed_async.ports import Engine, Generation, RequestRefusedError, Sampling
from tests.reference.engines import BOTH_ENGINES, HEAD_DIM, Opener, TorchOpener, VllmOpener, drain
from tests.reference.generate_reference import VOCABULARY, greedy_reference, plain_twin, tiny_model, weights_of

PROMPT = np.arange(5, dtype=np.int32)
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=BOTH_ENGINES)
def opener(request, tmp_path_factory) -> Iterator[Opener]:
    if request.param == "torch":
        yield TorchOpener()
    else:
        opened = VllmOpener(tmp_path_factory.mktemp("models"))
        yield opened
        opened.close()


@pytest.fixture
def make_engine(opener):
    def make(max_slots: int = 2, max_context_tokens: int = 32, max_waiting: int = 4, **options) -> Engine:
        return opener(max_slots=max_slots, max_context_tokens=max_context_tokens, max_waiting=max_waiting, **options)

    return make


def model(seed: int = 0, *, tied: bool = False):
    return tiny_model(seed=seed, tied=tied, head_dim=HEAD_DIM)


def expected_ids(prompt: np.ndarray, num_tokens: int, seed: int = 0, *, tied: bool = False) -> list[int]:
    return greedy_reference(plain_twin(model(seed, tied=tied)), prompt, num_tokens)[0]


def run_steps(engine: Engine, num_steps: int) -> dict[str, Generation]:
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
def test_a_request_that_cannot_be_served_is_refused_with_its_reason_and_leaves_nothing(
    make_engine, prompt, changes, named
):
    engine = make_engine()
    with pytest.raises(RequestRefusedError, match=named):
        engine.submit("a", prompt, Sampling(**{"temperature": 1.0, "max_new_tokens": 4, **changes}), "act")
    assert engine.health().waiting == 0
    engine.submit("a", PROMPT, GREEDY, "act")
    assert run_steps(engine, 6)["a"].token_ids.size == 6


def test_a_text_model_takes_no_images(make_engine):
    engine = make_engine()
    with pytest.raises(RequestRefusedError, match="this model takes no images"):
        engine.submit("a", PROMPT, GREEDY, "act", [b"whatever it is"])
    assert engine.health().waiting == 0


def test_an_id_is_refused_while_it_is_open_and_free_again_after(make_engine):
    engine = make_engine()
    engine.submit("a", PROMPT, GREEDY, "act")
    with pytest.raises(RequestRefusedError, match="has not finished"):
        engine.submit("a", PROMPT, GREEDY, "act")
    run_steps(engine, 6)
    engine.submit("a", PROMPT, GREEDY, "act")


def test_the_waiting_queue_is_bounded(make_engine):
    engine = make_engine(max_waiting=3)
    for index in range(3):
        engine.submit(str(index), PROMPT, GREEDY, "act")
    with pytest.raises(RequestRefusedError, match="3 requests are waiting"):
        engine.submit("one more", PROMPT, GREEDY, "evaluate")
    engine.step()
    engine.submit("one more", PROMPT, GREEDY, "evaluate")


def test_a_thousand_requests_at_once_wait_their_turn_in_bounded_memory(make_engine):
    engine = make_engine(max_slots=8, max_waiting=1000)
    one = Sampling(temperature=0.0, max_new_tokens=1)
    before = psutil.Process().memory_info().rss
    for index in range(1000):
        engine.submit(str(index), PROMPT, one, "act")
    with pytest.raises(RequestRefusedError, match="1000 requests are waiting"):
        engine.submit("one more", PROMPT, one, "act")
    finished = drain(engine)
    assert len(finished) == 1000
    assert {each.finish_reason for each in finished.values()} == {"length"}
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert engine.health().running == engine.health().waiting == 0


def test_no_more_requests_run_than_there_are_slots(make_engine):
    engine = make_engine(max_slots=2, max_waiting=100)
    for index in range(20):
        engine.submit(str(index), PROMPT + index, GREEDY, "act")
    num_finished = 0
    for _ in range(60):
        num_finished += len(engine.step())
        assert engine.health().running <= 2
    assert num_finished == 20


def test_a_thousand_requests_at_once_are_answered_or_refused_in_bounded_memory(make_engine):
    engine = make_engine(max_slots=16, max_waiting=900)
    before = psutil.Process().memory_info().rss
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (1000, 20)).astype(np.int32)
    refused = set()
    for index, prompt in enumerate(prompts):
        try:
            engine.submit(str(index), prompt, Sampling(temperature=1.0, max_new_tokens=4, seed=index), "act")
        except RequestRefusedError:
            refused.add(str(index))
    finished = drain(engine)
    assert len(refused) == 100 and finished.keys() | refused == {str(index) for index in range(1000)}
    assert {each.finish_reason for each in finished.values()} == {"length"}
    assert {each.token_ids.size for each in finished.values()} == {4}
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_the_engine_keeps_its_own_copy_of_a_prompt(make_engine):
    engine = make_engine()
    prompt = PROMPT.copy()
    engine.submit("a", prompt, GREEDY, "act")
    prompt[:] = 0
    expected = expected_ids(PROMPT, 6)
    assert run_steps(engine, 6)["a"].token_ids.tolist() == expected


def test_a_response_ends_with_the_context(make_engine):
    engine = make_engine(max_context_tokens=32)
    engine.submit("a", np.arange(29, dtype=np.int32), Sampling(temperature=1.0, max_new_tokens=50), "act")
    generation = run_steps(engine, 4)["a"]
    assert (generation.token_ids.size, generation.finish_reason) == (3, "length")


def test_a_step_without_requests_returns_nothing_and_computes_nothing(make_engine):
    engine = make_engine()
    before = engine.health()
    assert engine.step() == []
    assert engine.health() == before


def test_a_cancelled_request_answers_at_the_next_step_with_what_it_has_and_frees_its_slot(make_engine):
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
    assert finished["running"].token_ids.tolist() == expected_ids(PROMPT, 2)
    assert finished["running"].logprobs.size == finished["running"].versions.size == 2
    assert finished["waiting"].token_ids.size == 0
    rest = run_steps(engine, 6)
    assert rest["next"].token_ids.tolist() == expected_ids(PROMPT[:3], 6)
    assert engine.health().running == engine.health().waiting == 0


def test_kinds_take_turns_when_slots_are_short_and_a_kind_is_served_in_order(make_engine):
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


def test_counters_add_up(make_engine):
    engine = make_engine()
    before = engine.health()
    engine.submit("a", PROMPT, GREEDY, "act")
    run_steps(engine, 6)
    after = engine.health()
    names = ("generated_tokens", "prefilled_tokens", "cached_tokens")
    assert [getattr(after, name) - getattr(before, name) for name in names] == [6, 5, 0]


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
def test_a_weight_load_that_fails_leaves_the_old_weights_whole(make_engine, name, value, error):
    engine = make_engine()
    version = engine.health().version
    engine.submit("before", PROMPT, GREEDY, "act")
    run_steps(engine, 2)
    with pytest.raises(error, match=name):
        engine.load_weights(version + 1, change(weights_of(model(1)), name, value))
    generation = run_steps(engine, 4)["before"]
    assert generation.token_ids.tolist() == expected_ids(PROMPT, 6)
    assert generation.versions.tolist() == [version] * 6


@pytest.mark.parametrize("behind", [0, 1])
def test_weights_that_are_not_newer_are_refused(make_engine, behind):
    engine = make_engine(version=3)
    version = engine.health().version
    with pytest.raises(ValueError, match="not newer"):
        engine.load_weights(version - behind, weights_of(model(1)))
    engine.submit("a", PROMPT, GREEDY, "act")
    generation = run_steps(engine, 6)["a"]
    assert generation.token_ids.tolist() == expected_ids(PROMPT, 6)
    assert generation.versions.tolist() == [version] * 6


def test_tied_weights_are_loaded_once_from_read_only_arrays_and_stay_tied(make_engine):
    engine = make_engine(tied=True)
    tensors = weights_of(model(1, tied=True))
    assert "lm_head.weight" not in tensors
    for array in tensors.values():
        array.setflags(write=False)
    engine.load_weights(engine.health().version + 1, tensors)
    engine.submit("a", PROMPT, GREEDY, "act")
    assert run_steps(engine, 6)["a"].token_ids.tolist() == expected_ids(PROMPT, 6, seed=1, tied=True)
