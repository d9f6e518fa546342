# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# Look at your data, choose options, train, kill the run, resume it, and prove that each sample was
# trained on once: on a CPU, in about two minutes. The data are the functions and classes of
# Python's standard library, a few tokens to a thousand long; the model is a tiny Llama.

# %%
import builtins
import os
import signal
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import matplotlib.pyplot as plt
import torch

here = Path(globals().get("__file__", "first_steps.ipynb")).resolve()  # a notebook has no file
sys.path.insert(0, str(here.parents[1]))  # the modules beside the other examples
from odb_nodes import Checkpoints, Ledger, ODBDataLoader, PaddingCollate, audit, pop_step_info
from odb_nodes.monitor import Monitor, report
from odb_nodes.tools.lengths import observe_lengths
from odb_nodes.tools.profile import profile
from odb_nodes.tools.tune import tune
from tiny_lm import build_model, load_corpus

torch.set_num_threads(1)  # this notebook forks
show = getattr(builtins, "display", print)  # tables in a notebook, text in a terminal
corpus = load_corpus(every=6)
folder = Path(tempfile.mkdtemp())
print(f"{len(corpus.train)} texts; files are in {folder}")

# %% [markdown]
# ## Before training
#
# The length of a sample is known only once it is processed. So we process all of them, and ask
# what batches they come to.

# %%
table = observe_lengths(corpus.train, process_fn=corpus.encode)
found = profile(table, budget=4096, world_sizes=(1,), windows=(256,))
show(found)

# %% [markdown]
# The lengths differ much, which is what fixed batches pay for with padding:

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
lengths = found.lengths[0]
left.stairs(lengths.counts, lengths.edges, fill=True)
left.set(xscale="log", xlabel="tokens", ylabel="samples", title="lengths")
ways = found.comparisons
right.barh([one.strategy for one in ways], [one.figures.padding_share for one in ways])
right.set(xlim=(0, 1), title="share of padding in the batches")
figure.savefig(folder / "lengths.png")

# %% [markdown]
# `tune` simulates many choices of budget, window and accumulation, and proposes one as code.

# %%
tuned = tune(table, world_size=1, limit=4096)
show(tuned)
window = tuned.best.choice.window

# %% [markdown]
# ## Training
#
# The loop is that of plain PyTorch. `info.loss_scale` makes the loss the mean over all tokens of an
# optimizer step. The monitor writes down what happens.


# %%
class Trainer:
    """Model and optimizer, and what a step of training does."""

    def __init__(self):
        self.model = build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, batch, scale=1.0):
        """Train on a batch, and return its loss, before it was scaled."""
        labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        loss = self.model(**inputs, labels=labels).loss
        (loss * scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train_fixed(batch_size=4):
    """An epoch of batches of as many samples each, in a random order."""
    trainer, collate = Trainer(), PaddingCollate()
    order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(0)).tolist()
    real = padded = 0
    start_s = time.perf_counter()
    for start in range(0, len(order), batch_size):
        batch = collate([corpus.encode(corpus.train[n]) for n in order[start : start + batch_size]])
        trainer.step(batch)
        real += int(batch["attention_mask"].sum())
        padded += batch["input_ids"].numel()
    return real / (time.perf_counter() - start_s), 1 - real / padded


def train_dynamic(name, save_every=None):
    """An epoch of dynamic batches, monitored; from the newest checkpoint, if there is one."""
    trainer = Trainer()
    loader = ODBDataLoader(
        corpus.train, token_budget=4096, window=window, process_fn=corpus.encode, seed=0
    )
    run = folder / name
    with Monitor(run, every=2, progress=False) as monitor, Ledger(run / "ledger") as ledger:
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "loader": loader}
        checkpoints = Checkpoints(run / "checkpoints", {**parts, "monitor": monitor})
        step = checkpoints.load()
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            loss = trainer.step(batch, info.loss_scale)
            monitor.step(batch, info, loss=loss)
            ledger.record(info)
            step += 1
            if save_every and step % save_every == 0:
                ledger.sync()
                checkpoints.save(step)
    return trainer.model


# %%
speed, padding = train_fixed()
print(f"fixed batches of 4: {speed:,.0f} tokens/s, {padding:.0%} padding")
expected = train_dynamic("whole")
show(report([str(folder / "whole")], html=str(folder / "report.html")))

# %% [markdown]
# ## Killed, and resumed
#
# A process trains, and is killed with no chance to clean up, once it has saved a checkpoint.

# %%
process = get_context("fork").Process(target=train_dynamic, args=("killed", 5))
process.start()
while not any((folder / "killed" / "checkpoints").glob("*10*")) and process.is_alive():
    time.sleep(0.05)
os.kill(process.pid, signal.SIGKILL)
process.join()
print("the process ended with", process.exitcode)
assert process.exitcode == -signal.SIGKILL

# %% [markdown]
# The same call goes on from the checkpoint: with the same batches, to the same weights, bit for
# bit.

# %%
resumed = train_dynamic("killed", 5)
weights = zip(resumed.parameters(), expected.parameters(), strict=True)
assert all(torch.equal(one, other) for one, other in weights)
print("the resumed run has the weights of the one that was not killed")

# %% [markdown]
# The ledger proves that each sample was trained on once, over both processes.

# %%
proof = audit(folder / "killed" / "ledger", size=len(corpus.train))
show(proof)
assert proof.ok
