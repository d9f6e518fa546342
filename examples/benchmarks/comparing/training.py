"""Training: real tokens a second, padding and held-out loss of one epoch in each way of batching.

All contenders have one loop, one model and one loss, the exact mean over the targets of an
optimizer step of all ranks: what differs is the batches. Fixed batches have room for their longest
sample within the budget, and as many of them make an optimizer step as hold the samples of ours.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface, T5Config, T5ForConditionalGeneration

from comparing.batching import ODB, PACKED, PACKED_PLANS, PADDED, PADDED_PLANS, Plan
from comparing.common import (
    Options,
    Row,
    Table,
    Tables,
    in_ranks,
    in_turns,
    isolated,
    rival,
)
from odb_nodes import ODBDataLoader, PackedCollate, PaddingCollate, TokenBudget, pop_step_info
from odb_nodes.tools.simulate import lognormal_lengths
from odb_nodes.vision import VisionLanguageCollate
from tiny_lm import VOCABULARY_SIZE, Corpus, build_model, load_corpus
from tiny_vlm import Pictures, build_processor
from tiny_vlm import build_model as build_vlm
from train_packed import attend_per_sample

TIMEOUT_S = 900.0
LONGEST_TOKENS, MEAN_TOKENS = 1024, 160
LEARNING_RATE = 3e-3

Sample = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and on what.

    Attributes:
        name: as the table calls it.
        train: samples to train on.
        held_out: samples to judge by.
        make_model: seed -> model.
        budget: tokens of a batch, padding included.
        contenders: ways of batching.
        is_causal: whether targets are the labels but the first.
        collate: pads samples.
        pack: packs samples for a model.
    """

    name: str
    train: list[Any]
    held_out: list[Any]
    make_model: Callable[[int], torch.nn.Module]
    budget: int
    contenders: Sequence[str]
    is_causal: bool = True
    collate: Any = PaddingCollate()  # noqa: RUF009
    pack: Callable[[torch.nn.Module], Any] = lambda _: PackedCollate()


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: a contender, and its settings.

    Attributes:
        contender: who makes the batches.
        budget: tokens of a batch, padding included; default: the task's.
        batch_size: samples of a fixed batch; default: what the budget holds of the longest.
        accumulate: batches of an optimizer step.
        learning_rate: of AdamW.
        seed: of model and order.
        window: samples that wait to be grouped.
        device: of the model.
    """

    contender: str
    budget: int
    batch_size: int | None = None
    accumulate: int = 1
    learning_rate: float = LEARNING_RATE
    seed: int = 0
    window: int = 256
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Figures of one epoch, over all ranks; CPU seconds are those of this rank's process."""

    real_tokens: int
    padded_tokens: int
    largest_tokens: int
    samples: int
    batches: int
    steps: int
    seconds: float
    cpu_s: float
    loss: float


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Return the tokens of each sample."""
    return [len(sample["input_ids"]) for sample in samples]


def is_packed(contender: str) -> bool:
    """Tell whether a contender packs rows."""
    return contender in PACKED_PLANS


def batches_of(task: Task, way: Way, model: Any, rank: int, ranks: int) -> Iterable[Batch | None]:
    """Return the batches of a rank; `None` where it has none in a step."""
    collate = task.pack(model) if is_packed(way.contender) else task.collate
    if way.contender in (PADDED, PACKED):
        return our_batches(task, way, collate)
    if way.contender == ODB:
        return odb_batches(task, way, rank, ranks)
    planner = {**PADDED_PLANS, **PACKED_PLANS}[way.contender]
    plan = Plan(
        lengths=lengths_of(task.train),
        budget=way.budget,
        ranks=ranks,
        window=way.window,
        seed=way.seed,
        accumulate=way.accumulate,
        size=way.batch_size,
    )
    indices = [list(step[rank]) for step in planner(plan)]
    return (collate([task.train[at] for at in batch]) if batch else None for batch in indices)


def our_batches(task: Task, way: Way, collate: Any) -> Iterator[Batch | None]:
    """Yield the batches of this library's loader."""
    layout: Any = "packed" if is_packed(way.contender) else "padded"
    with ODBDataLoader(
        task.train,
        token_budget=TokenBudget(way.budget, layout=layout),
        window=way.window,
        collate_fn=collate,
        seed=way.seed,
    ) as loader:
        for batch in loader:
            yield None if pop_step_info(batch).is_filler else batch


