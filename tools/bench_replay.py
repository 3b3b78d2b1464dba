"""The engines and transformers `generate` on recorded ALFWorld games, played turn by turn at once, in one run.

A game is replayed with the observations that an expert has met and with greedy responses of the length of the expert's,
so that every side gets the same prompts, and each prompt continues what its engine has just sampled. The engines start
a game's next turn as soon as its last one is done; `generate` takes all games' next turns as one padded batch. A second
pass asks for one token a turn: the time to the first one. Each pass is on new weights, so without earlier prefixes; the
seconds that loading them takes are reported too. Sides take turns, and the best round of each counts. Of the turns the
median and the nine-in-ten time are shown. Run it with OMP_WAIT_POLICY=PASSIVE.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from seed_async.actors.demonstrations import play_expert
from seed_async.actors.engines.opening import open_engine
from seed_async.envs.registry import open_suite
from seed_async.ports import Engine, Sampling
from seed_async.prompts import action_response, first_prompt, next_prompt
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology
from seed_async.topology_file import load_topology
from seed_async.topology_roles import Policy, VllmOptions


class TurnText(NamedTuple):
    """What a turn adds to its game: the prompt's ids before the response, int32 [P], and the response's length."""

    prompt_ids: np.ndarray
    response_tokens: int


Games = list[list[TurnText]]


class Pass(NamedTuple):
    """One replay: the responses by game and turn, all seconds, and for each turn the seconds from asking to the end.

    `cpu_seconds` are those that the process computed for, all threads together: on a shared host they say more.
    """

    responses: list[list[list[int]]]
    seconds: float
    cpu_seconds: float
    turn_seconds: list[float]
    prompt_tokens: int
    cached_tokens: int
    update_seconds: float


class Side(Protocol):
    """Something that replays games."""

    def replay(self, games: Games, most_tokens: int) -> Pass:
        """Replay on weights loaded anew; responses have at most `most_tokens`."""
        ...


def record_games(topology: Topology, tokenizer: ChatTokenizer, count: int) -> Games:
    """Games of the evaluation's kind as the expert plays them, cut where the context ends."""
    suite = open_suite(topology.env)
    environment, rollout = suite.make(), topology.rollout
    rng, games = np.random.default_rng(0), []
    for task in suite.tasks("valid_unseen")[:count]:
        played = play_expert(suite, environment, task, 0.1, rng)
        turns: list[TurnText] = []
        length = 0
        for observation, command in zip(played.observations, played.commands, strict=True):
            if not turns:
                opening = first_prompt(
                    rollout.prompt_style, observation.info.task, observation.text, observation.admissible
                )
                ids = tokenizer.first_prompt(opening.text)
            else:
                text = next_prompt(rollout.prompt_style, observation.text, observation.admissible)
                ids = tokenizer.next_prompt(text, after_eos=False)
            response = tokenizer.encode(action_response(command)).size
            length += ids.size + response
            if length >= rollout.max_context_tokens:
                break
            turns.append(TurnText(ids, response))
        games.append(turns)
    return games


class EngineSide:
    """An engine behind the seam."""

    def __init__(self, engine: Engine, weights: Mapping[str, np.ndarray]) -> None:
        """`weights` are loaded again before each pass."""
        self._engine, self._weights = engine, weights

    def replay(self, games: Games, most_tokens: int) -> Pass:
        """Replay; a game's next turn is asked for as soon as its last one is done."""
        engine, began_at_s = self._engine, time.perf_counter()
        engine.load_weights(engine.health().version + 1, self._weights)
        update_seconds = time.perf_counter() - began_at_s
        contexts = [np.zeros(0, dtype=np.int32) for _ in games]
        responses: list[list[list[int]]] = [[] for _ in games]
        asked_at_s, turn_seconds, prompt_tokens, cached_tokens = [0.0] * len(games), [], 0, 0

        def ask(index: int) -> None:
            nonlocal prompt_tokens
            turn = games[index][len(responses[index])]
            contexts[index] = np.concatenate([contexts[index], turn.prompt_ids])
            prompt_tokens += contexts[index].size
            asked_at_s[index] = time.perf_counter()
            sampling = Sampling(temperature=0.0, max_new_tokens=min(most_tokens, turn.response_tokens))
            engine.submit(str(index), contexts[index], sampling, "act")

        began_at_s, cpu_began_at_s = time.perf_counter(), time.process_time()
        for index in range(len(games)):
            ask(index)
        num_open = len(games)
        while num_open:
            for done in engine.step():
                index = int(done.request_id)
                turn_seconds.append(time.perf_counter() - asked_at_s[index])
                cached_tokens += done.cached_tokens
                contexts[index] = np.concatenate([contexts[index], done.token_ids])
                responses[index].append(done.token_ids.tolist())
                if len(responses[index]) < len(games[index]):
                    ask(index)
                else:
                    num_open -= 1
        seconds, cpu_seconds = time.perf_counter() - began_at_s, time.process_time() - cpu_began_at_s
        return Pass(responses, seconds, cpu_seconds, turn_seconds, prompt_tokens, cached_tokens, update_seconds)


