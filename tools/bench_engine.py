"""Tokens per second of the torch engine against transformers `generate`, on the same requests in one run.

The requests differ in prompt and response length, as those of agents do. `generate` takes them as one padded batch,
which runs until its longest response is done; only the tokens that a request asked for count. The two sides take turns
and the best round of each counts, since the speed of a shared host drifts. Run it with OMP_WAIT_POLICY=PASSIVE.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.ports import Sampling

VOCABULARY = 1000


class Job(NamedTuple):
    """One request: prompt int32 [P] and the exact number of tokens that it wants."""

    prompt_ids: np.ndarray
    num_tokens: int


class Round(NamedTuple):
    """One measurement: the responses in the order of the jobs, the time, and what part of it a decode step takes.

    `step_ms` is the median over steps that decode every job and prefill none; None where that cannot be told apart.
    """

    responses: list[list[int]]
    seconds: float
    step_ms: float | None


def write_small_model(folder: Path, layers: int, width: int) -> None:
    """Save a random Llama with grouped heads of 32 and a vocabulary of 1,000."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def make_jobs(count: int, prompt: tuple[int, int], response: tuple[int, int], vocabulary: int) -> list[Job]:
    """Requests with lengths drawn uniformly from the two ranges, both ends included."""
    rng = np.random.default_rng(0)
    prompts, responses = (rng.integers(low, high, count, endpoint=True) for low, high in (prompt, response))
    return [
        Job(rng.integers(0, vocabulary, size).astype(np.int32), num_tokens)
        for size, num_tokens in zip(prompts.tolist(), responses.tolist(), strict=True)
    ]


def make_engine(model: PreTrainedModel, jobs: list[Job]) -> TorchEngine:
    """An engine with a slot for each job."""
    context = max(job.prompt_ids.size + job.num_tokens for job in jobs)
    return TorchEngine(model, max_slots=len(jobs), max_context_tokens=context)


def run_engine(engine: TorchEngine, weights: Mapping[str, np.ndarray], jobs: list[Job], temperature: float) -> Round:
    """All jobs at once; loading the same weights first empties the prefix cache, which earlier rounds filled."""
    engine.load_weights(engine.health().version + 1, weights)
    responses: dict[int, list[int]] = {}
    full_steps = []
    began_at_s = time.perf_counter()
    for index, job in enumerate(jobs):
        engine.submit(
            str(index), job.prompt_ids, Sampling(temperature=temperature, max_new_tokens=job.num_tokens), "act"
        )
    while len(responses) < len(jobs):
        prefilled, step_at_s = engine.health().prefilled_tokens, time.perf_counter()
        for generation in engine.step():
            responses[int(generation.request_id)] = generation.token_ids.tolist()
        if not responses and engine.health().prefilled_tokens == prefilled:
            full_steps.append(time.perf_counter() - step_at_s)
    seconds = time.perf_counter() - began_at_s
    return Round([responses[index] for index in range(len(jobs))], seconds, 1e3 * float(np.median(full_steps)))


def run_generate(model: PreTrainedModel, jobs: list[Job], temperature: float) -> Round:
    """All jobs as one left-padded batch; each response is cut to the tokens that its job wanted."""
    width, num_steps = max(job.prompt_ids.size for job in jobs), max(job.num_tokens for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - job.prompt_ids.size :] = torch.from_numpy(job.prompt_ids)
        seen[row, width - job.prompt_ids.size :] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    began_at_s = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=seen, max_new_tokens=num_steps, **sampling)  # type: ignore[operator]
    seconds = time.perf_counter() - began_at_s
    responses = [row[width : width + job.num_tokens].tolist() for row, job in zip(out, jobs, strict=True)]
    return Round(responses, seconds, None)


def take_turns(sides: dict[str, Callable[[], Round]], num_rounds: int) -> dict[str, Round]:
    """The fastest round of each side, after one that warms up."""
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    for _ in range(num_rounds + 1):
        for name, run in sides.items():
            rounds[name].append(run())
    return {name: min(measured[1:], key=lambda each: each.seconds) for name, measured in rounds.items()}


def report(best: dict[str, Round], num_tokens: int, greedy: bool) -> None:
    """Print the table, the ratio, and for greedy runs how many responses agree."""
    table = Table("engine", "tokens", "seconds", "tokens/s", "ms a decode step")
    for name, row in best.items():
        speed = f"{num_tokens / row.seconds:,.0f}"
        step = "-" if row.step_ms is None else f"{row.step_ms:.2f}"
        table.add_row(name, f"{num_tokens:,}", f"{row.seconds:.2f}", speed, step)
    console = Console()
    console.print(table)
    ours, theirs = best.values()
    console.print(f"ratio {theirs.seconds / ours.seconds:.2f}")
    if greedy:
        equal = sum(a == b for a, b in zip(ours.responses, theirs.responses, strict=True))
        console.print(f"equal greedy responses {equal} of {len(ours.responses)}")


def main() -> None:
    """Parse the options, run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model; default: a small random Llama")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model")
    parser.add_argument("--width", type=int, default=128, help="hidden size of the random model, a multiple of 64")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(40, 160), metavar=("LOW", "HIGH"))
    parser.add_argument("--response-tokens", type=int, nargs=2, default=(16, 96), metavar=("LOW", "HIGH"))
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, and compares the responses")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch)
        if options.model is None:
            write_small_model(folder, options.layers, options.width)
        ours = load_model(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    jobs = make_jobs(
        options.requests, tuple(options.prompt_tokens), tuple(options.response_tokens), ours.config.vocab_size
    )
    engine = make_engine(ours, jobs)
    weights = {name: parameter.numpy().copy() for name, parameter in ours.named_parameters()}
    sides = {
        "TorchEngine": lambda: run_engine(engine, weights, jobs, options.temperature),
        "transformers generate": lambda: run_generate(theirs, jobs, options.temperature),
    }
    report(take_turns(sides, options.rounds), sum(job.num_tokens for job in jobs), options.temperature == 0)


if __name__ == "__main__":
    main()