def odb_batches(task: Task, way: Way, rank: int, ranks: int) -> Iterator[Batch]:
    """Yield the batches of the package online-dynamic-batching."""
    odb = rival("odb")
    torch.manual_seed(way.seed)
    # As tensors: it sees no length in an array, and drops the sample.
    shard = [
        {key: torch.as_tensor(value) for key, value in sample.items()}
        for sample in task.train[rank::ranks]
    ]
    yield from odb.ODBDataLoader(
        shard,
        token_budget=way.budget,
        batch_size=1,
        shuffle=True,
        num_workers=1,
        prefetch_factor=way.window,
        join=False,
        collate_fn=task.collate,
    )


def train(task: Task, way: Way, rank: int, ranks: int) -> Trained:
    """Train for one epoch on one rank."""
    torch.set_num_threads(1)
    model = task.make_model(way.seed).to(way.device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=way.learning_rate, betas=(0.9, 0.95))
    model.train()
    counts = np.zeros(4, dtype=np.int64)  # real tokens, padded ones, samples, batches
    largest = steps = 0
    source = iter(batches_of(task, way, model, rank, ranks))
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    while True:
        batches = [batch for batch in islice(source, way.accumulate) if batch is not None]
        targets = [count_targets(batch, task.is_causal) for batch in batches]
        # All ranks end together: when none has a target left.
        all_targets = torch.tensor([float(sum(targets)), float(len(batches))])
        if ranks > 1:
            dist.all_reduce(all_targets)
        if not all_targets[1]:
            break
        for batch, count in zip(batches, targets, strict=True):
            batch.pop("id", None)
            counts += shape_of(batch)
            largest = max(largest, int(batch["input_ids"].numel()))
            inputs = {k: v.to(way.device) if torch.is_tensor(v) else v for k, v in batch.items()}
            if count:
                (model(**inputs).loss * (count / float(all_targets[0]))).backward()
        if ranks > 1:
            add_gradients(weights)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    totals = torch.tensor([*counts.tolist(), largest])
    if ranks > 1:
        dist.all_reduce(totals[:4])
    real, padded, samples, number = totals[:4].tolist()
    return Trained(
        real_tokens=real,
        padded_tokens=padded,
        largest_tokens=largest,
        samples=samples,
        batches=number,
        steps=steps,
        seconds=seconds,
        cpu_s=cpu_s,
        loss=held_out_loss(task, model, way.device),
    )


def count_targets(batch: Batch, is_causal: bool) -> int:
    """Return how many labels a batch's loss is the mean of."""
    labels = batch["labels"][:, 1:] if is_causal else batch["labels"]
    return int((labels != -100).sum())


def shape_of(batch: Batch) -> list[int]:
    """Return real tokens, padded tokens, samples, and 1."""
    ids = batch["input_ids"]
    if "cu_seq_lens_q" in batch:
        return [ids.numel(), ids.numel(), len(batch["cu_seq_lens_q"]) - 1, 1]
    return [int(batch["attention_mask"].sum()), ids.numel(), len(ids), 1]


def add_gradients(weights: Sequence[torch.nn.Parameter]) -> None:
    """Add up the gradients of all ranks."""
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    for weight, total in zip(weights, flat.split([one.numel() for one in weights]), strict=True):
        weight.grad = total.view_as(weight)


@torch.no_grad()
def held_out_loss(task: Task, model: torch.nn.Module, device: str) -> float:
    """Return the mean loss over all targets of the held-out samples."""
    model.eval()
    samples = sorted(task.held_out, key=lambda sample: len(sample["input_ids"]))
    total = count = 0.0
    for at in range(0, len(samples), 8):
        batch = task.collate(samples[at : at + 8])
        batch.pop("id", None)
        targets = count_targets(batch, task.is_causal)
        inputs = {key: value.to(device) for key, value in batch.items()}
        total += float(model(**inputs).loss) * targets
        count += targets
    return total / count


