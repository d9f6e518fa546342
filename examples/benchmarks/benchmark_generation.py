"""Generation on texts of all lengths, beside dynabatch with its own settings, on the same texts.

    pip install dynabatch==0.2.23
    python examples/benchmarks/benchmark_generation.py
    python examples/benchmarks/benchmark_generation.py --texts 500 --without-generating

Both begin with the longest texts, of which `--batch-size` are known to fit. What fits is a number
of tokens here, padding and new ones included: that of this first batch. A batch above it runs out
of memory, and each package halves or cuts it in its own way. The texts are the functions and
classes of Python's standard library, the model is a small T5 with random weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from odb_nodes import PaddingCollate
from odb_nodes.memory import LongestFirst, generate_in_parts
from tiny_lm import VOCABULARY_SIZE, stdlib_texts, train_tokenizer

LONGEST_TOKENS, NEW_TOKENS = 512, 16
DYNABATCH, OURS = "dynabatch", "odb_nodes"


@dataclass
class Batches:
    """What a package made of the texts.

    Attributes:
        name: the package.
        indices: of the texts of each batch.
        failed: batches that ran out of memory.
        parts: batches that were generated for, after all were cut that ran out of memory.
        seconds: of generating.
    """

    name: str
    indices: list[list[int]]
    failed: int = 0
    parts: int = 0
    seconds: float = 0.0
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
    sampler = import_module("dynabatch").dynabatch_sampler(
        texts, tokenizer, batch_size, max_input_token_length=LONGEST_TOKENS, **options
    )
    return [list(map(int, batch)) for batch in sampler]


def generate(
    batches: Batches, model: T5ForConditionalGeneration, ids: Sequence[list[int]], device: Device
) -> None:
    """Generate for all batches, with what each package has against a lack of memory."""
    collate = PaddingCollate()
    start_s = time.perf_counter()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    for indices in batches.indices:
        batch = collate([{"input_ids": ids[index]} for index in indices])
        calls, failures = device.calls, device.failures
        if batches.name == OURS:
            rows, _ = generate_in_parts(model, batch, **options)
        else:
            rows, _ = import_module("dynabatch").generate_with_oom_fallback(
                model, batch, len(batches.indices[0]), torch.device("cpu"), **options
            )
        batches.failed += device.failures > failures
        batches.parts += device.calls - calls - (device.failures - failures)
        batches.outputs |= dict(zip(indices, rows.tolist(), strict=True))
    batches.seconds = time.perf_counter() - start_s


def report(all_batches: Sequence[Batches], lengths: Sequence[int], most_tokens: int) -> None:
    """Print a table of what was made of the texts."""
    print(
        f"{'':<24}{'batches':>9}{'padded tokens':>15}{'padding':>9}{'largest':>9}{'failed':>8}"
        f"{'parts':>7}{'seconds':>9}"
    )
    for batches in all_batches:
        shapes = [(len(some), max(lengths[one] for one in some)) for some in batches.indices]
        padded = sum(rows * width for rows, width in shapes)
        largest = max(rows * (width + NEW_TOKENS) for rows, width in shapes) / most_tokens
        print(
            f"{batches.name:<24}{len(shapes):>9}{padded:>15,}{1 - sum(lengths) / padded:>9.1%}"
            f"{largest:>9.2f}{batches.failed:>8}{batches.parts:>7}{batches.seconds:>9.1f}"
        )


def main() -> None:
    """Print what both packages make of the same texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--without-generating", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = stdlib_texts()[: arguments.texts]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts)._tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    ids = [tokenizer(text).input_ids[:LONGEST_TOKENS] for text in texts]
    lengths = list(map(len, ids))
    most_tokens = arguments.batch_size * (max(lengths) + NEW_TOKENS)
    ours = LongestFirst(
        ids, most_tokens, new_tokens=NEW_TOKENS, process_fn=lambda one: {"input_ids": one}
    )
    found = [Batches(OURS, [indices for _, indices in ours])]
    try:
        dynamic = dynabatch_batches(texts, tokenizer, arguments.batch_size)
        fixed = dynabatch_batches(texts, tokenizer, arguments.batch_size, dynamic_batch_mode=False)
        found += [Batches(DYNABATCH, dynamic), Batches(f"{DYNABATCH}, not dynamic", fixed)]
    except ModuleNotFoundError as error:
        print(f"dynabatch is not installed ({error}): `pip install dynabatch==0.2.23`.")
    if not arguments.without_generating:
        model = make_model()
        device = Device(model, most_tokens)
        for batches in found:
            generate(batches, model, ids, device)
    report(found, lengths, most_tokens)


if __name__ == "__main__":
    main()
