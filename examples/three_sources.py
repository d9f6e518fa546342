"""Three small sources made on the spot, and what makes samples of each: nothing is downloaded.

    sources = make_sources(folder)
    process_fn = sources.functions()

All text is Python's standard library, in three forms: functions as chats, in a JSON Lines file, of
which only the answer is learned; docstrings as captions, a list; and pages to read, whose letters
are smudged at random whenever they are processed.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from odb_nodes import JsonlSource
from tiny_lm import MAX_TOKENS, Document, stdlib_documents, train_tokenizer

PAGE_LETTERS, SMUDGED = 300, 0.1


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources and a tokenizer; plain data, which can be sent to another process."""

    tokenizer: ByteLevelBPETokenizer
    chats: Path
    captions: list[Document]
    pages: list[Document]

    def datasets(self) -> dict[str, Any]:
        """Return the datasets by name."""
        return {"chats": JsonlSource(self.chats), "captions": self.captions, "pages": self.pages}

    def functions(self) -> dict[str, Callable[[Any], Any]]:
        """Return by name what makes a sample of an item; workers of any start method can run it."""
        functions: dict[str, Callable[..., Any]] = {
            "chats": chat_sample,
            "captions": caption_sample,
            "pages": page_sample,
        }
        return {name: partial(function, self.tokenizer) for name, function in functions.items()}


def make_sources(folder: Path) -> Sources:
    """Write and return the sources, and a tokenizer trained on them; takes seconds."""
    documents, captions = stdlib_documents(), []
    path = folder / "chats.jsonl"
    with path.open("w") as chats:
        for document in documents:
            node: Any = ast.parse(document.text).body[0]
            chat = {"id": document.id, "question": f"Write {node.name}", "answer": document.text}
            chats.write(json.dumps(chat) + "\n")
            captions += [ast.get_docstring(part) or "" for part in (node, *node.body) if _has(part)]
    texts = filter(None, captions)
    first = documents[-1].id + 1
    return Sources(
        tokenizer=train_tokenizer(documents),
        chats=path,
        captions=[Document(first + n, text) for n, text in enumerate(texts)],
        pages=[Document(-1 - one.id, one.text[:PAGE_LETTERS]) for one in documents],
    )


def _has(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def chat_sample(tokenizer: ByteLevelBPETokenizer, chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat as a sample, in one of several templates."""
    question = random.choice(("Q: {}\nA: ", "{}, please.\n", "# {}\n")).format(chat["question"])
    return _sample(tokenizer, chat["id"], question, chat["answer"])


def caption_sample(tokenizer: ByteLevelBPETokenizer, caption: Document) -> dict[str, Any]:
    """Return a caption as a sample."""
    return _sample(tokenizer, caption.id, "", caption.text)


def page_sample(tokenizer: ByteLevelBPETokenizer, page: Document) -> dict[str, Any]:
    """Return a smudged page, and what it reads, as a sample."""
    smudged = np.random.random(len(page.text)) < SMUDGED
    seen = "".join("?" if bad else letter for letter, bad in zip(page.text, smudged, strict=True))
    return _sample(tokenizer, page.id, f"{seen}\nreads\n", page.text)


def _sample(tokenizer: Any, id: int, given: str, learned: str) -> dict[str, Any]:
    prompt, answer = tokenizer.encode(given).ids, tokenizer.encode(learned).ids
    input_ids = np.array([*prompt, *answer, tokenizer.token_to_id("<end>")])[:MAX_TOKENS]
    labels = np.where(np.arange(len(input_ids)) < len(prompt), -100, input_ids)
    return {"id": id, "input_ids": input_ids, "labels": labels}
