"""What spawned workers and programs of their own import: process functions, datasets, faults."""

import faulthandler
import importlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torchdata.nodes import BaseNode
from warm_start import warm_process

import odb_nodes
from odb_nodes import ODBDataLoader, ParallelProcessor, ShardedSampler, Skipped, WorkerOptions

# --- processing -----------------------------------------------------------------------------------


def same(item):
    return item


def draw(item):
    """What all three global generators give, in several ways."""
    return {
        "item": item,
        "python": random.random(),
        "numpy": np.random.random(3),
        "shape": np.random.randint(1000, size=random.randrange(5)),
        "torch": torch.rand(2),
        "long": torch.randn(random.randrange(20)),  # the next sample does not depend on it
    }


def drawn(sample):
    """A sample of `draw` as something that can be compared."""
    return tuple(v.tolist() if hasattr(v, "tolist") else v for v in sample.values())


class Logged:
    """Notes each call in a file, from whatever process, then takes some time."""

    def __init__(self, path, seconds=0.0):
        self.path = path
        self.seconds = seconds

    def __call__(self, item):
        with open(self.path, "a") as log:
            log.write(f"{item} {os.getpid()}\n")
        time.sleep(self.seconds)
        return item

    def items(self):
        return [int(line.split()[0]) for line in Path(self.path).read_text().splitlines()]


class DrawSlowly:
    """Draws, and takes a different time for each item."""

    def __init__(self, seconds=0.0003):
        self.seconds = seconds

    def __call__(self, item):
        time.sleep(self.seconds * (item % 7))
        return draw(item)


class Holding:
    """A dataset that draws from generators of its own, and follows the epoch."""

    def __init__(self, size=20):
        self.size, self.epoch, self.epochs = size, -1, []
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.torch = torch.Generator()

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = [self.python.random(), self.numpy.random(), self.legacy.random_sample()]
        drawn.append(float(torch.rand((), generator=self.torch)))
        return {"input_ids": [index] * (index % 5 + 1), "epoch": self.epoch, "drawn": str(drawn)}


class Bomb:
    """Leaves well, and does not arrive."""

    def __reduce__(self):
        return int, ("not a number",)

    def __call__(self, item):
        return item


class Unpicklable(Exception):
    """An exception that no other process will ever see."""

    def __init__(self, code, lock):
        super().__init__(f"code {code}")
        self.lock = lock


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def signal_itself(number):
    faulthandler.disable()  # pytest's would print a crash report that nobody needs
    os.kill(os.getpid(), number)


def die_with_a_child_alive():
    """The child holds on to everything that was open, the socket to the trainer included."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os._exit(3)


def close_files_and_sleep():
    os.closerange(3, 1000)
    time.sleep(600)


def wait_until_mended(mended):
    while not mended.exists():
        time.sleep(0.01)


DEATHS = {
    "os._exit": (lambda _: os._exit(3), "exit code 3"),
    "SIGKILL": (lambda _: signal_itself(signal.SIGKILL), "was killed by signal 9, often the out"),
    "SIGSEGV": (lambda _: signal_itself(signal.SIGSEGV), "was killed by signal 11, Segmentation"),
    "closes its files": (lambda _: os.closerange(3, 1000), "died with exit code"),
    "closes its files and lives": (lambda _: close_files_and_sleep(), "died with exit code"),
    "dies with a child alive": (lambda _: die_with_a_child_alive(), "exit code 3"),
}
ERRORS = {
    "ValueError": lambda: ValueError("bad image"),
    "SystemExit": lambda: SystemExit(4),
    "StopIteration": lambda: StopIteration(),
    "TimeoutError": lambda: TimeoutError("slow disk"),
    "EOFError": lambda: EOFError("truncated"),
    "Unpicklable": lambda: Unpicklable(7, threading.Lock()),
    "Speechless": lambda: Speechless(),
}
RESULTS = {
    "a lambda": lambda _: lambda: None,
    "a lock": lambda _: threading.Lock(),
    "what does not unpickle": lambda _: Bomb(),
}
OTHERS = {
    "KeyboardInterrupt": lambda _: fail(KeyboardInterrupt()),
    "hangs": wait_until_mended,
    "holds the GIL": lambda _: hold_the_gil(None),
    "forks": lambda _: os.fork() or (time.sleep(20), os._exit(0)),
}


def fail(error):
    raise error


class Faulty:
    """Something bad at one item, for as long as it is not mended; every other item passes."""

    def __init__(self, folder, fault, at=30):
        self.mended, self.fault, self.at = Path(folder, "mended"), fault, at

    def __call__(self, item):
        if item != self.at or self.mended.exists():
            return item
        if self.fault in ERRORS:
            raise ERRORS[self.fault]()
        if self.fault in DEATHS:
            return DEATHS[self.fault][0](self.mended)
        return {**RESULTS, **OTHERS}[self.fault](self.mended)

    def mend(self):
        self.mended.touch()


class Init:
    """A `worker_init_fn` that raises, or takes long; or takes long to unpickle."""

    def __init__(self, error=None, seconds=0.0, at_unpickling=False):
        self.error, self.seconds, self.at_unpickling = error, seconds, at_unpickling

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.at_unpickling:
            time.sleep(self.seconds)

    def __call__(self, index):
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error


class NoteWorker:
    """A `worker_init_fn` that leaves a file for each worker."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, index):
        Path(self.folder, str(index)).write_text(str(os.getpid()))


class Texts:
    """A map-style dataset of texts of different lengths.

    Args:
        size: number of samples.
        seconds: that each of them takes.
        fault: called with the index before each sample is made.
    """

    def __init__(self, size=200, seconds=0.0, fault=None):
        self.size = size
        self.seconds = seconds
        self.fault = fault

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.fault is not None:
            self.fault(index)
        time.sleep(self.seconds)
        return {"input_ids": np.full(3 + 7 * index % 29, index), "id": index}


