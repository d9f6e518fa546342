"""Train one small model on three tasks about one or two images each.

    python examples/train_tasks.py             # ten seconds on 2 cores
    python examples/train_tasks.py --resume    # go on from the last checkpoint

`lines` asks which way the stripes of an image go, `same` whether those of two images go the same
way, `brighter` which of two images is the brighter one. The images are of any size, drawn as they
are read, and resized with their batch. A batch has as many tokens and patches as fit into a memory
of 768 KiB, which is found by trying. GradNorm weighs the tasks, a monitor writes down what each of
them does, and a ledger which samples were trained on. The last lines are a report, an audit, and
the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from odb_nodes import (
    Checkpoints,
    Ledger,
    Observation,
    ODBDataLoader,
    TokenBudget,
    audit,
    pop_step_info,
)
from odb_nodes.memory import find_budget
from odb_nodes.monitor import Monitor, report
from odb_nodes.tasks import GradNorm, TaskWeights
from odb_nodes.testing import SavedTensorMeter
from odb_nodes.vision import MultiImageCollate

QUESTIONS = {
    "lines": ("Rows or columns?", "Which way do the lines go?"),
    "same": ("Do both go the same way?", "Alike?"),
    "brighter": ("Which is brighter?", "Is there more light in the second image?"),
}
OPENINGS = ("", "Hi! ", "Please tell me: ", "Look closely at this. ")
IMAGE_SIZE, PATCH_SIZE = (32, 32), 8  # pixels
IMAGE_PATCHES = 16
MOST_IMAGES = 2  # of a sample
LIMIT_BYTES = 3 * 2**18

Batch = dict[str, Any]

collate = MultiImageCollate(resize=IMAGE_SIZE)


class Scenes:
    """A map-style dataset of questions of one task; each image is drawn when it is read.

    Args:
        task: name of the task.
        size: number of questions.
    """

    def __init__(self, task: str, size: int) -> None:
        self._task, self._size = task, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a question, its images and the number of its answer, 0 or 1."""
        task_id = [*QUESTIONS].index(self._task)
        rng = np.random.default_rng([index, task_id])
        first, second = rng.integers(2, size=2)  # whether the stripes are columns
        lights = rng.permutation([0.3, 0.6])
        answer = {"lines": first, "same": first == second, "brighter": lights[1] > lights[0]}
        images = [draw(rng, first, lights[0]), draw(rng, second, lights[1])]
        return {
            "question": rng.choice(OPENINGS) + rng.choice(QUESTIONS[self._task]),
            "images": images[:1] if self._task == "lines" else images,
            "answer": int(answer[self._task]),
            "task_id": task_id,
        }


def draw(rng: np.random.Generator, is_columns: int, light: float) -> np.ndarray:
    """Return an image of four stripes, (H, W) uint8."""
    height, width = rng.integers(16, 64, size=2)
    across = np.linspace(0, 8 * np.pi, width if is_columns else height)
    stripes = np.sin(across)[None, :] if is_columns else np.sin(across)[:, None]
    noise = rng.normal(scale=0.1, size=(height, width))
    return (255 * np.clip(light + 0.2 * stripes + noise, 0, 1)).astype(np.uint8)


def encode(record: dict[str, Any]) -> dict[str, Any]:
    """Return a sample: the question as bytes, and the images as (1, H, W) float32."""
    return {
        "input_ids": [*record["question"].encode()],
        "pixel_values": [image[None].astype(np.float32) / 255 for image in record["images"]],
        "answer": record["answer"],
        "task_id": record["task_id"],
    }


def observe(sample: dict[str, Any]) -> Observation:
    """Return what a sample costs: its tokens and patches. Its one answer is supervised."""
    patches = collate.count_patches(sample, PATCH_SIZE)
    return Observation(len(sample["input_ids"]), targets=1, patches=patches)


class Model(nn.Module):
    """Sees up to two images, reads a question, and has a head of two answers for each task."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(1, features, PATCH_SIZE, stride=PATCH_SIZE),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(IMAGE_PATCHES * features, features),
            nn.ReLU(),
        )
        self.read = nn.EmbeddingBag(256, features, padding_idx=0)
        self.join = nn.Linear((MOST_IMAGES + 1) * features, 64)
        self.heads = nn.Linear(64, 2 * len(QUESTIONS))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each sample, (B,)."""
        mask = batch["image_mask"]
        text = self.read(batch["input_ids"])
        seen = text.new_zeros(len(mask), MOST_IMAGES, text.shape[1])
        seen[:, : mask.shape[1]][mask] = self.see(batch["pixel_values"][mask])
        joined = torch.relu(self.join(torch.cat([seen.flatten(1), text], 1)))
        answers = self.heads(joined).unflatten(1, (len(QUESTIONS), 2))
        asked = answers[torch.arange(len(mask)), batch["task_id"]]
        return nn.functional.cross_entropy(asked, batch["answer"], reduction="none")


def fit_budget(model: Model, optimizer: torch.optim.Optimizer) -> TokenBudget:
    """Return the budget of the largest batches that fit into the memory."""

    def train_step(batch: Batch) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(rows: int, width: int, _patches: int) -> Batch:
        images = np.zeros((1, 1, *IMAGE_SIZE), np.float32)  # most rows for its patches
        sample = {"input_ids": [1] * width, "pixel_values": images, "answer": 0, "task_id": 0}
        return collate([sample] * rows)

    return find_budget(
        train_step,
        make_batch,
        states=[model, optimizer],
        meter=SavedTensorMeter(LIMIT_BYTES),
        widths=[6, 32, 62],  # tokens of the shortest and the longest question, and between
        patches_per_row=IMAGE_PATCHES,
    ).budget


def main() -> None:
    """Train, save a checkpoint every few steps, and report on each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1200, help="of each task (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_tasks"), help="folder")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    budget = fit_budget(model, optimizer)
    print(f"budget: {budget.tokens} tokens, {budget.max_patches} patches")
    weights = TaskWeights(dict.fromkeys(QUESTIONS, 1.0))
    balance = GradNorm(weights, model.join.parameters(), rate=0.05)
    loader = ODBDataLoader(
        {task: Scenes(task, options.samples) for task in QUESTIONS},
        token_budget=budget,
        window=512,
        process_fn=encode,
        observe=observe,
        collate_fn=collate,
        diversity=0.5,
        tasks=[*weights],
        num_workers=1,
        seed=0,
    )
    records, ledger = options.output / "monitor", Ledger(options.output / "ledger")
    with loader, ledger, Monitor(records, every=5, writers=("jsonl", "tensorboard")) as monitor:
        parts = {"model": model, "optimizer": optimizer, "balance": balance}
        parts |= {"loader": loader, "monitor": monitor}
        checkpoints = Checkpoints(options.output / "checkpoints", parts)
        step = checkpoints.load() if options.resume else 0
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            losses = model(batch)
            balance.observe(losses, info)
            loss = weights.loss(losses, info)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            balance.step()
            step += 1
            monitor.step(
                batch,
                info,
                loss=losses.mean(),
                loss_by_source=weights.by_task(losses, info),
                values={f"weight/{task}": weight for task, weight in weights.items()},
            )
            ledger.record(info)
            images = int(batch["image_mask"].sum())
            print(f"step {step}: loss {loss:.6f}, {info.local_samples} samples, {images} images")
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break
    found = audit(options.output / "ledger", dict.fromkeys(QUESTIONS, options.samples))
    print(f"\n{report(records, html=options.output / 'report.html')}\n\n{weights}")
    if not found.ok:
        raise SystemExit(str(found))


if __name__ == "__main__":
    main()
