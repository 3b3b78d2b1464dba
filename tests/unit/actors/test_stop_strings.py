"""Stop strings: a response ends with the token that completes one, and its ids are those that were sampled."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from seed_async.actors.engines.opening import prepare_vllm
from seed_async.actors.engines.stopping import StopStrings
from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import Generation, RequestRefusedError, Sampling
from seed_async.topology_roles import VllmOptions
from tests.fakes.chat import tiny_chat
from tests.fakes.endpoints import text_engine
from tests.reference.engines import drain, needs_vllm
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


@needs_vllm
def test_the_vllm_engine_stops_at_the_same_token(tmp_path: Path) -> None:
    """And shows what a request has so far."""
    prepare_vllm(threads=1)
    from seed_async.actors.engines.vllm_engine import VllmEngine

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=tiny_chat().vocabulary_size, max_position_embeddings=256, head_dim=32, **size)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = VllmEngine(
        tmp_path,
        max_slots=2,
        max_context_tokens=200,
        options=VllmOptions(kv_cache_gib=1 / 128),
        open_stream=tiny_chat().text_stream,
    )
    engine.submit("plain", PROMPT, Sampling(temperature=1.0, max_new_tokens=LONG), "chat")
    for _ in range(5):
        engine.step()
    part = engine.sampled("plain")
    plain = drain(engine)["plain"]
    np.testing.assert_array_equal(part.token_ids, plain.token_ids[:5])
    string = tiny_chat().decode(plain.token_ids)[8:12]
    engine.submit("stops", PROMPT, Sampling(temperature=1.0, max_new_tokens=LONG, stop=(string,)), "chat")
    stopped = drain(engine)["stops"]
    engine.close()
    assert stopped.finish_reason == "stop" and stopped.token_ids.size < LONG
    np.testing.assert_array_equal(stopped.token_ids, plain.token_ids[: stopped.token_ids.size])
    assert string in tiny_chat().decode(stopped.token_ids)
    assert string not in tiny_chat().decode(stopped.token_ids[:-1])
