"""What the contenders train: a Llama on text, a Qwen2-VL on pictures and text, a T5 on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from comparing.batching import ODB, PACKED, PACKED_PLANS, PADDED
from odb_nodes import PackedCollate, PaddingCollate
from odb_nodes.tools.simulate import lognormal_lengths
from odb_nodes.vision import VisionLanguageCollate
from tiny_lm import VOCABULARY_SIZE, load_corpus
from tiny_vlm import Pictures, build_processor
from tiny_vlm import build_model as build_vlm
from train_packed import attend_per_sample

LONGEST_TOKENS, MEAN_TOKENS = 256, 64
FIXED = "fixed batches"
LHOTSE = "lhotse, buffer as our window"
TRL = "TRL, best fit decreasing"
HALVES = f"{PADDED}, 2 batches a step"
SCALED = f"{PADDED}, rate by samples"
CONTENDERS = [
    FIXED,
    "`group_by_length` of transformers",
    ODB,
    LHOTSE,
    PADDED,
    HALVES,
    SCALED,
    TRL,
    PACKED,
]

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
        learning_rate: of AdamW.
        is_causal: whether targets are the labels but the first.
        collate: pads samples.
        pack: packs samples for a model.
    """

    name: str
    train: Sequence[Any]
    held_out: Sequence[Any]
    make_model: Callable[[int], torch.nn.Module]
    budget: int
    contenders: Sequence[str]
    learning_rate: float = 1e-3
    is_causal: bool = True
    collate: Any = PaddingCollate()  # noqa: RUF009
    pack: Callable[[torch.nn.Module], Any] = lambda _: PackedCollate()


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Return the tokens of each sample."""
    return [len(sample["input_ids"]) for sample in samples]


@cache
def texts(quick: bool) -> tuple[list[Any], list[Any]]:
    """Return the tokens of all texts: those to train on, and those held out."""
    corpus = load_corpus(every=8 if quick else 1)
    train, held_out = (
        [corpus.encode(text)["input_ids"] for text in part]
        for part in (corpus.train, corpus.held_out)
    )
    return train, held_out


def pieces(tokens: np.ndarray, samples: int, seed: int) -> list[Sample]:
    """Return pieces of a text, of lognormal lengths."""
    lengths = lognormal_lengths(
        samples, cv=1.0, mean_tokens=MEAN_TOKENS, longest_tokens=LONGEST_TOKENS, seed=seed
    )
    starts = np.random.default_rng(seed).integers(len(tokens) - lengths)
    cut = [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    return [{"input_ids": piece, "labels": piece} for piece in cut]


@cache
def text_task(quick: bool) -> Task:
    """Return the task of a Llama on text."""
    train, held_out = texts(quick)
    return Task(
        name="text",
        train=pieces(np.concatenate(train), 32 if quick else 2048, seed=0),
        held_out=pieces(np.concatenate(held_out), 16 if quick else 128, seed=1),
        make_model=partial(make_llama, quick),
        budget=4 * LONGEST_TOKENS,
        contenders=[name for name in CONTENDERS if name != SCALED],
    )


def make_llama(quick: bool, seed: int) -> torch.nn.Module:
    """Return a Llama, whose attention stays within each sample of a packed row."""
    torch.manual_seed(seed)
    width = 128 if quick else 512
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2 if quick else 3,
        num_attention_heads=width // 64,
        max_position_embeddings=LONGEST_TOKENS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("per_sample")
    return model


def in_fp32(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention in fp32: on CPUs its gradient in bf16 takes several times as long."""

    def attend_in_fp32(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        with torch.autocast(query.device.type, enabled=False):
            states = (query.float(), key.float(), value.float())
            return attend(module, *states, attention_mask, **options)

    return attend_in_fp32


AttentionInterface.register("per_sample", in_fp32(attend_per_sample))
AttentionInterface.register("sdpa_in_fp32", in_fp32(sdpa_attention_forward))
AttentionMaskInterface.register("sdpa_in_fp32", sdpa_mask)


@cache
def t5_task(quick: bool) -> Task:
    """Return the task of a T5: to say the first quarter of a text again."""
    text = text_task(quick)
    return replace(
        text,
        name="encoder-decoder",
        train=[with_quarter(sample) for sample in text.train],
        held_out=[with_quarter(sample) for sample in text.held_out],
        make_model=partial(make_t5, quick),
        contenders=[name for name in CONTENDERS if name not in (HALVES, SCALED, *PACKED_PLANS)],
        is_causal=False,
        collate=pad_both,
    )


def with_quarter(sample: Sample) -> Sample:
    """Return a sample whose labels are its first quarter."""
    ids = sample["input_ids"]
    return {"input_ids": ids, "labels": ids[: max(1, len(ids) // 4)]}


def make_t5(quick: bool, seed: int) -> torch.nn.Module:
    """Return a T5."""
    torch.manual_seed(seed)
    width, layers = (128, 2) if quick else (384, 3)
    config = T5Config(
        vocab_size=VOCABULARY_SIZE, d_model=width, d_kv=64, d_ff=3 * width, num_layers=layers,
        num_heads=width // 64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def pad_both(samples: list[Sample]) -> Batch:
    """Pad texts, and labels of a length of their own."""
    batch: Batch = PaddingCollate()([{"input_ids": sample["input_ids"]} for sample in samples])
    labels: list[Any] = [{"input_ids": sample["labels"]} for sample in samples]
    return {**batch, "labels": PaddingCollate(pad_token_id=-100)(labels)["input_ids"]}


@cache
def vlm_task(quick: bool) -> Task:
    """Return the task of a Qwen2-VL on drawn pictures."""
    processor = build_processor()
    train, held_out = (
        [processor(pictures[index]) for index in range(len(pictures))]
        for pictures in (Pictures(32 if quick else 2048), Pictures(16 if quick else 256, seed=1))
    )
    width, layers = (64, 2) if quick else (192, 3)
    return Task(
        name="images and text",
        train=train,
        held_out=held_out,
        make_model=partial(make_vlm, processor, width, layers),
        budget=1024,
        contenders=[name for name in CONTENDERS if name != TRL],
        collate=VisionLanguageCollate(dummy=None),
        pack=lambda model: VisionLanguageCollate(dummy=None, model=model),
    )


@cache
def short_task(quick: bool) -> Task:
    """Return the task of a small Qwen2-VL in an epoch of few steps: its loss falls to the end."""
    task = vlm_task(quick)
    return replace(
        task,
        name="images and text, short epoch",
        train=task.train[:160],
        held_out=task.held_out[:64],
        make_model=partial(make_vlm, build_processor(), 64, 2),
        budget=512,
        learning_rate=3e-3,
    )


def make_vlm(processor: Any, width: int, layers: int, seed: int) -> torch.nn.Module:
    """Return a Qwen2-VL that embeds patches by a matrix product, which is faster on CPUs."""
    model = build_vlm(processor, seed=seed, width=width, layers=layers)
    model.set_attn_implementation("sdpa_in_fp32")
    embed = model.model.visual.patch_embed
    embed.forward = lambda pixels: linear(pixels, embed.proj.weight.flatten(1))
    return model


TASKS = {
    "text": text_task,
    "images and text": vlm_task,
    "images and text, short epoch": short_task,
    "encoder-decoder": t5_task,
}
