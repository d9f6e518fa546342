"""A long training run with faults at random moments, audited to the last sample.

    python examples/soak.py                # an hour, about half a core
    python examples/soak.py --minutes 1    # a quick look
    python examples/soak.py --seed 7       # other faults; the same seed has the same faults

Four ranks train a tiny model on a mixture of JSON Lines, Parquet and a stream. Ranks and workers
are killed, stopped for less and for more than the timeout, meet a full disk, and resume on other
numbers of ranks; then the ranks start again from the newest checkpoint. The ledger is audited after
each start and at the end of each run: each sample must have one fate per epoch. Runs alternate
between plain ranks and 12 virtual ranks.

The script exits with 1 if an audit fails, a process or a file is left behind, something takes
longer than its limit, or a fault ends in anything but an error that names it. Where it may mount
(Linux, root), checkpoints and ledger are on a small disk of their own, which is filled.
"""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from odb_nodes import audit
from soak_ranks import SAVE_EVERY, WEIGHTS, Job, run_rank, write_data

KINDS = (
    "rank killed",
    "all ranks killed",
    "worker killed",
    "short stop",
    "long stop",
    "full disk",
    "other ranks",
    "quiet",
)
VIRTUAL_RANKS = 12
DISK_BYTES = 48 << 20
START_S, END_S, SLACK_S = 180.0, 60.0, 40.0  # limits
SAMPLE_S, PRINT_S = 5.0, 60.0  # between two measurements, and two lines of them
MARK = "ODB_NODES_SOAK"  # variable by which processes of this soak are found
IN_OWN_MOUNTS = "ODB_NODES_SOAK_MOUNTS"
TORCH_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_STEP = re.compile(r"step (\d+) epoch (\d+) loss (\S+)")


class SoakError(Exception):
    """The soak has found a fault."""


class Fault(NamedTuple):
    """A fault, as the seed has drawn it.

    kind: one of `KINDS`; after_s: seconds of training before it; place: which rank, in 0..1;
    length: of a stop or a quiet time, in 0..1.
    """

    kind: str
    after_s: float
    place: float
    length: float


def faults_of(seed: int, longest_s: float) -> Iterator[Fault]:
    """Yield faults without end: all kinds in random order, again and again."""
    draw = random.Random(seed)
    while True:
        for kind in draw.sample(KINDS, len(KINDS)):
            yield Fault(kind, draw.uniform(0.1, longest_s), draw.random(), draw.random())


class Usage(NamedTuple):
    """What an attempt holds of the system; the most of a process, but for `job_mib`."""

    minute: float
    attempt_s: float  # since the first step of the attempt
    job_mib: float  # proportional set size of all ranks and workers
    rank_mib: float
    worker_mib: float
    rank_files: int
    worker_files: int
    threads: int
    children: int  # of all ranks

    def __str__(self) -> str:
        return (
            f"job {self.job_mib:.0f} MiB, rank {self.rank_mib:.1f}, worker {self.worker_mib:.1f}; "
            f"files {self.rank_files}, {self.worker_files}; {self.threads} threads; "
            f"{self.children} children"
        )


class End(NamedTuple):
    """How a rank has ended: "killed", "finished", or the name of an error and its text."""

    name: str
    text: str = ""

    @property
    def is_named(self) -> bool:
        """Whether it is an error of this library, or torch's of a lost connection."""
        if self.name in TORCH_ERRORS:
            return bool(re.search("gloo|connect|socket|store|timed out|peer", self.text, re.I))
        return self.name in ("PeerError", "WorkerError", "OSError")


