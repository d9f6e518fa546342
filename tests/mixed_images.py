"""A chat JSONL, captions and scans, each with its own processing, for one model."""

import json
import random
from dataclasses import replace

import numpy as np
from images import asked, noise
from pictures import augmented, processor

from odb_nodes import JsonlSource, ODBDataLoader, TokenBudget
from odb_nodes.training.vision import VisionLanguageCollate
from tiny_vlm import Pictures

SIZES = {"chats": 12, "captions": 16, "scans": 8}
WEIGHTS = {"chats": 0.3, "captions": 0.5, "scans": 0.2}


def write_chats(path):
    records = [
        {"id": n, "question": "why " * (7 * n), "answer": f"since {n} " * 3} for n in range(12)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(record):
    """Text alone, in a random template, and without types of tokens."""
    ids = [
        processor().tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (random.choice(("{} ", "Q: {}\n")).format(record["question"]), record["answer"])
    ]
    labels = [-100] * len(ids[0]) + ids[1]
    return {"id": record["id"], "input_ids": sum(ids, []), "labels": labels}


def scan(number):
    """A page whose noise numpy draws; its patches are made with the batch."""
    page = noise(40 + 7 * number, 60, seed=int(np.random.randint(1000)))
    return replace(processor(), late_patches=True)(asked(page, question="Read.", id=100 + number))


FUNCTIONS = {"chats": chat, "captions": augmented, "scans": scan}


def make(chats, **options):
    collate = VisionLanguageCollate(
        dummy=processor().dummy_image(), image_processor=processor().image_processor
    )
    return ODBDataLoader(
        {"chats": JsonlSource(chats), "captions": Pictures(16), "scans": range(8)},
        token_budget=TokenBudget(300, max_samples=2, max_patches=160),
        collate_fn=collate,
        process_fn=FUNCTIONS,
        weights=WEIGHTS,
        window=6,
        round_size=4,
        **options,
    )
