"""The learner's scoring against the usual padded forward pass, and one whole update: time and peak memory.

`scoring` (the default) is what an update does with both contexts of a trajectory: forward and backward of the plain
one, forward of the skill-augmented one. `packed` is `learner.scoring`. `padded` is the usual way: rows padded in their
order of arrival, logits at every position, a log-softmax in float32. Tokens are those of both contexts before padding
and before sharing. `step` is `learner.step.update` with AdamW, a reference model and skills. Each measurement has a
process of its own, so that its peak memory is its own; the round with the least CPU time counts. On a host that others
use, compare CPU seconds: they do not count the time spent waiting for a core. Run it with OMP_WAIT_POLICY=PASSIVE.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from seed_async.layouts import TokenRow
from seed_async.learner.batch import LossConfig
from seed_async.learner.packing import plan_micro_batches
from seed_async.learner.scoring import ComputeDtype, score, use_activation_checkpointing
from seed_async.learner.step import update
from seed_async.tools.bench_rows import SHARED_TOKENS, Contexts, make_batch, make_contexts, make_model

MIB = float(1 << 20)


class Side(NamedTuple):
    """One way to do it."""

    way: str
    dtype: ComputeDtype
    recompute: bool = False

    @property
    def title(self) -> str:
        """The row's name in the table."""
        return f"{self.way}, {self.dtype}" + (", activations recomputed" if self.recompute else "")


SCORING_SIDES = (
    Side("padded", "float32"),
    Side("packed", "float32"),
    Side("packed", "float32", recompute=True),
    Side("padded", "bfloat16"),
    Side("packed", "bfloat16"),
)
STEP_SIDES = (Side("packed", "float32"), Side("packed", "float32", recompute=True), Side("packed", "bfloat16"))


class Measured(NamedTuple):
    """One side: seconds of its best round, wall and CPU, peak memory and that before it, and seconds by phase."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    before_mib: float
    phases: dict[str, float]


def padded_logprobs(
    model: PreTrainedModel, rows: Sequence[TokenRow], device: torch.device, dtype: ComputeDtype
) -> torch.Tensor:
    """Log-probs of the response tokens of one padded batch, the usual way; float32 [R]."""
    width = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    seen, wanted = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for index, row in enumerate(rows):
        size = len(row.token_ids)
        ids[index, :size] = torch.from_numpy(row.token_ids)
        wanted[index, :size] = torch.from_numpy(row.response_mask)
        seen[index, :size] = 1
    ids, seen, wanted = ids.to(device), seen.to(device), wanted.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    everywhere = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return everywhere.gather(2, ids[:, 1:, None])[..., 0][wanted[:, 1:]]


def score_padded(
    model: PreTrainedModel, contexts: Sequence[Contexts], options: argparse.Namespace, dtype: ComputeDtype
) -> None:
    """Both contexts in padded batches of a fixed number of rows."""
    device = torch.device(options.device)
    for start in range(0, len(contexts), options.padded_rows):
        batch = contexts[start : start + options.padded_rows]
        with torch.no_grad():
            padded_logprobs(model, [each.skill for each in batch], device, dtype)
        padded_logprobs(model, [each.plain for each in batch], device, dtype).sum().backward()  # type: ignore[no-untyped-call]


def score_packed(
    model: PreTrainedModel, contexts: Sequence[Contexts], options: argparse.Namespace, dtype: ComputeDtype
) -> None:
    """Both contexts as an update scores them."""
    settings: dict[str, Any] = {"temperature": 1.0, "token_budget": options.token_budget, "compute_dtype": dtype}
    with torch.no_grad():
        score(model, [each.skill for each in contexts], **settings)
    plain = [each.plain for each in contexts]
    for micro in plan_micro_batches(plain, options.token_budget):
        score(model, plain[micro.start : micro.stop], **settings).logprob.sum().backward()  # type: ignore[no-untyped-call]


def measure_scoring(side: Side, options: argparse.Namespace) -> Measured:
    """The rounds of one side, in this process."""
    model = make_model(options.model, packed=side.way == "packed").to(options.device)
    if side.recompute:
        use_activation_checkpointing(model)
    contexts = make_contexts(options.rows, model.config.vocab_size, shared_tokens=options.shared_tokens)
    run = score_packed if side.way == "packed" else score_padded

    def one_round() -> dict[str, float]:
        run(model, contexts, options, side.dtype)
        model.zero_grad(set_to_none=True)
        return {}

    run(model, contexts[:2], options, side.dtype)
    return _rounds(one_round, options)


def measure_step(side: Side, options: argparse.Namespace) -> Measured:
    """One update a round, in this process."""
    policy = make_model(options.model, packed=True).to(options.device)
    reference = make_model(options.model, packed=True).to(options.device).requires_grad_(False)
    if side.recompute:
        use_activation_checkpointing(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    contexts = make_contexts(options.rows, policy.config.vocab_size, shared_tokens=options.shared_tokens)
    batch = make_batch(contexts)
    config = LossConfig(token_budget=options.token_budget, compute_dtype=side.dtype)

    def one_round() -> dict[str, float]:
        metrics = update(batch, config, policy, reference, optimizer)
        return {name: value for name, value in metrics.items() if name.startswith("seconds_")}

    update(make_batch(contexts[:2]), config, policy, reference, optimizer)  # from here on AdamW holds its moments
    return _rounds(one_round, options)


def _rounds(one_round: Callable[[], dict[str, float]], options: argparse.Namespace) -> Measured:
    before, rounds = _peak_mib(options.device), []
    for _ in range(options.rounds):
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        phases = one_round()
        if options.device != "cpu":
            torch.cuda.synchronize()
        rounds.append((time.process_time() - cpu_started_s, time.perf_counter() - started_s, phases))
    cpu_seconds, seconds, phases = min(rounds, key=lambda each: each[:2])
    return Measured(seconds, cpu_seconds, _peak_mib(options.device), before, phases)


def _peak_mib(device: str) -> float:
    """Peak memory so far: of the process, or of the device where there is one."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def model_flops(model: PreTrainedModel, contexts: Sequence[Contexts]) -> float:
    """Operations that the task asks for: 6 a weight and token of the plain context, 2 of the skill's, and attention.

    A causal token at position t does 4 t d a layer forward (d the width of all heads), and twice that backward. The
    vocabulary projection counts at response tokens only; the embedding is a look-up. Recomputing is not counted.
    """
    config = model.config.get_text_config()
    head = config.vocab_size * config.hidden_size
    tied = bool(config.tie_word_embeddings)
    layers = model.num_parameters() - (1 if tied else 2) * head
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    total = 0.0
    for row, times in [(each.plain, 3) for each in contexts] + [(each.skill, 1) for each in contexts]:
        size, sampled = len(row.token_ids), int(row.response_mask.sum())
        attention = 2 * size * size * width * config.num_hidden_layers
        total += times * (2 * layers * size + 2 * head * sampled + attention)
    return total


