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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM

MAX_TOKENS = 1024  # of a sample; longer ones are truncated
VOCABULARY_SIZE = 2048
HELD_OUT_EVERY = 16  # one document in so many is kept from training


class Document(NamedTuple):
    """One item of the dataset."""

    id: int
    text: str


Encode = Callable[[Document], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents to train on, those held out, and what makes a sample of either.

    Attributes:
        train: documents to train on, with ids that are not consecutive.
        held_out: documents that neither the model nor the tokenizer is trained on.
        encode: the `process_fn` of a loader; workers of any start method can run it.
    """

    train: list[Document]
    held_out: list[Document]
    encode: Encode


def load_corpus() -> Corpus:
    """Return the corpus, with a tokenizer trained on its training part; takes seconds."""
    documents = stdlib_documents()
    train = [document for document in documents if document.id % HELD_OUT_EVERY]
    return Corpus(
        train=train,
        held_out=documents[::HELD_OUT_EVERY],
        encode=partial(encode, train_tokenizer(train)),
    )


def stdlib_documents() -> list[Document]:
    """Return the source of every top-level function and class of the standard library."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                texts.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return list(map(Document._make, enumerate(texts)))


def train_tokenizer(documents: list[Document]) -> ByteLevelBPETokenizer:
    """Return a tokenizer of these documents, whose id 0 is for padding."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        (document.text for document in documents),
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<end>"],
        show_progress=False,
    )
    return tokenizer


def encode(tokenizer: ByteLevelBPETokenizer, document: Document) -> dict[str, Any]:
    """Return a document as a sample. Runs in the workers: only now is its length known.

    Returns:
        `id`: of the document; `input_ids` and `labels`: (L,) int64, of at most `MAX_TOKENS` tokens.
    """
    ids = [*tokenizer.encode(document.text).ids, tokenizer.token_to_id("<end>")]
    input_ids = np.array(ids[:MAX_TOKENS])
    return {"id": document.id, "input_ids": input_ids, "labels": input_ids}


def build_model(*, seed: int, device: str, attention: str = "sdpa") -> LlamaForCausalLM:
    """Return the model with random weights: 0.7 million parameters, in two decoder layers.

    Args:
        seed: of torch's global generators, which this sets.
        device: to make the weights on; with one seed they differ between kinds of devices.
        attention: name of the implementation, as transformers knows it.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    return model
