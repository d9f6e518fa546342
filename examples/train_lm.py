"""Train a tiny language model on text of long-tailed length, in fixed and in dynamic batches.

The text is every top-level function and class of Python's standard library, tokenised in the
workers, so nobody knows a length beforehand. Both loaders get the same memory: a fixed batch has
room for `token_budget` padded tokens when all its samples are of the greatest length; a dynamic one
fills that room with whatever fits. Both see the same number of samples, in about the same number of
optimizer steps: fixed batches hold fewer samples, so several of them make a step.

Then the dynamic run is repeated, killed in mid-epoch by SIGKILL, and resumed from its last
checkpoint in a new process. Every group and every loss must be those of the run that lived.

    python examples/train_lm.py            # about 3 minutes on 2 cores
    python examples/train_lm.py --steps 8  # a quick look
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import signal
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from odb_nodes import ODBDataLoader, PaddingCollate, load_state, pop_step_info, save_state

MAX_TOKENS = 1024  # of a sample; longer ones are truncated
VOCABULARY_SIZE = 2048
PEAK_LR = 3e-3
SEED = 0
THREADS = 2  # fixed: the order in which threads add up decides the last bits of a loss
FEWEST_STEPS = 6  # with room for a checkpoint, some steps that are lost, and a rest
GONE_WITHIN_S = 30.0
COLORS = {"fixed": "#d1603d", "dynamic": "#1f6f8b"}

Batch = dict[str, torch.Tensor]


class Document(NamedTuple):
    """One item of the dataset."""

    id: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs have in common."""

    documents: list[Document]
    held_out: list[Document]
    encode: Callable[[Document], dict[str, Any]]
    steps: int | None
    token_budget: int
    window: int
    device: str
    workers: int
    output: Path


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, as the log of a run tells it."""

    ids: list[int]
    shapes: list[list[int]]  # rows and width of each batch
    tokens: int  # without padding
    loss: float  # mean over the supervised tokens
    seconds: float  # from the start of the run to the end of the step


def stdlib_documents() -> list[Document]:
    """Return the source of every top-level function and class of the standard library."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                texts.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return list(map(Document._make, enumerate(texts)))