def run_side(side: Side, arguments: Sequence[str]) -> Measured:
    """Measure one side in a fresh process. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "seed_async.tools.bench_scoring", *arguments, "--measure", json.dumps(side)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured = Measured(*json.loads(done.stdout.splitlines()[-1]))
    print(
        f"{side.title}: {measured.seconds:.1f} s, {measured.cpu_seconds:.1f} CPU s, peak {measured.peak_mib:,.0f} MiB"
    )
    return measured


def report(options: argparse.Namespace, found: dict[Side, Measured]) -> None:
    """Print the workload and the table; ratios are to the padded way in float32 where it was measured."""
    model = make_model(options.model, packed=True)
    contexts = make_contexts(options.rows, model.config.vocab_size, shared_tokens=options.shared_tokens)
    plain, skill = [each.plain for each in contexts], [each.skill for each in contexts]
    num_plain, num_skill = (sum(len(row.token_ids) for row in rows) for rows in (plain, skill))
    sampled = sum(int(row.response_mask.sum()) for row in plain)
    print(
        f"{options.model}: {model.num_parameters() / 1e6:.1f} M parameters on {options.device}:{options.threads}, "
        f"{options.rows} trajectories, {num_plain:,} tokens in the plain and {num_skill:,} in the skill context, "
        f"{sampled / num_plain:.0%} sampled; siblings share {options.shared_tokens} tokens; token budget "
        f"{options.token_budget:,}"
    )
    table = Table("way", "seconds", "CPU s", "tokens/s", "times (CPU s)", "peak MiB", "of the peak", "before MiB")
    base = found.get(SCORING_SIDES[0]) if options.mode == "scoring" else None
    console = Console(width=140)
    for side, row in found.items():
        times, share = ("-", "-")
        if base is not None:
            times = f"{base.seconds / row.seconds:.2f} ({base.cpu_seconds / row.cpu_seconds:.2f})"
            share = f"{row.peak_mib / base.peak_mib:.2f}"
        speed = f"{(num_plain + num_skill) / row.seconds:,.0f}"
        numbers = (f"{row.seconds:.1f}", f"{row.cpu_seconds:.1f}", speed, times, f"{row.peak_mib:,.0f}", share)
        table.add_row(side.title, *numbers, f"{row.before_mib:,.0f}")
    console.print(table)
    for side, row in found.items():
        if row.phases:
            phases = ", ".join(f"{name.removeprefix('seconds_')} {value:.1f}" for name, value in row.phases.items())
            console.print(f"{side.title}: {phases} s")
    if options.device != "cpu":
        for side, row in found.items():
            used = model_flops(model, contexts) / row.seconds / (1e12 * options.peak_tflops)
            console.print(f"{side.title}: {used:.1%} of {options.peak_tflops:,.0f} TFLOP/s")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=("scoring", "step"), default="scoring")
    parser.add_argument("--model", default="llama-15m", help="llama-15m, smollm2-135m or a folder")
    parser.add_argument("--rows", type=int, default=64, help="trajectories")
    parser.add_argument("--shared-tokens", type=int, default=SHARED_TOKENS, help="that the siblings of a group share")
    parser.add_argument("--token-budget", type=int, default=4096, help="of a packed micro-batch")
    parser.add_argument("--padded-rows", type=int, default=8, help="of a padded batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the device, for the model FLOPs use")
    parser.add_argument("--only", default="", help="measure the ways whose name contains this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure every side in a process of its own and print the table; or, in such a process, measure one."""
    arguments = sys.argv[1:]
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    sides, measure = (SCORING_SIDES, measure_scoring) if options.mode == "scoring" else (STEP_SIDES, measure_step)
    if options.measure:
        print(json.dumps(measure(Side(*json.loads(options.measure)), options)))
        return
    report(options, {side: run_side(side, arguments) for side in sides if options.only in side.title})


if __name__ == "__main__":
    main()
