"""`seed-async sft`: Stage 1, supervised fine-tuning on demonstrations and analyses.

(Algorithm specification, section 8.)

Consumes the JSON lines of a data folder. Waits for nothing. Produces a Hugging Face folder that can act and analyse.
Stops after its epochs. Loss on response tokens and their end, and on prompts as far as `prompt_loss_weight` says;
a row over the context length is an error.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from seed_async.layouts import transcript_row
from seed_async.learner.algorithms.terms import NonFiniteError
from seed_async.learner.export import export_policy
from seed_async.learner.packing import plan_micro_batches
from seed_async.learner.scoring import load_policy, max_context_tokens, score
from seed_async.text import ChatTokenizer
from seed_async.topology import Stage1, Topology

BETAS = (0.9, 0.95)
REPORT_INTERVAL_S = 5.0


class RowTooLongError(ValueError):
    """A training row over the model's context length."""


class ChatRow(NamedTuple):
    """One training row: `token_ids` int32 [T]; `response_mask` bool [T], True on the responses to learn.

    `prompt_mask` bool [T] is True on prompt tokens but the first, which nothing predicts. A response that is only
    shown, such as a random command of a demonstration, is in neither.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    prompt_mask: np.ndarray

    def weights(self, prompt_weight: float) -> np.ndarray:
        """The loss weight of each token, float32 [T]."""
        return (self.response_mask + prompt_weight * self.prompt_mask).astype(np.float32)


def chat_row(messages: Sequence[dict[str, Any]], tokenizer: ChatTokenizer) -> ChatRow:
    """Tokenise a chat exactly as an episode is: prompts by the template, each response followed by its end."""
    prompts, responses, trained = [], [], []
    end = np.array(tokenizer.eos_ids[:1], dtype=np.int32)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            responses.append(np.concatenate([tokenizer.encode(message["content"]), end]))
            trained.append(bool(message["train"]))
        elif index == 0:
            prompts.append(tokenizer.first_prompt(message["content"]))
        else:
            prompts.append(tokenizer.next_prompt(message["content"], after_eos=True))
    row = transcript_row(prompts, responses)
    prompt_mask = ~row.response_mask
    prompt_mask[0] = False
    response_mask = row.response_mask.copy()
    response_mask[response_mask] = np.array(trained)[row.turn_index]
    return ChatRow(row.token_ids, response_mask, prompt_mask)


def load_rows(data: Path, tokenizer: ChatTokenizer, max_tokens: int) -> list[ChatRow]:
    """Read every row that has something to learn. Raises RowTooLongError, naming the file and line."""
    rows = []
    for path in sorted(data.glob("*.jsonl")):
        with path.open() as file:
            for number, line in enumerate(file, start=1):
                row = chat_row(json.loads(line)["messages"], tokenizer)
                if row.token_ids.size > max_tokens:
                    raise RowTooLongError(f"{path}:{number}: {row.token_ids.size} tokens, the context has {max_tokens}")
                if row.response_mask.any():
                    rows.append(row)
    if not rows:
        raise ValueError(f"{data} holds no training rows")
    return rows


def learning_rate(step: int, total: int, settings: Stage1) -> float:
    """Linear warm-up over `warmup_share` of the steps, then a cosine to zero."""
    warmup = max(1, round(settings.warmup_share * total))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _loss_sums(
    model: PreTrainedModel, rows: Sequence[ChatRow], token_budget: int, prompt_weight: float
) -> Iterator[torch.Tensor]:
    """Yield the weighted sum of negative log-probs of each micro-batch, so that one graph lives at a time."""
    for micro in plan_micro_batches(rows, token_budget):
        batch = [rows[index] for index in micro]
        weights = [row.weights(prompt_weight) for row in batch]
        scored = [row._replace(response_mask=weight > 0) for row, weight in zip(batch, weights, strict=True)]
        logprob = score(model, scored, temperature=1.0, token_budget=token_budget).logprob
        weight_of_each = torch.from_numpy(np.concatenate([weight[weight > 0] for weight in weights]))
        yield -(logprob * weight_of_each.to(logprob.device)).sum()


def _train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: Sequence[ChatRow], settings: Stage1
) -> float:
    tokens = float(sum(row.weights(settings.prompt_loss_weight).sum() for row in rows))
    optimizer.zero_grad()
    total = 0.0
    for loss_sum in _loss_sums(model, rows, settings.token_budget, settings.prompt_loss_weight):
        (loss_sum / tokens).backward()  # type: ignore[no-untyped-call]  # the library has no annotation
        total += float(loss_sum.detach()) / tokens
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not (math.isfinite(total) and math.isfinite(float(norm))):
        raise NonFiniteError(f"SFT loss {total}, gradient norm {float(norm)}")
    optimizer.step()
    return total


@torch.no_grad()
def _validate(model: PreTrainedModel, rows: Sequence[ChatRow], token_budget: int) -> float:
    tokens = sum(int(row.response_mask.sum()) for row in rows)
    return sum(float(loss) for loss in _loss_sums(model, rows, token_budget, 0.0)) / tokens


def train(topology: Topology, model_dir: Path, data: Path, out: Path) -> None:
    """Fine-tune `model_dir` on the rows of `data` and write the result, tokenizer included, to `out`."""
    settings = topology.stage1
    torch.set_num_threads(settings.threads)
    torch.manual_seed(topology.run.seed)
    tokenizer = ChatTokenizer.load(model_dir)
    model = load_policy(model_dir)
    model.to(topology.roles.learner.device)  # type: ignore[arg-type]  # the library's decorator hides the signature
    rows = load_rows(data, tokenizer, max_context_tokens(model))
    rng = np.random.default_rng([topology.run.seed, 2])
    order = rng.permutation(len(rows))
    num_validation = max(1, round(settings.validation_share * len(rows)))
    validation, training = [rows[i] for i in order[:num_validation]], [rows[i] for i in order[num_validation:]]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=settings.weight_decay, fused=True
    )
    steps_an_epoch = -(-len(training) // settings.batch_rows)
    total_steps = steps_an_epoch * settings.epochs
    started_s = reported_s = time.monotonic()
    with (data / "sft_metrics.csv").open("w") as metrics:
        metrics.write("step,loss,lr\n")
        for step in range(total_steps):
            if step % steps_an_epoch == 0:
                shuffled = rng.permutation(len(training))
            start = step % steps_an_epoch * settings.batch_rows
            batch = [training[i] for i in shuffled[start : start + settings.batch_rows]]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total_steps, settings)
            loss = _train_step(model, optimizer, batch, settings)
            metrics.write(f"{step},{loss:.6f},{optimizer.param_groups[0]['lr']:.6g}\n")
            if time.monotonic() - reported_s > REPORT_INTERVAL_S or step == total_steps - 1:
                reported_s = time.monotonic()
                print(f"sft step {step + 1}/{total_steps}: loss {loss:.3f}, {reported_s - started_s:.0f} s", flush=True)
    validation_loss = _validate(model, validation, settings.token_budget)
    print(f"sft: validation loss {validation_loss:.3f} over {len(validation)} rows -> {out}", flush=True)
    export_policy(model, model_dir, out)
