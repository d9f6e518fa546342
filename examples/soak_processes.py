"""The processes of `soak.py`: how they start and end, and what they hold of the system."""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from soak_ranks import Job, run_rank

MARK = "ODB_NODES_SOAK"  # environment variable by which the processes of this soak are found
TORCH_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_STEP = re.compile(r"step (\d+) epoch (\d+) loss (\S+)")
_START_S = 180.0  # limit of the fork server


class SoakError(Exception):
    """The soak has found a fault."""


def wait_until(
    condition: Callable[[], object], limit_s: float, what: str, tick: Callable[[], None]
) -> float:
    """Return the seconds until a condition was true; raise a `SoakError` after `limit_s`."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > limit_s:
            raise SoakError(f"{what} took longer than {limit_s:.0f} s")
        tick()
        time.sleep(0.1)
    return time.monotonic() - start_s


def start_server() -> set[int]:
    """Start a process that has imported all modules, of which ranks are forks.

    Returns:
        The processes that stay: this server, and Python's tracker of resources.
    """
    os.environ[MARK] = secrets.token_hex(8)
    # The server does not have the `sys.path` of this process.
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    multiprocessing.set_forkserver_preload(["soak_ranks"])
    first = multiprocessing.get_context("forkserver").Process(target=time.time)
    first.start()
    first.join(_START_S)
    if first.exitcode != 0:
        raise SoakError(f"no process started within {_START_S:.0f} s")
    return {*marked()}


def marked() -> dict[int, psutil.Process]:
    """Return the living processes of this soak by id, other than this one."""
    mark, processes = f"{MARK}={os.environ[MARK]}".encode(), {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if mark in environment and is_alive and process.pid != os.getpid():
                processes[process.pid] = process
    return processes


class End(NamedTuple):
    """How a rank has ended: "killed", "finished", or the name of an error and its text."""

    name: str
    text: str = ""

    @property
    def is_torch(self) -> bool:
        """Whether it is torch's error of a lost connection."""
        lost = re.search("gloo|connect|socket|store|timed out|peer", self.text, re.IGNORECASE)
        return self.name in TORCH_ERRORS and lost is not None


class Attempt:
    """The processes of all ranks, from a start to their end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        shutil.rmtree(job.logs, ignore_errors=True)
        job.logs.mkdir(parents=True)
        context = multiprocessing.get_context("forkserver")
        self.processes = [
            context.Process(target=run_rank, args=(rank, job)) for rank in range(job.ranks)
        ]
        for process in self.processes:
            process.start()
        self.pids = [int(process.pid or 0) for process in self.processes]
        self.first_step = self.step = self.epochs_ended = 0
        self.losses: dict[int, str] = {}  # by step
        self.began_s = 0.0  # time of the first step
        self._read_bytes = 0

    def read(self) -> None:
        """Read what rank 0 has printed since the last call."""
        with suppress(FileNotFoundError), (self.job.logs / "0.log").open("rb") as log:
            log.seek(self._read_bytes)
            text = log.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read_bytes += len(text)
            for line in text.decode(errors="replace").splitlines():
                if match := _STEP.match(line):
                    self.step = int(match[1])
                    self.losses[self.step] = match[3]
                    self.began_s = self.began_s or time.monotonic()
                elif line.startswith("begins at step "):
                    self.first_step = self.step = int(line.split()[-1])
                elif line.startswith("epoch "):
                    self.epochs_ended += 1

    @property
    def is_whole(self) -> bool:
        """Whether no rank has ended."""
        return all(process.is_alive() for process in self.processes)

    def has_ended(self, but: int | None = None) -> bool:
        """Tell whether all ranks have ended, or all but one."""
        others = [process for rank, process in enumerate(self.processes) if rank != but]
        return not any(process.is_alive() for process in others)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in ranks or range(self.job.ranks):
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def ends(self) -> list[End]:
        """Return how each rank has ended."""
        return [self._end(rank) for rank in range(self.job.ranks)]

    def _end(self, rank: int) -> End:
        code = self.processes[rank].exitcode
        if code in (0, -signal.SIGKILL):
            return End("killed" if code else "finished")
        log = (self.job.logs / f"{rank}.log").read_text(errors="replace")
        if match := re.search(r"^ended by (\w+): (.*)$", log, re.MULTILINE):
            return End(match[1], match[2])
        return End(f"exit code {code}", log[-500:])

    def close(self) -> None:
        """Forget the processes, which have ended."""
        for process in self.processes:
            process.join()
            process.close()


class Usage(NamedTuple):
    """What an attempt holds of the system; but for `job_mib` and `children`, the most of a process.

    Memory of a process is its resident set size. That of the job is the proportional set size,
    which divides shared pages among their processes: it grows while processes copy pages of the
    server on writing.
    """

    minute: float  # of the soak
    attempt_s: float  # since the first step of the attempt
    job_mib: float  # of all ranks and workers
    rank_mib: float
    worker_mib: float
    rank_files: int
    worker_files: int
    threads: int
    children: int  # of all ranks

    @classmethod
    def of(cls, attempt: Attempt, servers: set[int], began_s: float) -> Usage | None:
        """Measure an attempt; `None` if a process ends meanwhile."""
        now_s = time.monotonic()
        worker_pids = [*(marked().keys() - servers - {*attempt.pids})]
        try:
            ranks = [psutil.Process(pid) for pid in attempt.pids]
            workers = [psutil.Process(pid) for pid in worker_pids]
            return cls(
                (now_s - began_s) / 60,
                now_s - attempt.began_s,
                sum(map(_pss_mib, [*ranks, *workers])),
                max(map(_rss_mib, ranks)),
                max(map(_rss_mib, workers), default=0.0),
                max(rank.num_fds() for rank in ranks),
                max((worker.num_fds() for worker in workers), default=0),
                max(rank.num_threads() for rank in ranks),
                sum(len(rank.children(recursive=True)) for rank in ranks),
            )
        except (OSError, psutil.Error):
            return None

    def __str__(self) -> str:
        return (
            f"job {self.job_mib:.0f} MiB, rank {self.rank_mib:.1f}, worker {self.worker_mib:.1f}; "
            f"files {self.rank_files}, {self.worker_files}; {self.threads} threads; "
            f"{self.children} children"
        )


def _rss_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 2**20)


def _pss_mib(process: psutil.Process) -> float:
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0