def run(task: Task, way: Way, ranks: int) -> Trained:
    """Return the figures of one epoch, trained in processes of its own."""
    if way.contender == ODB:
        os.environ |= {"ODB_ITERATOR_STARTUP_JITTER_SEC": "0"}
    result: Trained = isolated(in_ranks, train, (task, way), ranks, limit_s=TIMEOUT_S)
    return result


def ways_of(task: Task, options: Options) -> dict[str, Way]:
    """Return a way for each contender, with as many samples in an optimizer step as ours have."""
    lengths = lengths_of(task.train)
    size = max(1, task.budget // max(lengths))
    ours = len(lengths) / max(
        1, len([*PADDED_PLANS[PADDED](Plan(lengths=lengths, budget=task.budget))])
    )
    ways = {}
    for name in task.contenders:
        is_fixed = name.startswith(("fixed", "`"))
        accumulate = max(1, round(ours / size)) if is_fixed else 1
        ways[name] = Way(
            contender=name, budget=task.budget, accumulate=accumulate, device=options.device
        )
    return ways


TEXT_CONTENDERS = [
    "fixed batches",
    "`group_by_length` of transformers",
    "`batch_rebalance` of transformers",
    ODB,
    "lhotse, buffer as our window",
    PADDED,
    "TRL, best fit decreasing",
    PACKED,
]


def pieces(texts: Sequence[Any], samples: int, cv: float, seed: int) -> list[Sample]:
    """Return pieces of tokenized texts, of lognormal lengths."""
    tokens = np.concatenate(texts)
    lengths = lognormal_lengths(
        samples, cv=cv, mean_tokens=MEAN_TOKENS, longest_tokens=LONGEST_TOKENS, seed=seed
    )
    starts = np.random.default_rng(seed).integers(len(tokens) - lengths)
    cut = [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    return [{"input_ids": piece, "labels": piece} for piece in cut]


def encoded(corpus: Corpus) -> tuple[list[Any], list[Any]]:
    """Return the tokens of all texts: those to train on, and those held out."""
    return tuple(  # type: ignore[return-value]
        [corpus.encode(text)["input_ids"] for text in part]
        for part in (corpus.train, corpus.held_out)
    )


def text_task(cv: float, texts: tuple[list[Any], list[Any]], samples: int) -> Task:
    """Return the task of a tiny Llama on text."""
    AttentionInterface.register("per_sample", attend_per_sample)
    return Task(
        name=f"text, CV {cv}",
        train=pieces(texts[0], samples, cv, seed=0),
        held_out=pieces(texts[1], samples // 2, cv, seed=1),
        make_model=make_llama,
        budget=2 * LONGEST_TOKENS,
        contenders=TEXT_CONTENDERS,
    )


def make_llama(seed: int, hidden_size: int = 96) -> torch.nn.Module:
    """Return a tiny Llama, whose attention stays within each sample of a packed row."""
    return build_model(seed=seed, attention="per_sample", hidden_size=hidden_size)


def make_lora(seed: int) -> torch.nn.Module:
    """Return the same with low-rank adapters on all linear layers."""
    peft = rival("peft")
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model: torch.nn.Module = peft.get_peft_model(make_llama(seed), config)
    return model


def make_t5(seed: int) -> torch.nn.Module:
    """Return a tiny T5."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY_SIZE, d_model=96, d_kv=32, d_ff=256, num_layers=2, num_heads=3,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def t5_task(texts: tuple[list[Any], list[Any]], samples: int) -> Task:
    """Return the task of a tiny T5: to say the first quarter of a text again."""
    parts = []
    for seed, (part, count) in enumerate(zip(texts, (samples, samples // 2), strict=True)):
        cut = pieces(part, count, 1.0, seed)
        for sample in cut:
            sample["labels"] = sample["input_ids"][: max(1, len(sample["input_ids"]) // 4)]
        parts.append(cut)
    return Task(
        name="encoder-decoder (T5)",
        train=parts[0],
        held_out=parts[1],
        make_model=make_t5,
        budget=2 * LONGEST_TOKENS,
        contenders=[name for name in TEXT_CONTENDERS if not is_packed(name)],
        is_causal=False,
        collate=pad_both,
    )


def pad_both(samples: list[Sample]) -> Batch:
    """Pad texts, and labels of a length of their own."""
    batch: Batch = PaddingCollate()([{"input_ids": one["input_ids"]} for one in samples])
    labels = PaddingCollate(pad_token_id=-100)([{"input_ids": one["labels"]} for one in samples])
    return {**batch, "labels": labels["input_ids"]}


def vlm_task(samples: int) -> Task:
    """Return the task of a tiny Qwen2-VL on drawn pictures."""
    processor = build_processor()
    train, held_out = (
        [processor(pictures[at]) for at in range(len(pictures))]
        for pictures in (Pictures(samples), Pictures(samples // 4, seed=1))
    )
    return Task(
        name="images and text (Qwen2-VL)",
        train=train,
        held_out=held_out,
        make_model=partial(make_vlm, processor),
        budget=512,
        contenders=[name for name in TEXT_CONTENDERS if not name.startswith("TRL")],
        collate=VisionLanguageCollate(dummy=None),
        pack=lambda model: VisionLanguageCollate(dummy=None, model=model),
    )


def make_vlm(processor: Any, seed: int) -> torch.nn.Module:
    """Return the model for a processor."""
    return build_vlm(processor, seed=seed)


def tasks(options: Options) -> Iterator[Task]:
    """Yield all tasks."""
    samples = 32 if options.quick else 256
    texts = encoded(load_corpus(every=8 if options.quick else 1))
    for cv in (1.0,) if options.quick else (0.3, 0.5, 1.0, 2.0):
        yield text_task(cv, texts, samples)
    yield replace(text_task(1.0, texts, samples), name="LoRA, text, CV 1.0", make_model=make_lora)
    yield t5_task(texts, samples)
    yield vlm_task(32 if options.quick else 160)


def tables(options: Options) -> Tables:
    """Yield tables of the speed, the batches and the loss, with a column for each task."""
    parts = ("Speed", "Batches", "Quality")
    rows: dict[str, dict[str, Row]] = {part: {} for part in parts}
    clock, cpu = [1.0], [1.0]  # how far turns are apart
    conditions = []
    for task in tasks(options):
        for ranks in (1, 2, 4):
            if ranks > 1 and ("CV 1.0" not in task.name or task.name.startswith("LoRA")):
                continue
            column = f"{task.name}, {ranks} ranks" if ranks > 1 else task.name
            ways = ways_of(task, options)
            found = in_turns(
                {name: partial(run, task, way, ranks) for name, way in ways.items()},
                options.rounds,
            )
            base = next(iter(found.values()))
            for name, runs in found.items():
                last = runs[-1]
                by_clock = [of.seconds / one.seconds for one, of in zip(runs, base, strict=True)]
                by_cpu = [of.cpu_s / one.cpu_s for one, of in zip(runs, base, strict=True)]
                clock.append(max(by_clock) / min(by_clock))
                cpu.append(max(by_cpu) / min(by_cpu))
                share = 1 - last.real_tokens / last.padded_tokens
                cells = (
                    f"{statistics.median(by_clock):.2f}, {statistics.median(by_cpu):.2f}",
                    f"{share:.3f}, {last.largest_tokens:,}, {last.steps:,}",
                    f"{last.loss:.3f}",
                )
                for part, cell in zip(parts, cells, strict=True):
                    rows[part].setdefault(name, {"": name})[column] = cell
            real = base[-1].real_tokens / statistics.median(one.seconds for one in base)
            conditions.append(
                f"{column}: {len(task.train):,} samples, room for {task.budget:,} padded tokens, "
                f"fixed batches at {real:,.0f} real tokens / s"
            )
    described = (
        f"Times the real tokens / s of fixed batches, by the clock and by CPU time; one epoch, one "
        f"thread for each rank, median of {options.rounds} turns, which differ by up to "
        f"{max(clock) - 1:.0%} and {max(cpu) - 1:.0%}. {'; '.join(conditions)}.",
        "Padding, padded tokens of the largest batch, optimizer steps.",
        "Held-out loss after the epoch, nats per token.",
    )
    for part, text in zip(parts, described, strict=True):
        columns = dict.fromkeys(name for row in rows[part].values() for name in row)
        full = [{name: row.get(name, "") for name in columns} for row in rows[part].values()]
        yield Table(f"Training: {part.lower()}", text, full)
