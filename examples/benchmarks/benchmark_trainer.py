"""Compare `ODBTrainer` with the stock `Trainer` and with `online-dynamic-batching`.

    python examples/benchmarks/benchmark_trainer.py          # one epoch each, some minutes
    python examples/benchmarks/benchmark_trainer.py --quick  # 1/8 of the text
    python examples/benchmarks/benchmark_trainer.py --gpu    # 336 million parameters in bf16

All train the same model on the same samples, tokenized beforehand, since `batch_rebalance` needs
all lengths before it begins. Fixed batches have room for `--token-budget` padded tokens if all
their samples have the greatest length; so has, on average, a batch of `batch_rebalance`, which has
no cap. A dynamic batch fills that room. `--accumulate` batches of the stock trainers make an
optimizer step, so that all take about as many samples per step.

The contender "4 x" has batches of four times as many samples, and a quarter of `--accumulate`: what
a user tries who finds that memory is left. Its largest batch shows what it risks.

A dynamic batch holds samples of similar length. The row "accumulated" shares its room out over up
to `--accumulate` batches, so that a step mixes lengths, as the fixed ones do.

With `--cv` the samples are pieces of the same text whose lengths are lognormal with this
coefficient of variation: mean 800, from 16 to `--max-tokens`. `--rounds` repeats all in turns; the
rate is the median's, with the lowest and highest. Timings vary with the machine; compare ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from odb.integrations.hf import enable_odb
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from odb_nodes import PaddingCollate
from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer
from odb_nodes.tools.simulate import lognormal_lengths, markdown_table

sys.path.append(str(Path(__file__).parents[1]))  # tiny_lm.py is among the examples
from tiny_lm import MAX_TOKENS, Corpus, build_model, load_corpus

REFERENCE = "`online-dynamic-batching`"
STRATEGIES = (
    "fixed",
    "fixed, 4 x",
    "`batch_rebalance`",
    "`batch_rebalance`, 4 x",
    REFERENCE,
    "dynamic",
    "dynamic, accumulated",
)
HELD_OUT_SAMPLES = 256  # of `--cv`
Samples = list[dict[str, Any]]


class Shapes(TrainerCallback):
    """Counts optimizer steps and batches, and what the batches hold, as the model sees them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.padded: list[int] = []
        self.real: list[torch.Tensor] = []  # read at the end: a GPU need not be waited for
        self.samples = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        if module.training:
            self.padded.append(inputs["input_ids"].numel())
            self.real.append(inputs["attention_mask"].sum())
            self.samples += len(inputs["input_ids"])