def train_tokenizer(documents: list[Document]) -> ByteLevelBPETokenizer:
    """Return a tokenizer of these documents, whose id 0 is for padding."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        (document.text for document in documents),
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<end>"],
        show_progress=False,
    )
    return tokenizer


def encode(tokenizer: ByteLevelBPETokenizer, document: Document) -> dict[str, Any]:
    """Return a document as tokens. Runs in the workers: only now is its length known."""
    ids = [*tokenizer.encode(document.text).ids, tokenizer.token_to_id("<end>")]
    input_ids = np.array(ids[:MAX_TOKENS])
    return {"id": document.id, "input_ids": input_ids, "labels": input_ids}


class Trainer:
    """A causal language model, its optimizer, and the log of what they did."""

    def __init__(self, job: Job, name: str) -> None:
        torch.set_num_threads(THREADS)
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.job = job
        with torch.device(job.device):
            self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.steps = 0
        self.samples = 0
        self._log = (job.output / f"{name}.jsonl").open("w", buffering=1)  # outlives a kill
        self._start_s = time.perf_counter()

    def step(self, batches: list[Batch], scales: list[float]) -> None:
        """Take one optimizer step over the mean losses of `batches`, multiplied by `scales`."""
        # By samples: nobody knows the last step, since a dynamic batch holds any number of them.
        progress = self.samples / len(self.job.documents)
        self.optimizer.param_groups[0]["lr"] = PEAK_LR * min(0.05 + 5 * progress, 1 - progress)
        ids = [id_ for batch in batches for id_ in batch.pop("id").tolist()]
        loss = 0.0
        for batch, scale in zip(batches, scales, strict=True):
            scaled_loss = self.loss(batch) * scale
            scaled_loss.backward()
            loss += scaled_loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.samples += len(ids)
        shapes = [list(batch["input_ids"].shape) for batch in batches]
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        seconds = time.perf_counter() - self._start_s
        self.log(**asdict(Step(ids=ids, shapes=shapes, tokens=tokens, loss=loss, seconds=seconds)))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the supervised tokens of a batch."""
        inputs = {key: value.to(self.job.device) for key, value in batch.items()}
        loss: torch.Tensor = self.model(**inputs).loss
        return loss

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the tokens of the documents held out."""
        job, total, targets = self.job, 0.0, 0
        for batch in ODBDataLoader(
            job.held_out, token_budget=job.token_budget, process_fn=job.encode, shuffle=False
        ):
            info = pop_step_info(batch)
            del batch["id"]
            total += self.loss(batch).item() * info.local_targets
            targets += info.local_targets
        return total / targets

    def log(self, **entry: Any) -> None:
        """Write a line of the log."""
        self._log.write(json.dumps(entry) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, beside its batch."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rngs": (torch.get_rng_state(), torch.cuda.get_rng_state_all()),
            "done": (self.steps, self.samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was called."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rngs"][0])
        torch.cuda.set_rng_state_all(state["rngs"][1])
        self.steps, self.samples = state["done"]


def train_dynamic(
    job: Job, name: str, *, save_every: int = 0, kill_at: int | None = None, resume: bool = False
) -> None:
    """Train in dynamic batches; save checkpoints, die at a step, or go on from a checkpoint."""
    checkpoint = job.output / "checkpoint.pt"
    trainer = Trainer(job, name)
    loader = ODBDataLoader(
        job.documents,
        token_budget=job.token_budget,
        window=job.window,
        process_fn=job.encode,
        num_workers=job.workers,
        seed=SEED,
    )
    if resume:
        state = load_state(checkpoint)
        trainer.load_state_dict(state["trainer"])
        loader.load_state_dict(state["loader"])
    left = None if job.steps is None else job.steps - trainer.steps
    with loader, tqdm(desc=name, total=loader.num_samples, initial=trainer.samples) as bar:
        for batch in islice(loader, left):
            info = pop_step_info(batch)
            trainer.step([batch], [info.loss_scale])
            bar.update(info.local_samples)
            if save_every and trainer.steps % save_every == 0:
                state = {"trainer": trainer.state_dict(), "loader": loader.state_dict()}
                save_state(state, checkpoint)
            if trainer.steps == kill_at:
                trainer.log(worker_pids=loader.worker_pids)
                os.kill(os.getpid(), signal.SIGKILL)
    trainer.log(replayed_samples=loader.replayed_samples, held_out_loss=trainer.held_out_loss())


def train_fixed(job: Job, samples: int, steps: int) -> None:
    """Train on as many samples in about as many steps, each of one or more fixed batches."""
    trainer = Trainer(job, "fixed")
    batch_size = job.token_budget // MAX_TOKENS  # one more could exceed the budget
    loader: DataLoader[Document] = DataLoader(
        job.documents,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=RandomSampler(
            job.documents, num_samples=samples, generator=torch.Generator().manual_seed(SEED)
        ),
        collate_fn=partial(collate, job.encode),
        num_workers=job.workers,
    )
    batches = iter(loader)
    batches_per_step = max(1, round(samples / steps / batch_size))
    with tqdm(desc="fixed", total=samples) as bar:
        while group := list(islice(batches, batches_per_step)):
            targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in group]
            trainer.step(group, [count / sum(targets) for count in targets])
            bar.update(trainer.samples - bar.n)
    trainer.log(held_out_loss=trainer.held_out_loss())


def collate(
    encode: Callable[[Document], dict[str, Any]], documents: list[Document]
) -> dict[str, Any]:
    """Return a fixed batch. Runs in the workers."""
    return PaddingCollate()(list(map(encode, documents)))


def read_log(job: Job, name: str) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps of a run, finished or killed, and the other facts in its log."""
    lines = (job.output / f"{name}.jsonl").read_text().splitlines()
    entries = list(map(json.loads, lines))
    steps = [Step(**entry) for entry in entries if "loss" in entry]
    facts = {key: value for entry in entries if "loss" not in entry for key, value in entry.items()}
    return steps, facts


def check_resume(job: Job) -> str:
    """Kill a repetition of the dynamic run, resume it, compare, and return what happened.

    Raises:
        SystemExit: a process did not end as it should, left a worker behind, or a group or a loss
            is not that of the uninterrupted run.
    """
    whole, _ = read_log(job, "dynamic")
    if len(whole) < FEWEST_STEPS:
        raise SystemExit(f"resume: {len(whole)} steps are too few, {FEWEST_STEPS} are needed.")
    save_every = max(3, len(whole) // 8)
    saved = len(whole) // 2 // save_every * save_every
    kill_at = saved + 2
    run_in_process(job, "killed", -signal.SIGKILL, save_every=save_every, kill_at=kill_at)
    killed, facts = read_log(job, "killed")
    gone_s = await_end(facts["worker_pids"])
    run_in_process(job, "resumed", 0, resume=True)
    resumed, facts = read_log(job, "resumed")
    difference = loss_difference([*whole[:kill_at], *whole[saved:]], [*killed, *resumed])
    if difference and job.device == "cpu":
        raise SystemExit(f"resume: the losses differ by up to {difference}. See {job.output}.")
    return (
        f"Killed after step {kill_at}, {kill_at - saved} steps after its checkpoint: "
        f"its {job.workers} workers were gone {gone_s:.1f} s later.\n"
        f"Resumed at step {saved}, with {facts['replayed_samples']} samples processed again: all "
        f"{len(resumed)} groups to step {len(whole)} are the same, and the losses "
        + (f"differ by up to {difference:.1e}." if difference else "are equal to the last bit.")
    )


def run_in_process(job: Job, name: str, exit_code: int, **options: Any) -> None:
    """Train in dynamic batches in a process of its own, which must end with `exit_code`."""
    process = multiprocessing.get_context("spawn").Process(
        target=train_dynamic, args=(job, name), kwargs=options
    )
    process.start()
    process.join()
    if process.exitcode != exit_code:
        raise SystemExit(
            f"resume: the process of the {name} run must end with exit code {exit_code}, but ended "
            f"with {process.exitcode} instead."
        )


def await_end(pids: list[int]) -> float:
    """Wait until none of these processes runs any more, and return the seconds it took.

    Raises:
        SystemExit: some still run after `GONE_WITHIN_S`.
    """
    start_s = time.perf_counter()
    while running := list(filter(is_running, pids)):
        if time.perf_counter() - start_s > GONE_WITHIN_S:
            raise SystemExit(f"resume: workers {running} outlived the process that was killed.")
        time.sleep(0.05)
    return time.perf_counter() - start_s


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, other than one that is dead and not yet reaped."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status")
        return not status.exists() or "State:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def loss_difference(expected: list[Step], actual: list[Step]) -> float:
    """Return the largest difference of a loss between steps that took the same groups.

    Raises:
        SystemExit: they did not.
    """
    if [step.ids for step in expected] != [step.ids for step in actual]:
        raise SystemExit("resume: the groups are not those of the uninterrupted run.")
    return max(abs(a.loss - b.loss) for a, b in zip(expected, actual, strict=True))


