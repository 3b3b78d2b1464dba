"""`seed-async init-model`: a small Llama with its own tokenizer and chat template, as a Hugging Face folder."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, groupby
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


_BOUNDARY = re.compile("|".join([*TAGS, r"\n", r"\d+"]))
MAX_PHRASES = 96
"""More phrases save little: the rarest of these already stands in few messages."""
TEMPLATE_SHARE = 0.5
"""A word of the environment's sentences stands in most rows of a file; the name of a thing does not."""


def _texts(corpus: Path) -> Iterator[str]:
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open() as file:
            for line in file:
                yield from (message["content"] for message in json.loads(line)["messages"])


def template_phrases(corpus: Path) -> list[str]:
    """Return the runs of words that the environment's sentences are made of, those that save most tokens first.

    As single tokens they halve the length of an episode. They never hold a line break, a tag, a digit or the name of a
    thing, which the policy has to copy from an observation into an action.
    """
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    saved: Counter[str] = Counter()
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open() as file:
            rows = [
                [
                    [part[slice(*span)] for _, span in splitter.pre_tokenize_str(part)]
                    for message in json.loads(line)["messages"]
                    for part in _BOUNDARY.split(message["content"])
                ]
                for line in file
            ]
        frequency = Counter(word for row in rows for word in set(chain.from_iterable(row)))
        template = {word for word, number in frequency.items() if number >= TEMPLATE_SHARE * len(rows)}
        for part in chain.from_iterable(rows):
            for joined, run in groupby(part, template.__contains__):
                words = list(run)
                if joined and len(words) > 1 and not words[-1][-1].isspace():
                    saved["".join(words)] += len(words) - 1
    return [phrase for phrase, _ in saved.most_common(MAX_PHRASES)]


def train_tokenizer(corpus: Path, vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE on the messages of the JSON lines in `corpus`; any text can be encoded."""
    phrases = template_phrases(corpus)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(TAGS) - len(phrases),
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (*TAGS, *phrases)])
    return tokenizer


def build_model(settings: TinyModel, tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Return a randomly initialised Llama with tied embeddings; the same seed gives the same weights."""
    torch.manual_seed(seed)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]  # the library has no annotation
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=settings.max_context_tokens,
            # The library's 0.02 suits wide models; a narrow one trains several times faster from unit-variance layers.
            initializer_range=settings.hidden_size**-0.5,
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
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # the library has no annotation
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    print(f"model: {model.num_parameters() / 1e6:.2f} M parameters, {tokenizer.get_vocab_size()} tokens -> {out}")