class GenerateSide:
    """`generate` of transformers."""

    def __init__(self, model: PreTrainedModel, weights: Mapping[str, np.ndarray]) -> None:
        """`weights` are loaded again before each pass."""
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self._model, self._weights = model, weights

    def replay(self, games: Games, most_tokens: int) -> Pass:
        """Replay in rounds: the next turn of every game that has one, as one left-padded batch."""
        began_at_s = time.perf_counter()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(torch.from_numpy(self._weights[name]))
        update_seconds = time.perf_counter() - began_at_s
        contexts = [np.zeros(0, dtype=np.int32) for _ in games]
        responses: list[list[list[int]]] = [[] for _ in games]
        turn_seconds, prompt_tokens = [], 0
        began_at_s, cpu_began_at_s = time.perf_counter(), time.process_time()
        for number in range(max(len(turns) for turns in games)):
            round_at_s = time.perf_counter()
            playing = [index for index, turns in enumerate(games) if len(turns) > number]
            for index in playing:
                contexts[index] = np.concatenate([contexts[index], games[index][number].prompt_ids])
            wanted = [min(most_tokens, games[index][number].response_tokens) for index in playing]
            rows = self._generate([contexts[index] for index in playing], max(wanted))
            for index, row, size in zip(playing, rows, wanted, strict=True):
                prompt_tokens += contexts[index].size
                contexts[index] = np.concatenate([contexts[index], row[:size]])
                responses[index].append(row[:size].tolist())
            turn_seconds += [time.perf_counter() - round_at_s] * len(playing)
        seconds, cpu_seconds = time.perf_counter() - began_at_s, time.process_time() - cpu_began_at_s
        return Pass(responses, seconds, cpu_seconds, turn_seconds, prompt_tokens, 0, update_seconds)

    def _generate(self, contexts: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
        """Greedy responses of `num_tokens` to each context, int32 [B, T]."""
        width = max(context.size for context in contexts)
        ids = torch.zeros(len(contexts), width, dtype=torch.long)
        seen = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, width - context.size :] = torch.from_numpy(context)
            seen[row, width - context.size :] = 1
        with torch.inference_mode():
            out = self._model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=seen, max_new_tokens=num_tokens, do_sample=False
            )
        responses: np.ndarray = out[:, width:].numpy().astype(np.int32)
        return responses


def open_sides(
    model: Path, tokenizer: ChatTokenizer, context: int, num_games: int, threads: int, dtype: str
) -> dict[str, Callable[[], Side]]:
    """The sides of the comparison, vLLM when it is installed; each is opened when it is first needed."""
    theirs = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in theirs.named_parameters()}

    def engine_side(policy: Policy) -> Side:
        return EngineSide(open_engine(policy, model, tokenizer, max_context_tokens=context), weights)

    sides: dict[str, Callable[[], Side]] = {
        "torch engine": lambda: engine_side(Policy(max_slots=num_games)),
        "transformers generate": lambda: GenerateSide(theirs, weights),
    }
    if find_spec("vllm") is not None:
        for name in dict.fromkeys(("float32", dtype)):
            options = VllmOptions.model_validate({"dtype": name})
            policy = Policy(engine="vllm", max_slots=num_games, threads=threads, vllm=options)
            sides[f"vLLM, {name}"] = lambda policy=policy: engine_side(policy)  # type: ignore[misc]
    return sides


def report(passes: Mapping[str, tuple[Pass, Pass]]) -> None:
    """Print a row for each side: its best whole replay and its best replay of first tokens."""
    columns = ("new tokens/s", "a CPU second", "first token, s", "90 %", "prefix hits", "update, s", "same responses")
    table, expected = Table("side", *columns), next(iter(passes.values()))[0].responses
    for name, (whole, first) in passes.items():
        num_tokens = sum(len(response) for turns in whole.responses for response in turns)
        pairs = [
            (mine, other)
            for turns, others in zip(whole.responses, expected, strict=True)
            for mine, other in zip(turns, others, strict=True)
        ]
        table.add_row(
            name,
            f"{num_tokens / whole.seconds:,.0f}",
            f"{num_tokens / whole.cpu_seconds:,.0f}",
            f"{np.median(first.turn_seconds):.3f}",
            f"{np.quantile(first.turn_seconds, 0.9):.3f}",
            f"{whole.cached_tokens / whole.prompt_tokens:.0%}",
            f"{min(whole.update_seconds, first.update_seconds):.2f}",
            f"{sum(mine == other for mine, other in pairs) / len(pairs):.0%}",
        )
    Console(width=120).print(table)


def main() -> None:
    """Parse the options, replay in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--topology", type=Path, default=Path("topologies/demo.yaml"), help="games and prompts")
    parser.add_argument("--games", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="a second vLLM with this dtype")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    topology = load_topology(options.topology)
    tokenizer = ChatTokenizer.load(options.model)
    games = record_games(topology, tokenizer, options.games)
    context = topology.rollout.max_context_tokens + 1
    sides = open_sides(options.model, tokenizer, context, len(games), options.threads, options.dtype)
    opened = {name: side() for name, side in sides.items()}
    longest = max(turn.response_tokens for turns in games for turn in turns)
    best: dict[str, tuple[Pass, Pass]] = {}
    for _ in range(options.rounds):
        for name, side in opened.items():
            pair = (side.replay(games, longest), side.replay(games, 1))
            known = best.get(name, pair)
            best[name] = (
                min(known[0], pair[0], key=lambda each: each.seconds),
                min(known[1], pair[1], key=lambda each: each.seconds),
            )
    sizes = [sum(turn.prompt_ids.size + turn.response_tokens for turn in turns) for turns in games]
    print(f"{len(games)} games, {sum(map(len, games))} turns, {np.mean(sizes):.0f} tokens a game, at most {max(sizes)}")
    report(best)


if __name__ == "__main__":
    main()
