"""Memory: what autograd keeps for the backward pass, in four ways to bound a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from comparing.common import Options, Row, Table, Tables, attempts, isolated
from fit_memory import make_meter, measured
from odb_nodes import ODBDataLoader, PaddingCollate, TokenBudget, pop_step_info
from odb_nodes.memory import MemoryModel, enable_checkpointing, find_budget
from tiny_lm import MAX_TOKENS, VOCABULARY_SIZE, build_model, load_corpus

MIB = 2**20
LIMIT_MIB = {"cpu": 140, "cuda": 8192}
MEASURED = {
    "cpu": "of the saved tensors of 0.7 million parameters, counted by `SavedTensorMeter`",
    "cuda": "of which 90 % may be allocated, for 28 million parameters in fp32",
}
WIDTHS = (16, 128, MAX_TOKENS)
TIMEOUT_S = 600.0
FIXED, BUDGET = "fixed batches", "budget of tokens"
CHECKPOINTED, AWARE = "budget, checkpointing", "budget that counts attention"

Sample = dict[str, Any]
Batch = dict[str, torch.Tensor]


@dataclass
class Job:
    """A model, its optimizer, and a meter that fails above the limit."""

    device: str
    checkpointing: bool = False

    def __post_init__(self) -> None:
        size = {"hidden_size": 512, "layers": 8} if self.device == "cuda" else {}
        self.model = build_model(device=self.device, attention="eager", **size)
        if self.checkpointing:
            enable_checkpointing(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.meter = make_meter(self.device, LIMIT_MIB[self.device])

    def step(self, batch: Batch) -> None:
        """Make a whole step."""
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def make_batch(self, rows: int, width: int) -> Batch:
        """Return a batch of a shape, with padding in it."""
        ids = torch.randint(VOCABULARY_SIZE, (rows, width), device=self.device)
        mask = torch.ones_like(ids)
        mask[0, 1:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    def calibrated(self) -> tuple[MemoryModel, TokenBudget]:
        """Return the model of the memory, and the largest budget that fits."""
        found = find_budget(
            self.step,
            self.make_batch,
            states=[self.model, self.optimizer],
            meter=self.meter,
            widths=WIDTHS,
        )
        return found.model, found.budget


def measure(way: str, samples: Sequence[Sample], device: str) -> Row:
    """Train for an epoch in one way and return its row."""
    job = Job(device, checkpointing=way == CHECKPOINTED)
    memory, budget = job.calibrated()
    if way == FIXED:
        size = max(1, (budget.tokens // budget.row_cost(MAX_TOKENS)))
        described = f"{size} samples"
        batches: Iterable[Any] = DataLoader(
            samples,  # type: ignore[arg-type]
            size,
            shuffle=True,
            collate_fn=PaddingCollate(),
            generator=torch.Generator().manual_seed(0),
        )
    else:
        if way == BUDGET:  # that fits with the longest samples, counted in tokens alone
            budget = TokenBudget((budget.tokens // budget.row_cost(MAX_TOKENS)) * MAX_TOKENS)
        attention = ""
        if budget.attention_tokens:
            attention = f", attention_tokens={budget.attention_tokens:,}"
        described = f"tokens={budget.tokens:,}{attention}"
        batches = ODBDataLoader(samples, token_budget=budget, window=256)
    peaks, errors, real = [], [], 0
    with measured(job.meter):
        for batch in batches:
            if way != FIXED:
                pop_step_info(batch)
            real += int(batch["attention_mask"].sum())
            rows, width = batch["input_ids"].shape
            job.meter.reset()
            job.step({key: value.to(device) for key, value in batch.items()})
            peaks.append(job.meter.peak_bytes())
            errors.append(peaks[-1] / memory.predict(rows, width) - 1)
    return {
        "": way,
        "a batch": described,
        "steps": f"{len(peaks)}",
        "largest peak, MiB": f"{max(peaks) / MIB:.0f}",
        "mean peak, MiB": f"{sum(peaks) / len(peaks) / MIB:.0f}",
        "real tokens a step": f"{real / len(peaks):,.0f}",
        "prediction off by, mean": f"{sum(map(abs, errors)) / len(errors):.1%}",
        "too low by, at most": f"{max(0.0, *errors):.1%}",
    }


def tables(options: Options) -> Tables:
    """Yield the table."""
    corpus = load_corpus(every=64 if options.quick else 8)
    samples = [corpus.encode(text) for text in corpus.train]
    ways = (FIXED, BUDGET, AWARE, CHECKPOINTED)
    found = attempts(
        {
            way: partial(isolated, measure, way, samples, options.device, limit_s=TIMEOUT_S)
            for way in ways
        }
    )
    yield Table(
        "Memory",
        f"{len(samples):,} functions and classes of the standard library, at most {MAX_TOKENS:,} "
        f"tokens; eager attention; a limit of {LIMIT_MIB[options.device]:,} MiB, "
        f"{MEASURED[options.device]}. Fixed batches and the budget of tokens alone are as large as "
        "the longest samples allow.",
        [*found.values()],
    )
