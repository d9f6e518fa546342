"""A tiny causal language model and text for it, made on the spot: nothing is downloaded.

    from tiny_lm import build_model, load_corpus

The text is every top-level function and class of Python's standard library: a few tokens to many
thousands, so that lengths have a long tail. The tokenizer is trained on it. With one Python and one
set of packages all this is the same in every process, so the ranks of a job may each make their
own.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM

MAX_TOKENS = 1024  # of a sample; longer ones are truncated
VOCABULARY_SIZE = 2048
HELD_OUT_EVERY = 16  # one text in so many is kept from training


class Corpus(NamedTuple):
    """The texts to train on, those held out, and the function that makes a sample of either."""

    train: list[str]
    held_out: list[str]
    encode: Callable[[str], dict[str, Any]]


def load_corpus(every: int = 1) -> Corpus:
    """Return the corpus, with a tokenizer trained on its training part; takes seconds.

    Args:
        every: keep one training text in `every`.
    """
    texts = stdlib_texts()
    train = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY][::every]
    return Corpus(train, texts[::HELD_OUT_EVERY], partial(encode, train_tokenizer(train)))


def stdlib_texts() -> list[str]:
    """Return the source of every top-level function and class of the standard library."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                texts.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return texts


def train_tokenizer(texts: list[str]) -> ByteLevelBPETokenizer:
    """Return a tokenizer trained on these texts, whose id 0 is for padding."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<end>"],
        show_progress=False,
    )
    return tokenizer


def encode(tokenizer: ByteLevelBPETokenizer, text: str) -> dict[str, Any]:
    """Return a text as a sample. Runs in the workers: only now is its length known.

    Returns:
        `input_ids` and `labels`: (L,) int64, of at most `MAX_TOKENS` tokens.
    """
    ids = [*tokenizer.encode(text).ids, tokenizer.token_to_id("<end>")]
    input_ids = np.array(ids[:MAX_TOKENS])
    return {"input_ids": input_ids, "labels": input_ids}


def build_model(
    *,
    seed: int = 0,
    device: str = "cpu",
    attention: str = "sdpa",
    hidden_size: int = 128,
    layers: int = 2,
    max_tokens: int = MAX_TOKENS,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> LlamaForCausalLM:
    """Return the model with random weights: 0.7 million parameters by default.

    Args:
        seed: the seed for torch's global generators, which this sets.
        device: the device of the weights; with one seed they differ between kinds of devices.
        attention: the name of the attention implementation, as transformers knows it.
        hidden_size: the width of the model, a multiple of 32 below 1,024 and of 64 from there on;
            so wide is an attention head.
        layers: number of decoder layers.
        max_tokens: the longest sample.
        vocabulary_size: rows of the embedding, of which the tokenizer uses `VOCABULARY_SIZE`.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // (32 if hidden_size < 1024 else 64),
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    return model
