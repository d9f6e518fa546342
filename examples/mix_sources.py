"""Mix three sources by weight, each with its own processing.

    python examples/mix_sources.py                # about a minute on 2 cores
    python examples/mix_sources.py --by tokens    # weights are shares of tokens
    python examples/mix_sources.py --resume       # go on from the last checkpoint

All text is Python's standard library, in three forms: functions as chats in a JSON Lines file, of
which only the answer is learned; docstrings as captions, a list; and pages to read, whose letters
are smudged at random whenever they are processed. A tiny language model trains on the mixture.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odb_nodes import Checkpoints, JsonlSource, Mixing, ODBDataLoader, pop_step_info
from odb_nodes.tools.source_report import SourceReport
from tiny_lm import MAX_TOKENS, build_model, stdlib_texts, train_tokenizer

WEIGHTS = {"chats": 0.5, "captions": 0.3, "pages": 0.2}


def make_datasets(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Return the sources by name."""
    nodes: list[Any] = [ast.parse(text).body[0] for text in texts]
    with (folder / "chats.jsonl").open("w") as chats:
        for node, text in zip(nodes, texts, strict=True):
            chats.write(json.dumps({"question": f"Write {node.name}", "answer": text}) + "\n")
    return {
        "chats": JsonlSource(folder / "chats.jsonl"),
        "captions": list(filter(None, map(ast.get_docstring, nodes))),
        "pages": [text[:300] for text in texts],
    }


def chat_sample(tokenizer: Any, chat: dict[str, str]) -> dict[str, Any]:
    """Return a chat in one of several templates; random numbers here are exact on resume, too."""
    template = random.choice(("Q: {}\nA: ", "{}, please.\n", "# {}\n"))
    return make_sample(tokenizer, template.format(chat["question"]), chat["answer"])


def caption_sample(tokenizer: Any, caption: str) -> dict[str, Any]:
    """Return a caption."""
    return make_sample(tokenizer, "", caption)


def page_sample(tokenizer: Any, page: str) -> dict[str, Any]:
    """Return a smudged page, and what it reads."""
    smudged = np.random.random(len(page)) < 0.1
    seen = "".join("?" if bad else letter for letter, bad in zip(page, smudged, strict=True))
    return make_sample(tokenizer, f"{seen}\nreads\n", page)


def make_sample(tokenizer: Any, given: str, learned: str) -> dict[str, Any]:
    """Return a sample in which `learned` is supervised."""
    prompt, answer = tokenizer.encode(given).ids, tokenizer.encode(learned).ids
    input_ids = np.array([*prompt, *answer, tokenizer.token_to_id("<end>")])[:MAX_TOKENS]
    labels = np.where(np.arange(len(input_ids)) < len(prompt), -100, input_ids)
    return {"input_ids": input_ids, "labels": labels}


def main() -> None:
    """Train, save a checkpoint every few steps, and report the shares of the sources."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=("samples", "tokens"), default="samples")
    parser.add_argument("--steps", type=int, default=60, help="most steps (%(default)s)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/mix_sources"), help="folder")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = stdlib_texts()
    tokenizer = train_tokenizer(texts)
    functions: dict[str, Callable[..., dict[str, Any]]]
    functions = {"chats": chat_sample, "captions": caption_sample, "pages": page_sample}
    loader = ODBDataLoader(
        make_datasets(options.output, texts),
        process_fn={name: partial(make, tokenizer) for name, make in functions.items()},
        weights=Mixing(weights=WEIGHTS, by=options.by, stop="first_exhausted"),
        token_budget=2048,
        window=32,
        num_workers=2,
        seed=0,
    )
    model, report = build_model(device=device), SourceReport()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    parts |= {"loader": loader, "report": report}
    checkpoints = Checkpoints(options.output / "checkpoints", parts)
    step = checkpoints.load() if options.resume else 0
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            report.add(info)
            inputs = {key: value.to(device) for key, value in batch.items()}
            loss = model(**inputs).loss * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step}: loss {loss:.6f}, {info.local_samples} samples")
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break
    print(f"\n{report.table(WEIGHTS)}\n\nWeights are shares of {options.by} read.")


if __name__ == "__main__":
    main()
