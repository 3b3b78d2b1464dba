"""K = 0 is exact synchronous operation: the real processes come to the parameters of one plain loop, bit for bit.

The engine's log-probs depend on which requests share a forward pass, in the last digits; the sampled ids do not, unless
a uniform number falls between two such digits, and the synchronous loss reads the ids only.
"""

import asyncio
import json
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.actors.evaluation_cli import LocalGenerator
from seed_async.actors.rollout import EpisodePlayer
from seed_async.envs.isolation import LocalHost
from seed_async.envs.registry import open_suite
from seed_async.learner.leader import numpy_weights
from seed_async.learner.ranks import Ranks
from seed_async.learner.scoring import load_policy
from seed_async.learner.step import update
from seed_async.learner.update_rows import loss_config, update_batch
from seed_async.messages import Sample
from seed_async.rundir import RunDir
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology
from seed_async.topology_file import load_topology
from tests.fakes.episodes import make_lease, make_trajectory
from tests.integration.runs import assert_counts_add_up, finish, launch, lines

UPDATES = 10

pytestmark = pytest.mark.integration


def seed_of(topology: Topology, group: int, member: int) -> int:
    """The seed of a member's first try."""
    place = f"{topology.run.seed} g{group} {member} 0"
    return int.from_bytes(blake2b(place.encode(), digest_size=4).digest(), "little")


async def train(topology: Topology, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Play the groups of each update one episode after the other, and update: no buffer, no process, no thread."""
    suite, rollout, optimization = open_suite(topology.env), topology.rollout, topology.optimizer
    tasks = suite.tasks(topology.env.split)
    order = iter(np.random.default_rng([topology.run.seed, 0]).permutation(len(tasks)))
    policy, reference = load_policy(checkpoint), load_policy(checkpoint).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=optimization.lr, betas=optimization.betas, weight_decay=optimization.weight_decay
    )
    engine = TorchEngine(load_model(checkpoint), max_slots=1, max_context_tokens=rollout.max_context_tokens + 1)
    tokenizer, numbers = ChatTokenizer.load(checkpoint), count()
    async with LocalGenerator(engine) as generator:
        player = EpisodePlayer(tokenizer, generator, rollout, temperature=rollout.temperature, kind="act")
        for version in range(UPDATES):
            samples = []
            for group in range(rollout.groups_per_update):
                number, task = next(numbers), tasks[next(order)]
                for member in range(rollout.group_size):
                    episode = await player.play(LocalHost(suite.make), task, seed_of(topology, number, member))
                    played = make_trajectory(
                        make_lease(group=f"g{group}", member=member),
                        "plain",
                        episode.turns,
                        status=episode.status,
                        episode_return=episode.episode_return,
                    )
                    samples.append(Sample(trajectory=played, skill=None, skill_reason="method"))
            batch, _ = update_batch(samples, version, tokenizer, topology, policy.config.max_position_embeddings)
            update(batch, loss_config(topology), policy, reference, optimizer)
            engine.load_weights(version + 1, numpy_weights(Ranks().gather(policy)))
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def test_a_synchronous_run_equals_a_plain_loop_bit_for_bit_and_wastes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    sets = ["method=grpo", "staleness.max=0", f"run.updates={UPDATES}", "roles.evaluation=null"]
    process = launch(run_dir, *sets)
    output = finish(process)
    assert process.returncode == 0, output
    counts = assert_counts_add_up(run_dir)
    topology = load_topology(run_dir / "topology.yaml")
    assert counts["trained"] == UPDATES * topology.rollout.batch_trajectories
    assert counts["ages"] == {"0": counts["trained"]} and counts["dropped"] == {}
    assert counts["leases"]["returned"] == counts["leases"]["failed"] == 0
    assert counts["bias"]["trained_token_share"] == counts["bias"]["length_ratio"] == 1.0
    fates = [line["fate"] for line in lines(run_dir / "trajectories.jsonl")]
    assert set(fates[: counts["trained"]]) == {"trained"}, "what is not trained comes after the last update"
    torch.set_num_threads(1)
    plain = asyncio.run(train(topology, RunDir(run_dir).initial_model(topology)))
    final = load_file(run_dir / "final" / "model.safetensors")
    first = load_file(RunDir(run_dir).initial_model(topology) / "model.safetensors")
    assert plain.keys() == final.keys()
    assert any(not torch.equal(first[name], final[name]) for name in final), "the run trained"
    assert all(torch.equal(plain[name], final[name]) for name in final)
    assert json.loads((run_dir / "summary.json").read_text())["max_age"] == 0
