"""Generation on texts of all lengths: fixed batches, dynabatch with its settings, this library.

All begin with the longest texts, of which `BATCH_SAMPLES` are known to fit. What fits is a number
of tokens here, padding and new ones included: that of this first batch. A batch above it runs out
of memory, and each package halves or cuts it in its own way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from comparing.common import Options, Row, Table, Tables, in_turns, rival, spread
from odb_nodes import PaddingCollate
from odb_nodes.memory import LongestFirst, generate_in_parts
from tiny_lm import VOCABULARY_SIZE, stdlib_texts, train_tokenizer

BATCH_SAMPLES = 16
LONGEST_TOKENS, NEW_TOKENS = 512, 16
DYNABATCH, OURS, FIXED = "dynabatch", "odb_nodes", "fixed batches"


@dataclass
class Batches:
    """What a package made of the texts.

    Attributes:
        name: the contender.
        indices: of the texts of each batch.
        failed: batches that ran out of memory.
        parts: batches that were generated for, after all were cut that ran out of memory.
        seconds: of generating.
        cpu_s: CPU time of it.
    """

    name: str
    indices: list[list[int]]
    failed: int = 0
    parts: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)


class Device:
    """Runs out of memory where a batch of the model has more than so many tokens.

    Args:
        model: the model.
        most_tokens: rows times width, that of what is to be generated included.
    """

    def __init__(self, model: T5ForConditionalGeneration, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.calls = self.failures = 0
        model.encoder.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        rows, width = given["input_ids"].shape
        self.calls += 1
        if rows * (width + NEW_TOKENS) > self.most_tokens:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory, as this benchmark wants it")


def make_model() -> T5ForConditionalGeneration:
    """Return a small T5 with random weights."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY_SIZE,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = T5ForConditionalGeneration(config)
    model.generation_config.decoder_start_token_id = 0
    model.eval()
    return model


def dynabatch_batches(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, batch_size: int, **options: Any
) -> list[list[int]]:
    """Return the batches of dynabatch, each as the indices of its texts."""
    sampler = rival("dynabatch").dynabatch_sampler(
        texts, tokenizer, batch_size, max_input_token_length=LONGEST_TOKENS, **options
    )
    return [list(map(int, batch)) for batch in sampler]


def generate(
    batches: Batches, model: T5ForConditionalGeneration, ids: Sequence[list[int]], device: Device
) -> None:
    """Generate for all batches, with what each package has against a lack of memory."""
    collate = PaddingCollate()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    for indices in batches.indices:
        batch = collate([{"input_ids": ids[index]} for index in indices])
        calls, failures = device.calls, device.failures
        if batches.name != DYNABATCH:
            rows, _ = generate_in_parts(model, batch, **options)
        else:
            rows, _ = rival("dynabatch").generate_with_oom_fallback(
                model, batch, len(batches.indices[0]), torch.device("cpu"), **options
            )
        batches.failed += device.failures > failures
        batches.parts += device.calls - calls - (device.failures - failures)
        batches.outputs |= dict(zip(indices, rows.tolist(), strict=True))
    batches.seconds = time.perf_counter() - start_s
    batches.cpu_s = time.process_time() - start_cpu_s


def run(
    name: str,
    texts: list[str],
    tokenizer: PreTrainedTokenizerFast,
    ids: list[list[int]],
    model: T5ForConditionalGeneration,
    device: Device,
) -> Batches:
    """Make batches of the texts in one way, and generate for them."""
    if name == DYNABATCH:
        indices = dynabatch_batches(texts, tokenizer, BATCH_SAMPLES)
    elif name == FIXED:
        order = sorted(range(len(ids)), key=lambda at: -len(ids[at]))
        indices = [order[at : at + BATCH_SAMPLES] for at in range(0, len(ids), BATCH_SAMPLES)]
    else:
        longest_first = LongestFirst(
            ids,
            device.most_tokens,
            new_tokens=NEW_TOKENS,
            process_fn=lambda one: {"input_ids": one},
        )
        indices = [found for _, found in longest_first]
    batches = Batches(name, indices)
    generate(batches, model, ids, device)
    return batches


def tables(options: Options) -> Tables:
    """Yield the table."""
    torch.set_num_threads(1)
    texts = stdlib_texts()[: 200 if options.quick else 1500]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts)._tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    ids = [tokenizer(text).input_ids[:LONGEST_TOKENS] for text in texts]
    most_tokens = BATCH_SAMPLES * (max(map(len, ids)) + NEW_TOKENS)
    model = make_model()
    device = Device(model, most_tokens)
    names = (FIXED, DYNABATCH, OURS)
    found = in_turns(
        {name: partial(run, name, texts, tokenizer, ids, model, device) for name in names},
        options.rounds,
    )
    base = [one.cpu_s for one in found[FIXED]]
    yield Table(
        "Generation",
        f"{len(texts):,} functions and classes of the standard library, longest first, at most "
        f"{LONGEST_TOKENS} tokens; {NEW_TOKENS} new ones each, by a tiny T5; a batch of the "
        f"{BATCH_SAMPLES} longest is known to fit, and one of more tokens than this fails.",
        [
            row_of(name, runs, list(map(len, ids)), most_tokens, base)
            for name, runs in found.items()
        ],
    )


def row_of(
    name: str, runs: list[Batches], lengths: list[int], most_tokens: int, base: list[float]
) -> Row:
    """Return the row of a contender."""
    last = runs[-1]
    shapes = [(len(some), max(lengths[one] for one in some)) for some in last.indices]
    padded = sum(rows * width for rows, width in shapes)
    largest = max(rows * (width + NEW_TOKENS) for rows, width in shapes) / most_tokens
    return {
        "": name,
        "batches": f"{len(shapes)}",
        "padding": f"{1 - sum(lengths) / padded:.3f}",
        "largest / room": f"{largest:.2f}",
        "failed": f"{last.failed}",
        "parts": f"{last.parts}",
        "seconds": spread([one.seconds for one in runs], 1),
        "times the first, by CPU time": spread(
            [first / one.cpu_s for first, one in zip(base, runs, strict=True)], 2
        ),
    }
