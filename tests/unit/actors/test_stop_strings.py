"""Stop strings: a response ends with the token that completes one, and its ids are those that were sampled."""

import numpy as np
import pytest
import torch

from seed_async.actors.engines.stopping import StopStrings
from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import Generation, RequestRefusedError, Sampling
from tests.fakes.chat import tiny_chat
from tests.fakes.endpoints import text_engine
from tests.reference.engines import drain
from tests.reference.generate_reference import tiny_model

PROMPT = tiny_chat().first_prompt("Task: put a clean mug on the shelf.")
LONG = 40


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices."""
    torch.set_num_threads(1)


def generate(seeds: range, stop: tuple[str, ...] = ()) -> dict[str, Generation]:
    """Responses sampled together, one a seed; those with an even seed have the stop strings."""
    engine = text_engine(max_slots=len(seeds))
    for seed in seeds:
        strings = stop if seed % 2 == 0 else ()
        engine.submit(str(seed), PROMPT, Sampling(temperature=1.0, max_new_tokens=LONG, seed=seed, stop=strings), "act")
    finished = drain(engine)
    assert not engine._stops.watching, "nothing is remembered of finished requests"
    return finished


def test_a_response_ends_with_the_token_that_completes_the_string() -> None:
    """Also one that lies across tokens; requests without stop strings go on beside it."""
    plain = generate(range(4))
    text = tiny_chat().decode(plain["0"].token_ids)
    string = text[len(text) // 3 : len(text) // 3 + 5]
    assert len(tiny_chat().encode(string)) > 1
    stopped = generate(range(4), ("never said", string))
    mine = stopped["0"]
    assert mine.finish_reason == "stop" and mine.token_ids.size < LONG
    np.testing.assert_array_equal(mine.token_ids, plain["0"].token_ids[: mine.token_ids.size])
    assert mine.logprobs.size == mine.versions.size == mine.token_ids.size
    assert string in tiny_chat().decode(mine.token_ids)
    assert string not in tiny_chat().decode(mine.token_ids[:-1])
    for odd in ("1", "3"):
        assert stopped[odd].finish_reason == "length"
        np.testing.assert_array_equal(stopped[odd].token_ids, plain[odd].token_ids)


def test_the_prompt_does_not_count() -> None:
    """It holds the string already."""
    string = "Task: put a clean mug"
    assert string in tiny_chat().decode(PROMPT)
    assert generate(range(1), (string,))["0"].finish_reason == "length"


@pytest.mark.parametrize(("stop", "named"), [(("",), "empty"), (("a", ""), "empty")])
def test_an_empty_string_is_refused(stop: tuple[str, ...], named: str) -> None:
    """It would end every response."""
    with pytest.raises(RequestRefusedError, match=named):
        text_engine().submit("a", PROMPT, Sampling(temperature=0.0, max_new_tokens=2, stop=stop), "act")


def test_an_engine_that_knows_ids_only_refuses_stop_strings() -> None:
    """Instead of passing over them."""
    engine = TorchEngine(tiny_model(), max_slots=1, max_context_tokens=32)
    with pytest.raises(RequestRefusedError, match="without a tokenizer"):
        engine.submit(
            "a", np.arange(3, dtype=np.int32), Sampling(temperature=0.0, max_new_tokens=2, stop=("x",)), "act"
        )


@pytest.mark.parametrize("text", ["</action>", "a</action>b", "</</action>", "</acti</action>"])
def test_a_string_is_found_however_the_text_is_cut(text: str) -> None:
    """Character by character, and at once."""
    for size in (1, 2, 3, len(text)):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        stops = StopStrings(lambda parts=parts: parts.__getitem__)
        stops.watch("a", ("</action>", "zz"))
        found = [stops.completed("a", number) for number in range(len(parts))]
        first = next(number for number in range(len(parts)) if "</action>" in "".join(parts[: number + 1]))
        assert found.index(True) == first


def test_the_text_of_a_stream_is_that_of_the_whole() -> None:
    """Characters of several tokens come when they are whole."""
    tokenizer = tiny_chat()
    ids = tokenizer.encode("<action>go to shelf 1</action> déjà vu ✓")
    stream = tokenizer.text_stream()
    pieces = [stream(int(token_id)) for token_id in ids]
    assert "".join(pieces) == tokenizer.decode(ids) and "" in pieces
