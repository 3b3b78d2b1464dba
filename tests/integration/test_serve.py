"""`seed-async serve`: a model folder behind the endpoint, in a process of its own."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from tests.integration.runs import ROOT, stage1_model

pytestmark = pytest.mark.integration


def answer(url: str, body: Any = None) -> Any:
    """The JSON at `url`; a POST with a body."""
    content = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, content, {"Content-Type": "application/json"}), timeout=60
    ) as response:
        return json.loads(response.read())


def test_a_model_folder_is_served_until_sigterm() -> None:
    command = [sys.executable, "-m", "seed_async.cli", "serve", "--model", str(stage1_model()), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "it ended before it served"
            found = re.search(r"serving model at (http://127\.0\.0\.1:\d+/v1)", line)
        url = found.group(1)
        (model,) = answer(f"{url}/models")["data"]
        assert (model["id"], model["version"], model["max_model_len"]) == ("model", "v0", 512)
        messages = [{"role": "user", "content": "There are four boxes."}]
        asked = {"model": "model", "messages": messages, "temperature": 0, "max_tokens": 12}
        first, again = (answer(f"{url}/chat/completions", asked) for _ in range(2))
        assert first["choices"] == again["choices"] and 1 <= first["usage"]["completion_tokens"] <= 12
        assert first["choices"][0]["message"]["content"] and first["system_fingerprint"] == "v0"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()
