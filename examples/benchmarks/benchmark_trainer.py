"""Compare `ODBTrainer` with the stock `Trainer`: fixed batches, and `batch_rebalance`.

    python examples/benchmarks/benchmark_trainer.py          # one epoch each, some minutes
    python examples/benchmarks/benchmark_trainer.py --quick  # 1/8 of the text

All train the same model on the same text, tokenized beforehand, since `batch_rebalance` needs all
lengths before it begins. Fixed batches have room for `--token-budget` padded tokens should all
their samples be of the greatest length; so has, on average, a batch of `batch_rebalance`, which
has no cap. A dynamic batch fills that room. `--accumulate` batches of the stock trainers make an
optimizer step, so that all take about as many samples per step.

A dynamic batch holds samples of like length. The last row shares its room out over `--accumulate`
of them, so that a step mixes lengths, as the fixed ones do; it takes some more steps. Timings vary
with the machine, those per CPU second less; ratios and shares are what counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from odb_nodes import PaddingCollate
from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer
from odb_nodes.tools.tables import markdown_table

sys.path.append(str(Path(__file__).parents[1]))  # tiny_lm.py is among the examples
from tiny_lm import MAX_TOKENS, build_model, load_corpus

STRATEGIES = ("fixed", "batch_rebalance", "dynamic", "dynamic, accumulated")
Samples = list[dict[str, Any]]


class Shapes(TrainerCallback):
    """Counts optimizer steps and batches, and what the batches hold, as the model sees them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.padded: list[int] = []
        self.real = self.samples = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        if module.training:
            self.padded.append(inputs["input_ids"].numel())
            self.real += int(inputs["attention_mask"].sum())
            self.samples += len(inputs["input_ids"])


def run(strategy: str, train: Samples, held_out: Samples, options: Any) -> dict[str, str]:
    """Train for one epoch, and return a row of the table."""
    torch.set_num_threads(options.threads)
    model = build_model(seed=options.seed, device="cpu")
    budget = options.token_budget
    if strategy == "dynamic, accumulated":
        budget = max(MAX_TOKENS, budget // options.accumulate)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        learning_rate=3e-3,
        adam_beta2=0.95,  # as in train_lm.py
        warmup_steps=8,
        per_device_train_batch_size=options.token_budget // MAX_TOKENS,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=1 if strategy == "dynamic" else options.accumulate,
        train_sampling_strategy="batch_rebalance" if strategy == "batch_rebalance" else "random",
        save_strategy="no",
        logging_steps=100_000,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=options.seed,
    )
    given: dict[str, Any] = {
        "train_dataset": train,
        "eval_dataset": held_out,
        "data_collator": PaddingCollate(),
    }
    trainer: Trainer
    if strategy.startswith("dynamic"):
        odb = ODBConfig(token_budget=budget, window=options.window)
        trainer = ODBTrainer(model, args, odb=odb, **given)
    else:
        trainer = Trainer(model, args, **given)
    seen = Shapes(model)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    output = trainer.train()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {
        "": strategy,
        "real tokens / s": f"{seen.real / seconds:,.0f}",
        "real tokens / CPU s": f"{seen.real / cpu_s:,.0f}",
        "padding share": f"{1 - seen.real / sum(seen.padded):.3f}",
        "largest batch, padded tokens": f"{max(seen.padded):,}",
        "optimizer steps": f"{output.global_step:,}",
        "batches": f"{len(seen.padded):,}",
        "samples": f"{seen.samples:,}",
        "held-out loss": f"{trainer.evaluate()['eval_loss']:.3f}",
    }


def main() -> None:
    """Run all strategies and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--token-budget", type=int, default=4096, help="(%(default)s)")
    add("--accumulate", type=int, default=3, help="of the stock trainers (%(default)s)")
    add("--window", type=int, default=256, help="samples in the pool (%(default)s)")
    add("--seed", type=int, default=0, help="of model and order (%(default)s)")
    add("--threads", type=int, default=1, help="of torch (%(default)s)")
    add("--quick", action="store_true", help="1/8 of the text")
    options = parser.parse_args()
    corpus = load_corpus()
    documents = corpus.train[::8] if options.quick else corpus.train
    keys = ("input_ids", "labels")
    train, held_out = (
        [{key: encoded[key] for key in keys} for encoded in map(corpus.encode, part)]
        for part in (documents, corpus.held_out)
    )
    print(markdown_table([run(strategy, train, held_out, options) for strategy in STRATEGIES]))


if __name__ == "__main__":
    main()
