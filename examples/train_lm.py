"""Train a tiny language model in fixed and in dynamic batches; kill it, and resume it exactly.

    python examples/train_lm.py            # about 3 minutes on 2 cores
    python examples/train_lm.py --steps 8  # a quick look

The text is every top-level function and class of Python's standard library: a few tokens to many
thousands, tokenized in the workers, so no length is known beforehand. Both methods get the same
memory: a fixed batch has room for `--token-budget` padded tokens should all its samples be of the
greatest length, a dynamic one fills that room. Both train on the same number of samples in about
the same number of optimizer steps: fixed batches hold less, so a step takes several of them.

Then the dynamic run is repeated in a process that kills itself in mid-epoch, and goes on from its
last checkpoint in another. Every group and every loss must be that of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import signal
import sysconfig
import threading
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
FEWEST_STEPS = 6  # enough for a checkpoint, steps that are lost with the process, and a rest
GONE_WITHIN_S = 30.0
COLORS = {"fixed": "#d1603d", "dynamic": "#1f6f8b"}

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which a kill would leak


class Document(NamedTuple):
    """One item of the dataset."""

    id: int
    text: str


Batch = dict[str, Any]
Encode = Callable[[Document], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs have in common: the data, and the options of the command line."""

    documents: list[Document]
    held_out: list[Document]
    encode: Encode
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
    batches: list[tuple[int, int, int]]  # samples, width, and tokens without the padding
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


def encode_and_collate(encode: Encode, documents: list[Document]) -> Batch:
    """Return a fixed batch. Runs in the workers too."""
    return PaddingCollate()(list(map(encode, documents)))


