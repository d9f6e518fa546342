"""Training loops of Accelerate: what their programs run, on each rank."""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import language_models
import torch
import torch.distributed as dist
from accelerate import Accelerator
from language_models import LR, Texts, append, gradient_of, rank_and_size, read, weights_of
from memory_faults import fail

from odb_nodes import Ledger, ODBDataLoader, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from odb_nodes.memory import OomGuard

SCALES = {
    "ours": lambda info, steps: info.loss_scale,
    "none": lambda info, steps: 1.0,
    "twice": lambda info, steps: info.loss_scale * steps,
}


def train(
    folder,
    name="train",
    *,
    model="Averaging",
    size=40,
    accumulate=1,
    epochs=2,
    token_budget=64,
    save_every=0,
    kill_at=None,
    resume=None,
    scale="ours",
    ledger=None,
    monitor=None,
    exclude=None,
):
    """Train as a user would; records into `folder/name-rank.jsonl`. Returns the final weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    raw = getattr(language_models, model)()
    optimizer = torch.optim.SGD(raw.parameters(), lr=LR, momentum=0.9)
    options = {"window": 12, "round_size": 4, "accumulate": accumulate, "exclude": exclude}
    loader = ODBDataLoader(Texts(size), token_budget=token_budget, **options)
    loader = configure_accelerator(accelerator, loader, ledger, monitor)
    model, optimizer, loader = accelerator.prepare(raw, optimizer, loader)
    first_epoch = step = 0
    if resume is not None:
        accelerator.load_state(resume)
        step = int(Path(resume).name.removeprefix("step-"))
        first_epoch = json.loads(Path(resume, "epoch.json").read_text())
    path = folder / f"{name}-{rank_and_size()[0]}.jsonl"
    with loader:
        for epoch in range(first_epoch, epochs):
            samples, fillers = 0, []
            for batch in loader:
                info = pop_step_info(batch)
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    loss = loss if info.local_targets else 0.0 * weights(model).sum()
                    accelerator.backward(loss * SCALES[scale](info, accumulate))
                    fillers.append(info.is_filler)
                    assert accelerator.sync_gradients == info.ends_optimizer_step
                    if accelerator.sync_gradients:
                        entry = {"before": weights_of(raw).tolist(), "ids": raw.seen}
                        entry |= {"gradient": gradient_of(raw).tolist(), "fillers": fillers}
                        raw.seen, fillers = [], []
                    optimizer.step()
                    optimizer.zero_grad()
                if monitor is not None:
                    monitor.step(batch, info, loss=loss.detach(), lr=LR)
                samples += info.all_samples_this_step
                if not info.ends_optimizer_step:
                    continue
                step += 1
                append(path, entry | {"step": step, "epoch": epoch + samples / size})
                if save_every and step % save_every == 0:
                    checkpoint = folder / f"step-{step}"
                    accelerator.save_state(checkpoint, safe_serialization=False)
                    (checkpoint / "epoch.json").write_text(str(epoch))
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
    accelerator.free_memory()
    return weights_of(raw)


def train_guarded(
    folder, fails, *, accumulate=1, size=40, epochs=2, save_at=None, resume=None, ledger=None
):
    """Train by an `OomGuard`, with a model of the accelerator. Returns weights, and its failures.

    Args:
        fails: which batches run out of memory, see `memory_faults.fail`.
        save_at: after which step a checkpoint is saved.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    raw = fail(language_models.Normalizing(), "features", fails, "backward")
    optimizer = torch.optim.SGD(raw.parameters(), lr=LR, momentum=0.9)
    options = {"window": 12, "round_size": 4, "accumulate": accumulate}
    loader = ODBDataLoader(Texts(size), token_budget=64, **options)
    configured = configure_accelerator(accelerator, loader)
    model, optimizer = accelerator.prepare(raw, optimizer)
    if resume is not None:
        accelerator.load_state(resume)
    guard, step = OomGuard(configured.loader, guard_above=0.0), 0
    rank, world_size = rank_and_size()
    with configured, Ledger(ledger or folder, rank=rank, world_size=world_size) as kept:
        for _ in range(epochs):
            for guarded in guard:
                guarded.backward(model, lambda batch: model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                for info in guarded.infos:
                    kept.record(info)
                step += 1
                if step == save_at:
                    kept.sync()
                    accelerator.save_state(Path(folder, f"step-{step}"), safe_serialization=False)
    accelerator.free_memory()
    return weights_of(raw), guard.ooms


def weights(model):
    return torch.cat([one.flatten() for one in model.parameters()])


def resume_everywhere(folder, places=None, **options):
    """Train with a checkpoint at every step, then go on from each place (default: all)."""
    rank = rank_and_size()[0]
    final = train(folder, "whole", save_every=1, **options)
    entries = read(Path(folder, f"whole-{rank}.jsonl"))
    every = range(1, len(entries) + 1)
    resumable = [place for place in every if entries[place - 1]["epoch"] % 1 or place < every[-1]]
    for place in resumable if places is None else sorted({*places(len(entries))} & {*resumable}):
        found = train(folder, f"from-{place}", resume=f"{folder}/step-{place}", **options)
        # At the end of an epoch, its rest is empty; the next epochs are numbered as before.
        rest = read(Path(folder, f"from-{place}-{rank}.jsonl"))
        for got, expected in zip(rest, entries[place:], strict=True):
            assert {**got, "epoch": 0} == {**expected, "epoch": 0}, place
        assert torch.equal(found, final), place
    return entries


def main():
    """Train as `sys.argv[1]`, JSON, says; print the final weights."""
    torch.set_num_threads(1)
    print(json.dumps(train(**json.loads(sys.argv[1])).tolist()), flush=True)
    if dist.is_initialized():
        gc.collect()  # see `rank_jobs.finish`
        dist.destroy_process_group()
