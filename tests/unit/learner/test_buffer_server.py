"""What a buffer server reads of the model that the run starts from."""

import json
from pathlib import Path

import pytest

from seed_async.learner.buffer_server import read_vocabulary


@pytest.mark.parametrize("config", [{"vocab_size": 48}, {"text_config": {"vocab_size": 48}, "vision_config": {}}])
def test_the_vocabulary_is_that_of_the_language_model(config: dict[str, object], tmp_path: Path) -> None:
    """Which a vision model keeps in a section of its own."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocabulary(tmp_path) == 48