class SkipSome:
    """Processing that skips some indices.

    Args:
        never: it does not.
        also: further indices, as lost.
    """

    def __init__(self, *, never=False, also=()):
        self.never = never
        self.also = also

    def reason(self, index):
        if self.never:
            return None
        return "missing" if index % 5 == 0 else "corrupt" if index % 6 == 3 else None

    def __call__(self, index):
        reason = self.reason(index)
        if reason is not None:
            text = f"no file for {index}." if reason == "missing" else f"cannot read {index}."
            return Skipped(reason, text)
        if index in self.also:
            return Skipped("lost", "gone.")
        return {"input_ids": np.full(3 + 7 * index % 29, index), "id": index}


def enlarge(sample):
    """Make a sample one that takes long to send."""
    return {**sample, "pixels": np.zeros(4_000_000)}


def keep_ids(samples):
    """A collate function that copies next to nothing."""
    return {"id": torch.tensor([sample["id"] for sample in samples])}


def log_and_multiply(sample):
    """Use what has locks: logging, imports, torch's threads."""
    logging.info("sample %s", sample["id"])
    importlib.reload(importlib.import_module("stringprep"))
    torch.rand(200, 200) @ torch.rand(200, 200)
    return sample


class SleepFrom:
    """A fault: minutes of waiting at this index and all after it."""

    def __init__(self, index):
        self.index = index

    def __call__(self, index):
        if index >= self.index:
            time.sleep(600)


def hold_the_gil(index):
    """A fault: minutes in C code that never lets another thread of its process run."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def sleep(index):
    """A fault: minutes of waiting."""
    time.sleep(600)


def compute(index):
    """A fault: minutes of Python."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        pass


def dataloader(dataset, method="fork", **options):
    """An `ODBDataLoader` with two workers; `method` is a start method, "thread" or "ray"."""
    how = {"method": method} if method in ("thread", "ray") else {"start_method": method}
    workers = WorkerOptions(num_workers=2, chunk_size=4, **how)
    arguments = {"token_budget": 64, "window": 12, "shuffle": False, "workers": workers, **options}
    return ODBDataLoader(dataset, **arguments)


def forked(workers):
    """The options of workers; processes are forked, where nothing else is said."""
    return workers if "method" in workers else {"start_method": "fork", **workers}


def processor(process_fn=draw, size=50, *, source=None, seed=0, rank=0, world_size=1, **workers):
    """A `ParallelProcessor` over shuffled indices; forks, where nothing else is said."""
    options = WorkerOptions(**forked(workers))
    if source is None:
        source = ShardedSampler(size, seed=1, rank=rank, world_size=world_size)
    return ParallelProcessor(
        source, process_fn, seed=seed, workers=options, rank=rank, world_size=world_size
    )


# --- programs of their own ------------------------------------------------------------------------


class Endless(BaseNode):
    """Counts; `at_third` is called on the thread that reads ahead."""

    def __init__(self, at_third):
        super().__init__()
        self._at_third = at_third

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self._items = 0

    def next(self):
        self._items += 1
        if self._items == 3:
            self._at_third()
        return self._items

    def get_state(self):
        return {"items": self._items}


_PROGRAM = """\
{header}
import faulthandler, gc, os, random, signal, sys, threading, time
import torch
import worker_functions as w
from odb_nodes import *

def main():
{body}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's `&`
    faulthandler.register(signal.SIGUSR2, open({stacks!r}, "a"))  # forked children have it, too
    main()
"""


class Program:
    """A Python program in a session of its own, so that whatever it leaves behind can be found.

    Args:
        folder: where the file goes.
        body: of its main function.
        args: of the command line; `sys.argv[1:]` there.
        header: what stands before the imports.
        environment: variables on top of the present ones.
        launcher: of the command line, what runs the program.
        warm: names of modules; the program is forked from a process that has imported them. Empty
            for an interpreter of its own.
    """

    def __init__(self, folder, body, *args, header="", environment=None, launcher=(), warm=()):
        path = Path(folder, "program.py")
        body = textwrap.indent(textwrap.dedent(body), "    ")
        self.stacks = path.with_suffix(".stacks")
        path.write_text(_PROGRAM.format(header=header, body=body, stacks=str(self.stacks)))
        roots = [Path(odb_nodes.__file__).parents[1], Path(__file__).parent]
        path_variable = {"PYTHONPATH": os.pathsep.join(map(str, roots))}
        environment = {**os.environ, **path_variable, **(environment or {})}
        if warm:
            self.process = warm_process(warm).start((path, *args), environment)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, (*launcher, path, *args))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self.session = self.process.pid

    def line(self):
        """The next line that it prints."""
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended early:\n{self.process.stderr.read()}")
        return line.strip()

    def finish(self, timeout_s):
        """Its exit code and the rest of what it printed and complained.

        Raises:
            AssertionError: it goes on for longer than that. Says where its threads stand, and those
                of the processes that it has forked.
        """
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            for pid in self.running():
                with self.stacks.open("a") as stacks:
                    stacks.write(f"\nProcess {pid}:\n")
                os.kill(pid, signal.SIGUSR2)
                time.sleep(0.2)
            raise AssertionError(f"{error}\n{self.stacks.read_text()}") from None
        return self.process.returncode, out, err

    def running(self):
        """Process ids of its session that are not dead: its own, its workers', theirs."""
        found = []
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            try:
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(status[3]) == self.session and status[0] not in "ZX":
                found.append(pid)
        return found

    def kill(self):
        """End all that is left of it."""
        for pid in self.running():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
