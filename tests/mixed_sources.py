"""Three sources, each with processing of its own, that several tests and rank programs mix."""

import json
import random

import numpy as np
import torch
from torch.utils.data import IterableDataset

from odb_nodes import JsonlSource, ODBDataLoader, pop_step_info

TEMPLATES = ("user: {} bot: {}", "<u>{}<b>{}", "Q {}\nA {}")
WEIGHTS = {"chat": 0.5, "captions": 0.3, "ocr": 0.2}


def encode(text, masked=0):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < masked, -100, ids)}


def chat(record):
    """A template that Python draws, and a cut that torch does; the question is not learned."""
    text = random.choice(TEMPLATES).format(record["question"], record["answer"])
    return encode(text[: len(text) - int(torch.randint(3, ()))], masked=len(record["question"]))


def caption(text):
    return encode(" ".join(np.random.permutation(text.split())))


def ocr(pair):
    shape, text = pair
    return encode(f"{shape[0]}x{shape[1]} {text}", masked=4)


FUNCTIONS = {"chat": chat, "captions": caption, "ocr": ocr}


class Scans(IterableDataset):
    def __iter__(self):
        return (((n, n + 1), "scan " * (n % 7 + 1)) for n in range(16))


def write_chats(path, size=24):
    records = [{"question": "why " * (n % 5 + 1), "answer": f"since {n} " * 3} for n in range(size)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


SIZES = {"chat": 24, "captions": 30, "ocr": 16}


def mixture(chats):
    captions = [f"the picture number {n} of " + "very " * (n % 11) + "many" for n in range(30)]
    return {"chat": JsonlSource(chats), "captions": captions, "ocr": Scans()}


def make(datasets, **options):
    given = {"token_budget": 400, "window": 12, "seed": 3, "round_size": 8, **options}
    given = {"weights": WEIGHTS, "process_fn": FUNCTIONS, **given}
    return ODBDataLoader(datasets(), **given)


def rows(loader):
    """What the batches of an epoch hold, as plain data."""
    return [(pop_step_info(batch), batch["input_ids"].tolist()) for batch in loader]
