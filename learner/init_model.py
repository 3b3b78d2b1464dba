"""`seed-async init-model`: a small Llama with its own tokenizer and chat template, as a Hugging Face folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from seed_async.topology import TinyModel, Topology

END, PAD = "<|end|>", "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<action>", "</action>")
"""Ordinary text to the decoder, but one id each: every response holds them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _texts(corpus: Path) -> Iterator[str]:
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open() as file:
            for line in file:
                yield from (message["content"] for message in json.loads(line)["messages"])


def train_tokenizer(corpus: Path, vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE on the messages of the JSON lines in `corpus`; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(TAGS),
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def build_model(settings: TinyModel, tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Return a randomly initialised Llama with tied embeddings; the same seed gives the same weights."""
    torch.manual_seed(seed)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=settings.max_context_tokens,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, pad
    return model


def init_model(topology: Topology, out: Path, corpus: Path) -> None:
    """Write a new model to `out`, its tokenizer trained on the Stage 1 data in `corpus`.

    Raises ValueError when the topology names an existing model, or when `corpus` holds no data.
    """
    if topology.model.init is None:
        raise ValueError("init-model needs model.init in the topology; model.path names an existing checkpoint")
    if not any(corpus.glob("*.jsonl")):
        raise ValueError(f"{corpus} holds no *.jsonl: make the data first (seed-async data demonstrations)")
    tokenizer = train_tokenizer(corpus, topology.model.init.vocabulary_size)
    model = build_model(topology.model.init, tokenizer, topology.run.seed)
    model.save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    print(f"model: {model.num_parameters() / 1e6:.2f} M parameters, {tokenizer.get_vocab_size()} tokens -> {out}")
