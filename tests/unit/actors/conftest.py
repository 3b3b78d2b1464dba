"""vLLM engines for all tests of this folder: the first one that is closed ends every other of its process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seed_async.actors.engines.opening import prepare_vllm
from seed_async.ports import Engine
from seed_async.topology import Lora
from seed_async.topology_roles import VllmOptions
from tests.reference.engines import drain
from tests.reference.generate_reference import weights_of
from tests.reference.vllm_checks import CONTEXT, NUM_SLOTS, model

Opened = dict[tuple[object, ...], Engine]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folders of the tiny model: `False`, and `True` with tied embeddings."""
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        model(tied=tied).save_pretrained(folder / str(tied))
    return folder


@pytest.fixture(scope="session")
def opened() -> Iterator[Opened]:
    """The engines that stay open until the last test. vLLM's share their process groups."""
    opened: Opened = {}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="session")
def open_vllm(folders: Path, opened: Opened) -> Callable[..., Engine]:
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
        **options: object,
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
