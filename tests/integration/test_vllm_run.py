"""vLLM in a whole run, and with more than one worker process."""

import re
from pathlib import Path

import numpy as np
import pytest

from seed_async.actors.engines.opening import open_engine
from seed_async.ports import Sampling
from seed_async.topology_roles import Policy, VllmOptions
from seed_async.weights.canary import canary_gap_nats, canary_text
from tests.fakes.chat import tiny_chat
from tests.integration.runs import assert_counts_add_up, finish, launch, lines
from tests.reference.engines import HEAD_DIM, drain, make_prompts, needs_vllm
from tests.reference.generate_reference import (
    VOCABULARY,
    greedy_reference,
    plain_twin,
    score_reference,
    tiny_model,
    weights_of,
)

pytestmark = [pytest.mark.integration, needs_vllm]


def test_a_run_learns_from_what_vllm_sampled_and_analysed_and_the_canary_agrees_at_every_load(tmp_path: Path) -> None:
    """The learner finds the log-probs that vLLM reported at the version that it named, through six of them."""
    run_dir = tmp_path / "boxes"
    sets = [f"roles.{role}={{engine: vllm, vllm: {{kv_cache_gib: 0.05}}}}" for role in ("policy", "analyzers")]
    sets.append("model.init.hidden_size=64")
    process = launch(run_dir, *sets, with_stage1=True)
    output = finish(process, timeout_s=600.0)  # importing vLLM takes minutes on a busy machine
    assert process.returncode == 0, output
    counts = assert_counts_add_up(run_dir)
    assert counts["trained"] == 6 * 16
    gaps = [line["sampler_gap_max"] for line in lines(run_dir / "metrics.jsonl") if "sampler_gap_max" in line]
    assert gaps and max(gaps) < 1e-4
    assert counts["skills"]["parsed"] > 0
    for engine in ("policy-0", "analyzer-0"):
        log = (run_dir / "logs" / f"{engine}.log").read_text()
        compared = [float(gap) for gap in re.findall(r"canary_gap_nats=(\S+)", log)]
        assert len(compared) == log.count("weights loaded") > 0 and max(compared) < 1e-4


def test_two_workers_get_new_weights_through_shared_memory(tmp_path: Path) -> None:
    """Each holds a half of every layer; the output layer is tied."""
    tiny_model(tied=True, head_dim=HEAD_DIM).save_pretrained(tmp_path)
    options = VllmOptions(tensor_parallel=2, kv_cache_gib=1 / 128)
    engine = open_engine(Policy(engine="vllm", max_slots=2, vllm=options), tmp_path, tiny_chat(), max_context_tokens=64)
    (prompt,) = make_prompts(40)
    text = canary_text(VOCABULARY)
    for seed in (0, 1):
        model = tiny_model(seed=seed, tied=True, head_dim=HEAD_DIM)
        if seed:
            engine.load_weights(seed, weights_of(model))
        assert canary_gap_nats(score_reference(plain_twin(model), *text), engine.score(*text)) < 1e-4
        engine.submit("a", prompt, Sampling(temperature=0.0, max_new_tokens=12), "act")
        done = drain(engine)["a"]
        ids, scores = greedy_reference(plain_twin(model), prompt, 12)
        assert done.token_ids.tolist() == ids and np.abs(done.logprobs - scores).max() < 1e-4
    engine.close()  # type: ignore[attr-defined]