def wait_until(condition: Callable[[], Any], limit_s: float, what: str, tick: Any = None) -> None:
    """Wait until a condition is true; a `SoakError` after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise SoakError(f"{what} took longer than {limit_s:.0f} s")
        if tick is not None:
            tick()
        time.sleep(0.1)


def marked() -> dict[int, psutil.Process]:
    """Return the processes of this soak by id, other than this one, and but for zombies."""
    mark, processes = f"{MARK}={os.environ[MARK]}".encode(), {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if mark in environment.split(b"\0") and is_alive and process.pid != os.getpid():
                processes[process.pid] = process
    return processes


def pss_mib(pid: int) -> float:
    """Return the proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


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
        self.began_s = 0.0
        self._read_bytes = 0

    def read(self) -> None:
        """Read what rank 0 has printed since."""
        with suppress(FileNotFoundError), (self.job.logs / "0.log").open("rb") as log:
            log.seek(self._read_bytes)
            text = log.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read_bytes += len(text)
            for line in text.decode(errors="replace").splitlines():
                if match := _STEP.match(line):
                    self.step, self.losses[int(match[1])] = int(match[1]), match[3]
                    self.began_s = self.began_s or time.monotonic()
                elif line.startswith("begins at step "):
                    self.first_step = self.step = int(line.split()[-1])
                elif line.startswith("epoch "):
                    self.epochs_ended += 1

    def has_ended(self, but: int | None = None) -> bool:
        """Tell whether all ranks have ended, or all but one."""
        others = [process for rank, process in enumerate(self.processes) if rank != but]
        return not any(process.is_alive() for process in others)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks, or to all."""
        for rank in ranks or range(self.job.ranks):
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def ends(self) -> list[End]:
        """Return how each rank has ended."""
        ends = []
        for rank, process in enumerate(self.processes):
            log = (self.job.logs / f"{rank}.log").read_text(errors="replace")
            if process.exitcode == 0:
                ends.append(End("finished"))
            elif process.exitcode == -signal.SIGKILL:
                ends.append(End("killed"))
            elif match := re.search(r"^ended by (\w+): (.*)$", log, re.M):
                ends.append(End(match[1], match[2]))
            else:
                ends.append(End(f"exit code {process.exitcode}", log[-500:]))
        return ends


class Soak:
    """Starts attempts, puts in faults, and measures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began_s = time.monotonic()
        self.folder: Path = options.output
        self.has_disk = IN_OWN_MOUNTS in os.environ
        sizes = {name: round(options.samples * share) for name, share in WEIGHTS.items()}
        self.sizes = sizes
        write_data(self.folder / "data", sizes)
        self.faults = faults_of(options.seed, min(25.0, 6 * options.minutes))
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.usages: dict[tuple[str, int], list[Usage]] = {}
        self.longest: dict[str, tuple[float, float]] = {}  # what -> seconds waited, and the limit
        self.grown: list[tuple[Usage, Usage]] = []  # first and last of long attempts
        self.attempt: Attempt | None = None
        self._of_attempt: list[Usage] = []
        self._measured_s = self._printed_s = 0.0
        self._losses: dict[tuple[int, int], str] = {}  # by step and ranks
        self.shm_before = {*os.listdir("/dev/shm")}
        os.environ[MARK] = secrets.token_hex(8)
        # The fork server does not have the `sys.path` of this process.
        folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
        multiprocessing.set_forkserver_preload(["soak_ranks"])
        warm = multiprocessing.get_context("forkserver").Process(target=time.time)
        warm.start()
        warm.join(START_S)
        self.servers = {*marked()}  # the fork server, and the tracker of resources

    def say(self, text: str) -> None:
        """Print a line with the minute."""
        print(f"{(time.monotonic() - self.began_s) / 60:6.2f} {text}", flush=True)

    # --- a run ------------------------------------------------------------------------------------

    def run(self, number: int, until_s: float) -> None:
        """Train a run, with faults until `until_s`, and audit it."""
        self.virtual_ranks = VIRTUAL_RANKS if number % 2 else None
        self.disk, self.ranks = self.folder / f"run-{number}", self.options.ranks
        self.disk.mkdir()
        if self.has_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self.disk]
            subprocess.run(mount, check=True)
        self._losses.clear()
        self.stop = self.folder / "stop"
        kind = f"{self.virtual_ranks} virtual ranks" if self.virtual_ranks else "plain ranks"
        self.start()
        self.say(f"run {number}: {kind}, training")
        while time.monotonic() < until_s:
            fault = next(self.faults)
            self.train(fault.after_s)
            self.counts[fault.kind] += 1
            place = f" at {fault.place:.2f}, length {fault.length:.2f}"
            self.say(f"step {self.running.step}: {fault.kind}{place}")
            getattr(self, fault.kind.replace(" ", "_"))(fault)
        self.stop.touch()
        self.wait(self.running.has_ended, 600, "the last epoch")
        self.finish({"finished"})
        self.stop.unlink()
        result = self.check_ledger(is_over=True)
        self.counts["epochs audited"] += len(result.epochs)
        samples = sum(sum(epoch.fates.values()) for epoch in result.epochs)
        self.counts["samples audited"] += samples
        steps = sum(epoch.steps for epoch in result.epochs)
        losses = [float(loss) for _, loss in sorted(self._losses.items())]
        self.say(
            f"audit: {len(result.epochs)} epochs, {steps} steps, {samples} samples, each once; "
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"
        )
        self.check_files()
        if self.has_disk:
            subprocess.run(["umount", self.disk], check=True)
        shutil.rmtree(self.disk)

    def start(self, *, may_refuse: bool = False) -> bool:
        """Start the ranks from the newest checkpoint; return whether they train."""
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        self.attempt = attempt = Attempt(
            Job(
                data=self.folder / "data",
                disk=self.disk,
                logs=self.folder / "logs",
                stop=self.stop,
                sizes=self.sizes,
                ranks=self.ranks,
                virtual_ranks=self.virtual_ranks,
                port=port,
                timeout_s=self.options.timeout_s,
                step_s=self.options.step_ms / 1000,
            )
        )
        self.counts["starts"] += 1
        self._of_attempt = []
        last_step = max((step for step, _ in self._losses), default=0)

        def has_begun() -> bool:
            attempt.read()
            return bool(attempt.began_s) or not all(p.is_alive() for p in attempt.processes)

        self.wait(has_begun, START_S, "the start")
        if not attempt.began_s:
            self.wait(attempt.has_ended, START_S, "the end of a refused start")
            refusals = [end for end in attempt.ends() if "cannot be resharded" in end.text]
            if not (may_refuse and refusals):
                raise SoakError(f"the ranks did not start: {attempt.ends()}")
            self.finish({"StateError", "PeerError"})
            return False
        lost = last_step - attempt.first_step
        if lost > 2 * SAVE_EVERY:
            raise SoakError(f"step {last_step} was reached, and the run resumes {lost} before it")
        return True

    @property
    def running(self) -> Attempt:
        """The present attempt."""
        assert self.attempt is not None
        return self.attempt

    def train(self, seconds: float) -> None:
        """Let the ranks train for a while, which must not end."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, seconds + SLACK_S, "training", alive=True)

    def train_on(self) -> None:
        """Wait until some more steps are done."""
        goal = self.running.step + SAVE_EVERY
        limit_s = self.options.timeout_s + SLACK_S + SAVE_EVERY * self.options.step_ms / 1000
        self.wait(lambda: self.running.step >= goal, limit_s, "ten steps", alive=True)

    def wait(
        self, condition: Callable[[], Any], limit_s: float, what: str, *, alive: bool = False
    ) -> None:
        """Wait for a condition, and measure meanwhile; with `alive`, no rank may end."""

        def tick() -> None:
            self.running.read()
            if alive and not all(process.is_alive() for process in self.running.processes):
                self.wait(self.running.has_ended, END_S + self.options.timeout_s, "the end")
                raise SoakError(f"ranks ended without a fault: {self.running.ends()}")
            if time.monotonic() - self._measured_s > SAMPLE_S:
                self.measure()

        start = time.monotonic()
        wait_until(condition, limit_s, what, tick)
        waited = (time.monotonic() - start, limit_s)
        self.longest[what] = max(self.longest.get(what, waited), waited)

    def finish(self, allowed: set[str]) -> list[End]:
        """Check how all ranks have ended, that nothing is left of them, and the ledger."""
        attempt = self.running
        self.wait(attempt.has_ended, END_S, "the end of the ranks")
        attempt.read()
        ends = attempt.ends()
        for end in ends:
            self.ends[end.name] += 1
            if end.name not in allowed and not (end.is_named and TORCH_ERRORS[0] in allowed):
                raise SoakError(f"a rank must end by {sorted(allowed)}, but ended by {end}")
        wait_until(lambda: not marked().keys() - self.servers, END_S, "the end of workers")
        for process in attempt.processes:
            process.join()
            process.close()
        if len(self._of_attempt) > 1 and self._of_attempt[-1].attempt_s > 3 * self.settled_s:
            self.grown.append((self._of_attempt[0], self._of_attempt[-1]))
        for step, loss in attempt.losses.items():
            before = self._losses.setdefault((step, attempt.job.ranks), loss)
            self.counts["steps"] += 1
            if before != loss:
                raise SoakError(f"step {step} had loss {before}, and has {loss} when it is resumed")
        self.check_ledger(is_over=False)
        return ends

    def check_ledger(self, *, is_over: bool) -> Any:
        """Audit the run so far."""
        result = audit(self.disk / "ledger", self.sizes)
        size = sum(self.sizes.values())
        wrong = [epoch for epoch in result.epochs if epoch.is_complete] if not is_over else []
        wrong = [epoch for epoch in wrong if sum(epoch.fates.values()) != size]
        if result.problems or wrong or (is_over and not (result.ok and result.state == "ended")):
            raise SoakError(f"the audit fails:\n{result}")
        return result

    def check_files(self) -> None:
        """Raise an error if anything but two checkpoints and the ledger is left."""
        names = sorted(str(path.relative_to(self.disk)) for path in self.disk.rglob("*"))
        folders = [name for name in names if re.fullmatch(r"checkpoints/\d+-step-\d+-\w+", name)]
        fine = r"checkpoints|ledger|checkpoints/[^./]+(/rank\d+-of-\d+\.pt|/complete)?"
        more = [name for name in names if not re.fullmatch(rf"{fine}|ledger/rank-\d+.ledger", name)]
        if more or len(folders) > 2:
            raise SoakError(f"files are left: {more or folders}")
        self.say(f"left in the folder of the run: {len(folders)} checkpoints, {len(names)} names")

    # --- faults -----------------------------------------------------------------------------------

    def again(self, *allowed: str) -> list[End]:
        """Check the end of an attempt and start the next."""
        ends = self.finish({*allowed})
        names = Counter(end.name for end in ends)
        self.say("ended: " + ", ".join(f"{count} {name}" for name, count in names.items()))
        for text in {end.text[:300] for end in ends if end.name in TORCH_ERRORS}:
            self.say(f"torch: {text}")
        self.start()
        self.say(f"resumed at step {self.running.first_step} on {self.ranks} ranks")
        return ends

    def victim(self, fault: Fault) -> int:
        """Return the rank of a fault."""
        return int(fault.place * self.ranks)

    @property
    def peer_limit_s(self) -> float:
        """Seconds until a lost rank is an error on all others."""
        return 2 * self.options.timeout_s + SLACK_S

    def rank_killed(self, fault: Fault) -> None:
        """Kill a rank: an error on the others."""
        self.running.signal(signal.SIGKILL, self.victim(fault))
        self.wait(self.running.has_ended, self.peer_limit_s, "a lost rank")
        self.again("killed", "PeerError", *TORCH_ERRORS)

    def all_ranks_killed(self, _fault: Fault) -> None:
        """Kill all ranks."""
        self.running.signal(signal.SIGKILL)
        self.again("killed")

    def worker_killed(self, fault: Fault) -> None:
        """Kill a worker: the rank goes on, or ends by an error and the others, too."""
        rank = psutil.Process(self.running.pids[self.victim(fault)])
        workers = rank.children(recursive=True)
        if not workers:
            raise SoakError("a rank has no worker")
        workers[int(fault.length * len(workers))].kill()
        goal = self.running.step + 3 * SAVE_EVERY
        limit_s = self.peer_limit_s + 30
        attempt = self.running
        self.wait(lambda: attempt.step >= goal or attempt.has_ended(), limit_s, "a lost worker")
        if attempt.has_ended():
            self.again("WorkerError", "PeerError", *TORCH_ERRORS)
        else:
            self.counts["worker killed, training went on"] += 1

    def short_stop(self, fault: Fault) -> None:
        """Stop a rank for less than the timeout: it costs nothing."""
        self.running.signal(signal.SIGSTOP, self.victim(fault))
        self.train(self.options.timeout_s * (0.1 + 0.4 * fault.length))
        self.running.signal(signal.SIGCONT, self.victim(fault))
        self.train_on()

    def long_stop(self, fault: Fault) -> None:
        """Stop a rank for longer than the timeout: an error on the others, then on the rank."""
        victim, attempt = self.victim(fault), self.running
        attempt.signal(signal.SIGSTOP, victim)
        self.wait(lambda: attempt.has_ended(but=victim), self.peer_limit_s, "a stopped rank")
        attempt.signal(signal.SIGCONT, victim)
        self.wait(attempt.has_ended, self.peer_limit_s, "the end of the stopped rank")
        ends = self.again("PeerError", *TORCH_ERRORS)
        if "PeerError" not in [end.name for end in ends]:
            self.counts["long stop, torch's error only"] += 1

    def full_disk(self, _fault: Fault) -> None:
        """Fill the disk: an error of writing."""
        if not self.has_disk:
            self.say("full disk: skipped, it needs Linux, root and `unshare`")
            self.counts["full disk skipped"] += 1
            return
        ballast = self.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1))
        limit_s = self.peer_limit_s + 2 * SAVE_EVERY * self.options.step_ms / 1000
        self.wait(self.running.has_ended, limit_s, "a full disk")
        ballast.unlink()
        ends = self.again("OSError", "PeerError", *TORCH_ERRORS)
        if not any(os.strerror(errno.ENOSPC) in end.text for end in ends):
            raise SoakError(f"no rank names the full disk: {ends}")

    def other_ranks(self, fault: Fault) -> None:
        """Resume on another number of ranks; within an epoch of plain ranks, a stream refuses."""
        before = self.ranks
        cycle = [self.options.ranks, 2, 3]
        self.ranks = cycle[(cycle.index(before) + 1) % 3]
        tries = 0
        while True:
            attempt = self.running
            if self.virtual_ranks is None and (fault.place > 0.3 or tries):
                epochs = attempt.epochs_ended
                limit_s = self.options.epoch_limit_s
                self.wait(lambda: attempt.epochs_ended > epochs, limit_s, "an epoch", alive=True)
            attempt.signal(signal.SIGKILL)
            self.finish({"killed"})
            if self.start(may_refuse=self.virtual_ranks is None):
                self.counts["changed ranks"] += 1
                break
            self.counts["change of ranks refused within an epoch"] += 1
            self.say(f"{self.ranks} ranks are refused within an epoch of a stream")
            wanted, self.ranks = self.ranks, before
            self.start()
            self.ranks, tries = wanted, tries + 1
            if tries > 5:
                raise SoakError("the ranks could not change")
        self.say(f"resumed at step {self.running.first_step} on {self.ranks} ranks")

    def quiet(self, fault: Fault) -> None:
        """Let the ranks train for longer."""
        self.train(self.options.minutes * (0.5 + 1.5 * fault.length))

    # --- measurements -----------------------------------------------------------------------------

    @property
    def settled_s(self) -> float:
        """Seconds after the first step of an attempt at which it is measured for comparison."""
        return min(10.0, 2 * self.options.minutes)

    def measure(self) -> None:
        """Measure all processes, once they have settled."""
        self._measured_s = now = time.monotonic()
        attempt = self.running
        if not attempt.began_s or now - attempt.began_s < self.settled_s:
            return
        pids, workers = [*attempt.pids], [*(marked().keys() - self.servers - {*attempt.pids})]
        try:
            ranks = [psutil.Process(pid) for pid in pids]
            rank_mib, worker_mib = [*map(pss_mib, pids)], [*map(pss_mib, workers)]
            usage = Usage(
                (now - self.began_s) / 60,
                now - attempt.began_s,
                sum(rank_mib) + sum(worker_mib),
                max(rank_mib),
                max(worker_mib, default=0.0),
                max(rank.num_fds() for rank in ranks),
                max((psutil.Process(pid).num_fds() for pid in workers), default=0),
                max(rank.num_threads() for rank in ranks),
                sum(len(rank.children(recursive=True)) for rank in ranks),
            )
        except (OSError, psutil.Error):
            return  # A process has just ended.
        if not self._of_attempt:
            kind = "virtual" if self.virtual_ranks else "plain"
            self.usages.setdefault((kind, attempt.job.ranks), []).append(usage)
        self._of_attempt.append(usage)
        if now - self._printed_s > PRINT_S:
            self._printed_s = now
            self.say(
                f"step {attempt.step}, {attempt.job.ranks} ranks: {usage}; load {os.getloadavg()[0]:.1f}"
            )

    def report(self) -> None:
        """Print the summary."""
        print(f"\nseed {self.options.seed}, {(time.monotonic() - self.began_s) / 60:.1f} minutes")
        for name, count in sorted(self.counts.items()):
            print(f"  {name}: {count}")
        print("ends of ranks: " + ", ".join(f"{n} {name}" for name, n in self.ends.most_common()))
        print(
            f"\nmemory (PSS) and open files of a rank and a worker, {self.settled_s:g} s after a start:"
        )
        for (kind, ranks), usages in sorted(self.usages.items()):
            for name, usage in zip(
                ("first", "middle", "last"),
                (usages[0], usages[len(usages) // 2], usages[-1]),
                strict=True,
            ):
                print(
                    f"  {kind}, {ranks} ranks, {name} of {len(usages)} (minute {usage.minute:.0f}): {usage}"
                )
        self.grown.sort(key=lambda pair: pair[0].attempt_s - pair[1].attempt_s)
        print("longest attempts:")
        for first, last in self.grown[:5]:
            print(f"  within {last.attempt_s - first.attempt_s:.0f} s: {first}\n    -> {last}")
        print("longest waits, and their limits:")
        for what, (longest_s, limit_s) in sorted(self.longest.items()):
            print(f"  {what}: {longest_s:.1f} s of {limit_s:.0f}")
        me = psutil.Process()
        print(f"driver: {me.num_fds()} files, {me.memory_info().rss >> 20} MiB")
        left = {*marked()} - self.servers
        more = sorted({*os.listdir("/dev/shm")} - self.shm_before)
        print(f"processes left: {len(left)}; new names in /dev/shm: {more}")
        if left or (more and self.has_disk):
            raise SoakError("processes or shared memory are left")

    def end(self) -> None:
        """Kill what runs."""
        if MARK in os.environ:
            for pid, process in marked().items():
                if pid not in self.servers:
                    with suppress(psutil.Error):
                        process.kill()


def enter_own_mounts() -> None:
    """Start this script again where its mounts are its own, and vanish with it."""
    may = sys.platform == "linux" and os.geteuid() == 0 and IN_OWN_MOUNTS not in os.environ
    if may and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0:
        command = ["unshare", "--mount", sys.executable, __file__, *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, IN_OWN_MOUNTS: "1"})


def main() -> None:
    """Soak, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60, help="of faults (%(default)s)")
    add("--seed", type=int, default=0, help="of the faults (%(default)s)")
    add("--ranks", type=int, default=4, help="at the beginning (%(default)s)")
    add("--samples", type=int, default=12000, help="of an epoch (%(default)s)")
    add("--timeout-s", type=float, default=15, help="for another rank (%(default)s)")
    add("--step-ms", type=float, default=60, help="sleep of a step (%(default)s)")
    add("--epoch-limit-s", type=float, default=240, help="of an epoch (%(default)s)")
    add("--output", type=Path, default=Path("runs/soak"), help="folder (%(default)s)")
    options = parser.parse_args()
    enter_own_mounts()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    options.output = options.output.absolute()
    if IN_OWN_MOUNTS in os.environ:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", "/dev/shm"], check=True)
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    soak = Soak(options)
    runs = max(2, round(options.minutes / 10))
    try:
        for number in range(runs):
            soak.run(number, soak.began_s + 60 * options.minutes * (number + 1) / runs)
        soak.report()
    except SoakError as error:
        soak.say(f"FAILED: {error}")
        for log in sorted((options.output / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        soak.end()
        raise SystemExit(1) from None
    finally:
        soak.end()
    print("OK")


if __name__ == "__main__":
    main()
