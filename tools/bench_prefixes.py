"""How many tokens of an update packing computes, over those that its rows hold: what shared prefixes save.

Groups of eight scripted ALFWorld episodes (the expert, which errs at `--mistakes` of its steps) in each layout and
style, with a skill of its own for each. A word or a sign counts as a token. In the full style each response also has
forty words of its own that stand for its reasoning.
"""

import argparse
import re
from collections.abc import Iterator
from itertools import count, product
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from seed_async.actors.demonstrations import Played, act_rows, play_expert
from seed_async.envs.contract import Step
from seed_async.envs.registry import open_suite
from seed_async.learner.packing import MaskedRow, pack, plan_micro_batches
from seed_async.topology import Env, Rollout

GROUP_SIZE = 8
REASONING_WORDS = 40
_TOKEN = re.compile(r"\w+|\S|\s")


class Words:
    """Ids of words in the order in which they come up; a reasoning word is new each time."""

    def __init__(self) -> None:
        """No words yet."""
        self._ids: dict[str, int] = {}
        self._fresh = count(1 << 20)

    def row(self, messages: list[dict[str, str]], reasoning: bool) -> MaskedRow:
        """A chat as a row."""
        ids: list[int] = []
        for message in messages:
            if message["role"] == "assistant" and reasoning:
                ids += [next(self._fresh) for _ in range(REASONING_WORDS)]
            text = f"<{message['role']}>{message['content']}"
            ids += [self._ids.setdefault(word, len(self._ids)) for word in _TOKEN.findall(text)]
        token_ids = np.array(ids, dtype=np.int32)
        return SimpleNamespace(token_ids=token_ids, response_mask=np.arange(len(ids)) == len(ids) - 1)


def groups(number: int, mistakes: float) -> Iterator[list[tuple[str, Played, str]]]:
    """Task, episode and skill of each sibling of a group."""
    suite, rng = open_suite(Env()), np.random.default_rng(0)
    environment = suite.make()
    for task in suite.tasks("train")[:number]:
        group = []
        for member in range(GROUP_SIZE):
            played = play_expert(suite, environment, task, mistakes, rng)
            steps = [
                Step(observation=seen.text, action=command, valid=valid)
                for seen, command, valid in zip(played.observations, played.commands, played.valid, strict=True)
            ]
            skill = suite.annotate(task, steps, played.won).episode_skill
            group.append((task, played, f"{skill} ({member})"))
        yield group


def computed(rows: list[MaskedRow], token_budget: int) -> int:
    """Tokens that a forward pass over the rows computes."""
    plan = plan_micro_batches(rows, token_budget)
    packed = (pack(rows[micro.start : micro.stop], torch.device("cpu")) for micro in plan)
    return sum(row.input_ids.numel() for row in packed)


def main() -> None:
    """Print one line a layout and style."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--mistakes", type=float, default=0.3)
    parser.add_argument("--token-budget", type=int, default=16384)
    options = parser.parse_args()
    table = Table("layout", "style", "tokens a row", "plain rows", "skill rows", "both in one stream")
    played = [each for group in groups(options.groups, options.mistakes) for each in group]
    for layout, style in product(("transcript", "windowed"), ("full", "compact")):
        rollout = Rollout.model_validate({"layout": layout, "prompt_style": style, "max_context_tokens": 16384})
        words = Words()
        streams: tuple[list[MaskedRow], ...] = ([], [], [])
        for task, episode, skill in played:
            for stream, text in zip(streams, (None, skill), strict=False):
                rows = [words.row(row["messages"], style == "full") for row in act_rows(rollout, task, episode, text)]
                stream += rows
                streams[2].extend(rows)
        shares = [
            f"{computed(rows, options.token_budget) / sum(len(row.token_ids) for row in rows):.0%}" for rows in streams
        ]
        table.add_row(layout, style, f"{np.mean([len(row.token_ids) for row in streams[0]]):,.0f}", *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