class Trainer:
    """A causal language model, its optimizer, and a log of what they do."""

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
        with torch.device(job.device):
            self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.steps = self.samples = 0
        self._job = job
        self._log = job.output / f"{name}.jsonl"
        self._log.write_text("")
        self._start_s = time.perf_counter()

    def step(self, batches: list[Batch], loss_scales: list[float]) -> None:
        """Take one optimizer step over the mean losses of `batches` times `loss_scales`."""
        # By samples: the number of dynamic batches is known only when the epoch has ended.
        progress = self.samples / len(self._job.documents)
        self.optimizer.param_groups[0]["lr"] = PEAK_LR * min(0.05 + 5 * progress, 1 - progress)
        ids = [i for batch in batches for i in batch.pop("id").tolist()]
        total = 0.0
        for batch, loss_scale in zip(batches, loss_scales, strict=True):
            loss = self._loss(batch) * loss_scale
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.samples += len(ids)
        sizes = [
            (*batch["input_ids"].shape, int(batch["attention_mask"].sum())) for batch in batches
        ]
        seconds = time.perf_counter() - self._start_s
        self.log(**asdict(Step(ids=ids, batches=sizes, loss=total, seconds=seconds)))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the supervised tokens of the documents held out."""
        job, total, targets = self._job, 0.0, 0
        for batch in ODBDataLoader(
            job.held_out, token_budget=job.token_budget, process_fn=job.encode, shuffle=False
        ):
            info = pop_step_info(batch)
            del batch["id"]
            total += self._loss(batch).item() * info.local_targets
            targets += info.local_targets
        return total / targets

    def log(self, **entry: Any) -> None:
        """Add a line to the log; it outlives this process, however that ends."""
        with self._log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

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

    def _loss(self, batch: Batch) -> torch.Tensor:
        inputs = {key: value.to(self._job.device) for key, value in batch.items()}
        loss: torch.Tensor = self.model(**inputs).loss
        return loss


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
    """Train in fixed batches on as many samples, in about as many optimizer steps."""
    trainer = Trainer(job, "fixed")
    batch_size = job.token_budget // MAX_TOKENS  # one more sample could exceed the budget
    generator = torch.Generator().manual_seed(SEED)
    loader: DataLoader[Document] = DataLoader(
        job.documents,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=RandomSampler(job.documents, num_samples=samples, generator=generator),
        collate_fn=partial(encode_and_collate, job.encode),
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


def read_log(job: Job, name: str) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps of a run, finished or killed, and what else its log says."""
    steps, facts = [], {}
    for line in (job.output / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "ids" in entry:
            steps.append(Step(**entry))
        else:
            facts.update(entry)
    return steps, facts


def check_resume(job: Job) -> str:
    """Kill a repetition of the dynamic run, resume it, compare, and return what happened."""
    whole, _ = read_log(job, "dynamic")
    if len(whole) < FEWEST_STEPS:
        raise SystemExit(f"resume: the run must have {FEWEST_STEPS} steps, but has {len(whole)}.")
    save_every = max(3, len(whole) // 8)
    saved = len(whole) // 2 // save_every * save_every
    kill_at = saved + 2
    run_in_process(job, "killed", -signal.SIGKILL, save_every=save_every, kill_at=kill_at)
    killed, facts = read_log(job, "killed")
    gone_s = await_end(facts["worker_pids"])
    run_in_process(job, "resumed", 0, resume=True)
    resumed, facts = read_log(job, "resumed")
    verdict = compare(whole[:kill_at] + whole[saved:], killed + resumed, job.device)
    return (
        f"Killed after step {kill_at}, {kill_at - saved} steps after its last checkpoint; its "
        f"{job.workers} workers were gone {gone_s:.1f} s later.\n"
        f"Resumed at step {saved}, with {facts['replayed_samples']} samples processed again; "
        f"{verdict} up to step {len(whole)}."
    )


def run_in_process(job: Job, name: str, exit_code: int, **options: Any) -> None:
    """Train in dynamic batches in a process of its own, which must end with `exit_code`."""
    process = multiprocessing.get_context("spawn").Process(
        target=train_in_child, args=(multiprocessing.get_start_method(), job, name, options)
    )
    process.start()
    process.join()
    if process.exitcode != exit_code:
        raise SystemExit(
            f"resume: the {name} run ended with exit code {process.exitcode}, not {exit_code}."
        )


def train_in_child(start_method: str, job: Job, name: str, options: dict[str, Any]) -> None:
    """Train in this new process, whose workers start as those of its parent do."""
    multiprocessing.set_start_method(start_method, force=True)  # "spawn" in a spawned process
    train_dynamic(job, name, **options)


def await_end(pids: list[int]) -> float:
    """Wait until none of these processes runs any more, and return the seconds it took."""
    start_s = time.perf_counter()
    while running := list(filter(is_running, pids)):
        if time.perf_counter() - start_s > GONE_WITHIN_S:
            raise SystemExit(f"resume: workers {running} outlived the process that was killed.")
        time.sleep(0.05)
    return time.perf_counter() - start_s


def is_running(pid: int) -> bool:
    """Tell whether there is such a process; one that is dead but not reaped does not count."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status")
        return not status.exists() or "State:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def compare(expected: list[Step], actual: list[Step], device: str) -> str:
    """Return what a resume kept: the groups everywhere, and on a CPU the losses to the last bit."""
    if [step.ids for step in expected] != [step.ids for step in actual]:
        raise SystemExit("resume: the groups are not those of the uninterrupted run.")
    difference = max(abs(a.loss - b.loss) for a, b in zip(expected, actual, strict=True))
    if difference and device == "cpu":
        raise SystemExit(f"resume: the groups are the same, but losses differ by {difference}.")
    if difference:
        return f"groups equal those of the uninterrupted run, losses differ by {difference:.1e}"
    return "groups and losses equal those of the uninterrupted run to the last bit"


def figures(job: Job, name: str) -> dict[str, str]:
    """Return what the table says of a run."""
    steps, facts = read_log(job, name)
    samples, widths, tokens = np.array([batch for step in steps for batch in step.batches]).T
    padded = samples * widths
    seconds = steps[-1].seconds
    return {
        "samples": f"{samples.sum():,}",
        "optimizer steps": f"{len(steps):,}",
        "batches": f"{len(padded):,}",
        "largest batch, padded tokens": f"{padded.max():,}",
        "padding": f"{1 - tokens.sum() / padded.sum():.1%}",
        "seconds": f"{seconds:.1f}",
        "samples/s": f"{samples.sum() / seconds:,.1f}",
        "real tokens/s": f"{tokens.sum() / seconds:,.0f}",
        "held-out loss, nats/token": f"{facts['held_out_loss']:.3f}",
    }


def table(job: Job) -> str:
    """Return the comparison of both methods as text."""
    fixed, dynamic = figures(job, "fixed"), figures(job, "dynamic")
    rows = [("", "fixed", "dynamic"), *((label, fixed[label], dynamic[label]) for label in fixed)]
    return "\n".join(f"{label:30}{left:>10}{right:>10}" for label, left, right in rows)


def plot(job: Job) -> Path:
    """Draw loss, shapes and fill of the batches of both methods, and return the picture's path."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, shape, fill = figure.subplots(1, 3)
    widths = np.geomspace(16, MAX_TOKENS)
    shape.loglog(widths, job.token_budget / widths, color="0.5", linewidth=1, label="token budget")
    for name, color in COLORS.items():
        steps, _ = read_log(job, name)
        samples, widths, tokens = np.array([batch for step in steps for batch in step.batches]).T
        seconds, losses = np.array([(step.seconds, step.loss) for step in steps]).T
        loss.plot(seconds, losses, color=color, alpha=0.3, linewidth=1)
        recent = min(6, len(steps))
        mean = np.convolve(losses, np.full(recent, 1 / recent), "valid")
        loss.plot(seconds[recent - 1 :], mean, color=color, label=f"{name}, mean of {recent} steps")
        shape.plot(widths, samples, "o", color=color, markersize=4, alpha=0.5, label=name)
        bins = np.linspace(0, job.token_budget, 17).tolist()
        fill.hist(tokens, bins, density=True, color=color, alpha=0.6, label=name)
    loss.set(title="Training loss", xlabel="seconds", ylabel="nats per token")
    shape.set(title="Shapes of batches", xlabel="width, tokens", ylabel="samples")
    fill.set(title="Real tokens in a batch", xlabel="tokens", ylabel="share of batches", yticks=[])
    shape.xaxis.set_major_formatter("{x:,.0f}")
    shape.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (loss, shape, fill):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path = job.output / "train_lm.png"
    figure.savefig(path, dpi=150)
    return path


def parse_job() -> Job:
    """Return the job that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, help="most steps of a dynamic run (default: one epoch)")
    add("--token-budget", type=int, default=4096, help="padded tokens of a batch (%(default)s)")
    add("--window", type=int, default=256, help="samples waiting to be grouped (%(default)s)")
    add("--device", default="auto", help="of the model: auto, cpu, cuda (%(default)s)")
    add("--workers", type=int, default=2, help="processes that tokenize (%(default)s)")
    add("--output", type=Path, default=Path("runs/train_lm"), help="folder (%(default)s)")
    options = parser.parse_args()
    if options.token_budget < MAX_TOKENS:
        parser.error(f"--token-budget must be at least {MAX_TOKENS}, the longest sample")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    documents = stdlib_documents()
    train = [document for document in documents if document.id % 16]
    return Job(
        documents=train,
        held_out=documents[::16],
        encode=partial(encode, train_tokenizer(train)),
        **vars(options),
    )


def main() -> None:
    """Train with both methods, check the resume, and report."""
    job = parse_job()
    train_dynamic(job, "dynamic")
    steps, _ = read_log(job, "dynamic")
    train_fixed(job, samples=sum(len(step.ids) for step in steps), steps=len(steps))
    print(f"\n{check_resume(job)}\n\n{table(job)}\n\nPicture: {plot(job)}")


if __name__ == "__main__":
    main()
