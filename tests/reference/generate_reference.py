"""Generation the slow way: no cache, no batch, plain attention, one whole forward pass for each token."""

import copy

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from seed_async.actors.engines.attention import ATTENTION_NAME, register_slotted_attention
from seed_async.adapters import adapter_parameters, add_adapters
from seed_async.topology import Lora

VOCABULARY = 61
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_model(
    family: str = "llama", seed: int = 0, *, tied: bool = False, head_dim: int = 8, context: int = 256
) -> PreTrainedModel:
    """Two layers with grouped heads and the engine's attention; weights large enough that argmaxes vary."""
    register_slotted_attention()
    torch.manual_seed(seed)
    config = FAMILIES[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model


def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model with the attention that transformers itself calls eager."""
    config = copy.deepcopy(model.config)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    return twin


def weights_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of a weight publication: copies of the named parameters."""
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def add_random_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> dict[str, np.ndarray]:
    """Put adapters that change much into `model`; the tensors of their publication."""
    add_adapters(model, lora, seed)
    generator = torch.Generator().manual_seed(seed)
    parameters = adapter_parameters(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_(std=0.3, generator=generator)
    return {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


def next_logprobs(twin: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs float64 [V] of the token after `ids`."""
    with torch.no_grad():
        logits = twin(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, -1].double().numpy()
    scaled = logits / temperature
    return scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())


def greedy_reference(twin: PreTrainedModel, prompt: np.ndarray, num_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy response of exactly `num_tokens` tokens and its log-probs at temperature 1."""
    ids, scores = prompt.tolist(), []
    for _ in range(num_tokens):
        logprobs = next_logprobs(twin, ids)
        ids.append(int(logprobs.argmax()))
        scores.append(float(logprobs.max()))
    return ids[len(prompt) :], scores


def sampled_reference(
    twin: PreTrainedModel, prompt: np.ndarray, num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """The response that inverse-CDF sampling draws with one PCG64 uniform number a token."""
    draws, ids = np.random.Generator(np.random.PCG64(seed)), prompt.tolist()
    for _ in range(num_tokens):
        edges = np.exp(next_logprobs(twin, ids, temperature)).cumsum()
        ids.append(int(np.searchsorted(edges, draws.random() * edges[-1], side="right")))
    return ids[len(prompt) :]


def score_reference(
    twin: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of a given response, each token after everything before it."""
    ids = prompt.tolist() + response.tolist()
    starts = range(len(prompt), len(ids))
    return np.array([next_logprobs(twin, ids[:at], temperature)[ids[at]] for at in starts])