def make_trainer(
    strategy: str, model: torch.nn.Module, train: Samples, held_out: Samples, options: Any
) -> Trainer:
    """Return the trainer of a contender."""
    budget, accumulate = options.token_budget, options.accumulate
    samples = budget // options.max_tokens
    if strategy.endswith("4 x"):
        samples, accumulate = 4 * samples, max(1, accumulate // 4)
    if strategy in (REFERENCE, "dynamic"):
        samples, accumulate = 1, 1  # samples: what the reference asks for, and ours does not use
    if strategy == "dynamic, accumulated":
        share = max(options.max_tokens, budget // accumulate)
        budget, accumulate = share, budget // share
    rebalances = strategy.startswith("`batch_rebalance`")
    workers = max(options.workers, strategy == REFERENCE)  # which refuses to go without
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        learning_rate=options.learning_rate,
        adam_beta2=0.95,  # as in train_lm.py
        warmup_steps=8,
        per_device_train_batch_size=samples,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy="batch_rebalance" if rebalances else "random",
        save_strategy="no",
        logging_steps=100_000,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not options.gpu,
        bf16=options.gpu,
        dataloader_pin_memory=options.gpu,
        dataloader_num_workers=workers,
        seed=options.seed,
    )
    given: dict[str, Any] = {
        "train_dataset": train,
        "eval_dataset": held_out,
        "data_collator": PaddingCollate(),
    }
    if strategy.startswith("dynamic"):
        odb = ODBConfig(token_budget=budget, window=options.window)
        return ODBTrainer(model, args, odb=odb, **given)
    trainer = Trainer(model, args, **given)
    if strategy == REFERENCE:
        # Lists, since it drops arrays; a plain loader, since it refuses Accelerate's.
        lists = [{key: tokens.tolist() for key, tokens in sample.items()} for sample in train]
        loader: DataLoader[Any] = DataLoader(
            lists,  # type: ignore[arg-type]
            shuffle=True,
            num_workers=workers,
            prefetch_factor=64,
            collate_fn=given["data_collator"],
            pin_memory=options.gpu,
        )
        enable_odb(trainer, train_dataloader=loader, token_budget=budget, loss_scaling="exact")
    return trainer


def run(strategy: str, train: Samples, held_out: Samples, options: Any) -> dict[str, Any]:
    """Train for one epoch, and return the figures of a contender."""
    torch.set_num_threads(options.threads)
    device = "cuda" if options.gpu else "cpu"
    model = build_model(
        seed=options.seed,
        device=device,
        hidden_size=options.hidden_size,
        layers=options.layers,
        max_tokens=options.max_tokens,
    )
    trainer = make_trainer(strategy, model, train, held_out, options)
    seen = Shapes(model)
    if options.gpu:
        torch.cuda.reset_peak_memory_stats()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        output = trainer.train()
    except torch.OutOfMemoryError:
        return {"rate": 0.0, "largest batch, padded tokens": f"{seen.padded[-1]:,}, out of memory"}
    if options.gpu:
        torch.cuda.synchronize()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    real = int(sum(seen.real))
    figures = {
        "rate": real / seconds,
        "real tokens / CPU s": f"{real / cpu_s:,.0f}",
        "padding share": f"{1 - real / sum(seen.padded):.3f}",
        "largest batch, padded tokens": f"{max(seen.padded):,}",
        "optimizer steps": f"{output.global_step:,}",
        "batches": f"{len(seen.padded):,}",
        "samples": f"{seen.samples:,}",
        "held-out loss": f"{trainer.evaluate()['eval_loss']:.3f}",
    }
    if options.gpu:
        figures["peak memory, GB"] = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"
    return figures


def in_turns(train: Samples, held_out: Samples, options: Any) -> list[dict[str, str]]:
    """Run all contenders `--rounds` times, and return the rows of the table."""
    if options.gpu:  # loads kernels and sets up libraries
        run("dynamic", train[:500], held_out[:8], options)
    rates: dict[str, list[float]] = {strategy: [] for strategy in options.strategies}
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for strategy in options.strategies:
            gc.collect()  # the model of the contender before
            if options.gpu:
                torch.cuda.empty_cache()
            rows[strategy] = run(strategy, train, held_out, options)
            rates[strategy].append(rows[strategy].pop("rate"))
            told = f"{strategy}: {rates[strategy][-1]:,.0f} {rows[strategy]}"
            print(told, file=sys.stderr, flush=True)
    medians = {strategy: statistics.median(found) for strategy, found in rates.items()}
    slowest = min(rate for rate in medians.values() if rate)
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    return [
        {
            "": strategy,
            "real tokens / s": f"{medians[strategy]:,.0f}",
            "lowest, highest": f"{min(found):,.0f}, {max(found):,.0f}",
            "times the slowest": f"{medians[strategy] / slowest:.2f}",
            **{name: rows[strategy].get(name, "") for name in columns},
        }
        for strategy, found in rates.items()
    ]


def whole_texts(corpus: Corpus, every: int) -> tuple[Samples, Samples]:
    """Return a sample for each text: those to train on, and those held out."""
    keys = ("input_ids", "labels")
    train, held_out = (
        [{key: encoded[key] for key in keys} for encoded in map(corpus.encode, part)]
        for part in (corpus.train[::every], corpus.held_out)
    )
    return train, held_out


def pieces(corpus: Corpus, options: Any) -> tuple[Samples, Samples]:
    """Return pieces of the text of lognormal lengths: those to train on, and those held out."""
    rng = np.random.default_rng(options.seed)
    parts = []
    for texts, samples in ((corpus.train, options.samples), (corpus.held_out, HELD_OUT_SAMPLES)):
        tokens = np.concatenate([corpus.encode(text)["input_ids"] for text in texts])
        lengths = lognormal_lengths(
            samples, cv=options.cv, longest_tokens=options.max_tokens, seed=options.seed
        )
        starts = rng.integers(len(tokens) - lengths)
        cut = [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        parts.append([{"input_ids": piece, "labels": piece} for piece in cut])
    return parts[0], parts[1]


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--token-budget", type=int, default=4096, help="(%(default)s)")
    add("--accumulate", type=int, default=3, help="of the stock trainers (%(default)s)")
    add("--window", type=int, default=256, help="samples in the pool (%(default)s)")
    add("--seed", type=int, default=0, help="of model, samples and order (%(default)s)")
    add("--threads", type=int, default=1, help="of torch (%(default)s)")
    add("--workers", type=int, default=0, help="that read, for each contender (%(default)s)")
    add("--rounds", type=int, default=1, help="(%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="(%(default)s)")
    add("--hidden-size", type=int, default=128, help="of the model (%(default)s)")
    add("--layers", type=int, default=2, help="of the model (%(default)s)")
    add("--cv", type=float, help="of lognormal lengths; default: whole texts, as they are")
    add("--samples", type=int, default=2000, help="of `--cv` (%(default)s)")
    add("--max-tokens", type=int, default=MAX_TOKENS, help="of a sample of `--cv` (%(default)s)")
    add(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        help="which to run; default: all; on a CPU, none of '4 x'",
    )
    add("--quick", action="store_true", help="1/8 of the text")
    add("--gpu", action="store_true", help="bf16 on a GPU, with defaults of a real size")
    if parser.parse_known_args()[0].gpu:
        parser.set_defaults(
            **{"token_budget": 32_768, "accumulate": 8, "window": 1024, "threads": 8, "workers": 4},
            **{"hidden_size": 1024, "layers": 24, "learning_rate": 3e-4},
            **{"cv": 1.0, "samples": 8000, "max_tokens": 8192},
        )
    options = parser.parse_args()
    if options.strategies is None:
        options.strategies = [s for s in STRATEGIES if options.gpu or not s.endswith("4 x")]
    return options


def main() -> None:
    """Run all strategies and print a table."""
    options = read_options()
    corpus = load_corpus()
    if options.cv is None:
        data = whole_texts(corpus, 8 if options.quick else 1)
    else:
        data = pieces(corpus, options)
    print(markdown_table(in_turns(*data, options)))


if __name__ == "__main__":
    main()