def summary(job: Job, name: str) -> dict[str, str]:
    """Return the figures of a run for the table."""
    steps, facts = read_log(job, name)
    padded = [rows * width for step in steps for rows, width in step.shapes]
    samples, tokens = sum(len(step.ids) for step in steps), sum(step.tokens for step in steps)
    seconds = steps[-1].seconds
    return {
        "samples": f"{samples:,}",
        "optimizer steps": f"{len(steps):,}",
        "batches": f"{len(padded):,}",
        "largest batch, padded tokens": f"{max(padded):,}",
        "padding": f"{1 - tokens / sum(padded):.1%}",
        "seconds": f"{seconds:.1f}",
        "samples/s": f"{samples / seconds:,.1f}",
        "real tokens/s": f"{tokens / seconds:,.0f}",
        "held-out loss, nats/token": f"{facts['held_out_loss']:.3f}",
    }


def table(job: Job) -> str:
    """Return the comparison of the two runs as text."""
    fixed, dynamic = summary(job, "fixed"), summary(job, "dynamic")
    rows = [("", "fixed", "dynamic"), *((key, fixed[key], dynamic[key]) for key in fixed)]
    return "\n".join(f"{key:30}{left:>10}{right:>10}" for key, left, right in rows)


def plot(job: Job) -> Path:
    """Draw loss, batch shapes and fill of both runs, and return the path of the picture."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = curve, shape, fill = figure.subplots(1, 3)
    widths = np.geomspace(8, MAX_TOKENS)
    shape.loglog(widths, job.token_budget / widths, color="0.6", linewidth=1, label="token budget")
    for name, color in COLORS.items():
        steps, _ = read_log(job, name)
        tokens, losses, seconds = np.array([(s.tokens, s.loss, s.seconds) for s in steps]).T
        recent = np.ones(5)
        mean = np.convolve(losses * tokens, recent, "valid") / np.convolve(tokens, recent, "valid")
        rows, width = np.array([shape for step in steps for shape in step.shapes]).T
        curve.plot(seconds[len(recent) - 1 :], mean, color=color, label=name)
        shape.plot(width, rows, "o", color=color, markersize=4, alpha=0.5, label=name)
        fill.hist(rows * width, color=color, alpha=0.6, label=name)
    curve.set(xlabel="seconds", ylabel="training loss, nats/token")
    shape.set(xlabel="width of a batch, tokens", ylabel="samples in a batch")
    fill.set(xlabel="real tokens in a batch", ylabel="batches")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False)
    path = job.output / "train_lm.png"
    figure.savefig(path, dpi=150)
    return path


def parse_job() -> Job:
    """Return the job that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, help="most steps of a dynamic run; default: one epoch")
    add("--token-budget", type=int, default=4096, help="padded tokens of a batch")
    add("--window", type=int, default=256, help="samples waiting to be grouped")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    add("--workers", type=int, default=2, help="processes that tokenise")
    add("--output", type=Path, default=Path("runs/train_lm"), help="folder for logs and picture")
    options = parser.parse_args()
    if options.token_budget < MAX_TOKENS:
        parser.error(f"--token-budget must hold a sample of {MAX_TOKENS} tokens")
    if options.steps is not None and options.steps < FEWEST_STEPS:
        parser.error(f"--steps must be at least {FEWEST_STEPS}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    documents = stdlib_documents()
    train = [document for document in documents if document.id % 16]
    held_out = documents[::16]
    process = partial(encode, train_tokenizer(train))
    return Job(documents=train, held_out=held_out, encode=process, **vars(options))


def main() -> None:
    """Compare the batches, check the resume, and show both."""
    job = parse_job()
    train_dynamic(job, "dynamic")
    steps, _ = read_log(job, "dynamic")
    train_fixed(job, samples=sum(len(step.ids) for step in steps), steps=len(steps))
    resume = check_resume(job)
    print(f"\n{resume}\n\n{table(job)}\n\nPicture: {plot(job)}")


if __name__ == "__main__":
    main()
