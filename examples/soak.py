"""A long training run with faults at random moments, audited to the last sample.

    python examples/soak.py                # an hour, about half a core
    python examples/soak.py --minutes 1    # a quick look
    python examples/soak.py --seed 7       # other faults; the same seed has the same faults

Four ranks train a tiny model on a mixture of JSON Lines, Parquet and a stream. Ranks and workers
are killed, stopped for less and for more than the timeout, meet a full disk, and resume on other
numbers of ranks; then the ranks start again from the newest checkpoint. The ledger is audited after
each fault and at the end of each run: each sample must have one fate per epoch. A step that is
repeated must have the same loss, to the last bit. Runs alternate between plain ranks and 12 virtual
ranks; epochs of the same ranks must have the same steps in all runs, whatever the faults.

The script exits with 1 if an audit fails, a process or a file is left behind, something takes
longer than its limit, or a fault ends in anything but an error that names it. Where it may mount
(Linux, root), checkpoints and ledger are on a small disk of their own, which is filled.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
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
from typing import NamedTuple

import psutil

from odb_nodes import audit
from soak_processes import Attempt, End, SoakError, Usage, marked, start_server, wait_until
from soak_ranks import SAVE_EVERY, WEIGHTS, Job, write_data

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
RANKS, VIRTUAL_RANKS = (4, 2, 3), 12  # A run begins with the first number of ranks.
DISK_BYTES, SHM_BYTES = 48 << 20, 2 << 30
START_S, EPOCH_S, END_S, SLACK_S = 180.0, 240.0, 60.0, 40.0  # limits
SETTLED_S = 10.0  # after the first step of an attempt, when it is measured
SAMPLE_S, PRINT_S = 5.0, 60.0  # between two measurements, and two lines of them
IN_OWN_MOUNTS = "ODB_NODES_SOAK_MOUNTS"


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


class Soak:
    """Starts attempts, puts in faults, and measures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began_s = time.monotonic()
        self.folder: Path = options.output
        self.has_disk = IN_OWN_MOUNTS in os.environ
        self.sizes = {name: round(options.samples * share) for name, share in WEIGHTS.items()}
        write_data(self.folder / "data", self.sizes)
        self.pause_s: float = min(25.0, 6 * options.minutes)  # longest time before a fault
        self.faults = faults_of(options.seed, self.pause_s)
        self.attempt: Attempt | None = None
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.usages: dict[tuple[str, int], list[Usage]] = {}  # of settled attempts
        self.grown: list[tuple[Usage, Usage]] = []  # first and last of long attempts
        self.longest: dict[str, tuple[float, float]] = {}  # seconds waited, and the limit
        self._usages: list[Usage] = []  # of the present attempt
        self._measured_s = self._printed_s = 0.0
        self._losses: dict[tuple[int, int], str] = {}  # of the run, by step and ranks
        self._unfinished: set[str] = set()  # folders from before the first checkpoint of the run
        self._digests: dict[tuple[int, ...], str] = {}  # of epochs, by the ranks up to their end
        self.shm_before = {*os.listdir("/dev/shm")} if self.has_disk else set()
        self.servers = start_server()

    def say(self, text: str) -> None:
        """Print a line with the minute."""
        print(f"{(time.monotonic() - self.began_s) / 60:6.2f} {text}", flush=True)

    # --- a run ------------------------------------------------------------------------------------

    def run(self, number: int, seconds: float) -> None:
        """Train a run, with faults for some time, and audit it."""
        self.virtual_ranks = VIRTUAL_RANKS if number % 2 else None
        self.ranks, self.disk = RANKS[0], self.folder / f"run-{number}"
        self.stop = self.folder / f"stop-{number}"
        self._losses.clear()
        self.disk.mkdir()
        if self.has_disk:
            mount_tmpfs(self.disk, DISK_BYTES)
        self.start()
        self.say(f"run {number}: {self.virtual_ranks or 'no'} virtual ranks")
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            fault = next(self.faults)
            self.train(fault.after_s)
            self.counts[fault.kind] += 1
            drawn = f"place {fault.place:.2f}, length {fault.length:.2f}"
            self.say(f"step {self.running.step}: {fault.kind}, {drawn}")
            getattr(self, fault.kind.replace(" ", "_"))(fault)
        self.stop.touch()
        self.wait(self.running.has_ended, 2 * EPOCH_S, "the last epoch")
        self.finish("finished")
        self.check_run()
        self.check_files()
        if self.has_disk:
            subprocess.run(["umount", self.disk], check=True)
        shutil.rmtree(self.disk)

    def start(self, *, may_refuse: bool = False) -> bool:
        """Start the ranks from the newest checkpoint; return whether they train."""
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        job = Job(
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
        self.counts["starts"] += 1
        self._usages = []
        folders = {path.name for path in (self.disk / "checkpoints").glob("*")}
        self.attempt = attempt = Attempt(job)
        self.wait(lambda: attempt.began_s or not attempt.is_whole, START_S, "a start")
        if not attempt.began_s:
            self.wait(attempt.has_ended, START_S, "the end of a refused start")
            if not (may_refuse and any("be resharded" in end.text for end in attempt.ends())):
                raise SoakError(f"the ranks did not start: {attempt.ends()}")
            self.finish("StateError", "PeerError")
            return False
        if not attempt.first_step:
            self._unfinished = folders  # A run that begins anew leaves them alone, with a warning.
        lost = max((step for step, _ in self._losses), default=0) - attempt.first_step
        if lost > 2 * SAVE_EVERY:
            raise SoakError(f"the run resumes {lost} steps before its last step")
        return True

    @property
    def running(self) -> Attempt:
        """The present attempt."""
        if self.attempt is None:
            raise SoakError("no ranks were started")
        return self.attempt

    def train(self, seconds: float) -> None:
        """Let the ranks train for a while."""
        end_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end_s, seconds + SLACK_S, "", alive=True)

    def wait(
        self, condition: Callable[[], object], limit_s: float, what: str, *, alive: bool = False
    ) -> None:
        """Wait for a condition, and measure meanwhile; with `alive`, no rank may end."""

        def tick() -> None:
            self.running.read()
            if alive and not self.running.is_whole:
                self.wait(self.running.has_ended, self.peer_limit_s, "an end without a fault")
                raise SoakError(f"ranks ended without a fault: {self.running.ends()}")
            if time.monotonic() - self._measured_s > SAMPLE_S:
                self.measure()

        waited = (wait_until(condition, limit_s, what, tick), limit_s)
        self.longest[what] = max(self.longest.get(what, waited), waited)

    def finish(self, *allowed: str) -> list[End]:
        """Check how all ranks have ended, that no process is left of them, and the ledger."""
        attempt = self.running
        self.wait(attempt.has_ended, END_S, "the end of killed ranks")
        attempt.read()
        ends = attempt.ends()
        for end in ends:
            self.ends[end.name] += 1
            if end.name not in allowed and not (end.is_torch and "PeerError" in allowed):
                raise SoakError(f"a rank must end by {allowed}, but has ended by {end}")
        self.wait(lambda: not marked().keys() - self.servers, END_S, "the end of workers")
        attempt.close()
        if self._usages and self._usages[-1].attempt_s > 3 * self.settled_s:
            self.grown.append((self._usages[0], self._usages[-1]))
        for step, loss in attempt.losses.items():
            self.counts["steps"] += 1
            if (before := self._losses.setdefault((step, attempt.job.ranks), loss)) != loss:
                raise SoakError(f"step {step} had loss {before}, but {loss} when it was repeated")
        # A full disk leaves a gap in the ledger, until the run has resumed before it.
        has_gap = any(os.strerror(errno.ENOSPC) in end.text for end in ends)
        if attempt.step > attempt.first_step + 1 and not has_gap:
            if problems := audit(self.disk / "ledger", self.sizes).problems:
                raise SoakError(f"the audit has problems: {problems}")
            self.counts["audits of a killed run"] += 1
        return ends

    def check_run(self) -> None:
        """Audit a run that has ended: each sample has one fate in each epoch."""
        result = audit(self.disk / "ledger", self.sizes)
        samples = [sum(epoch.fates.values()) for epoch in result.epochs]
        is_whole = result.ok and result.state == "ended"
        if not is_whole or {*samples} != {sum(self.sizes.values())}:
            raise SoakError(f"the audit fails:\n{result}")
        ranks: tuple[int, ...] = ()
        for epoch in result.epochs:
            ranks += epoch.world_sizes
            if self._digests.setdefault(ranks, epoch.digest) != epoch.digest:
                raise SoakError(f"epoch {epoch.epoch} has other steps than in an earlier run")
        steps = sum(epoch.steps for epoch in result.epochs)
        losses = [float(self._losses[key]) for key in sorted(self._losses)]
        self.counts["epochs audited"] += len(samples)
        self.counts["samples audited"] += sum(samples)
        self.say(
            f"audit: {len(samples)} epochs, {steps} steps, {sum(samples)} samples, each once; "
            f"loss {losses[0]:.2f} to {losses[-1]:.2f}"
        )

    def check_files(self) -> None:
        """Raise an error if anything is left but two checkpoints and the ledger."""
        names = sorted(str(path.relative_to(self.disk)) for path in self.disk.rglob("*"))
        folder = r"checkpoints/\d+-step-\d+-\w+"
        expected = rf"checkpoints|{folder}(/rank\d+-of-\d+\.pt|/complete)?"
        expected += r"|ledger(/rank-\d+\.ledger)?"
        others = [name for name in names if not re.fullmatch(expected, name)]
        folders = {name.partition("/")[2] for name in names if re.fullmatch(folder, name)}
        folders -= self._unfinished
        if others or len(folders) > 2:
            raise SoakError(f"files are left: {others or folders}")

    # --- faults -----------------------------------------------------------------------------------

    def again(self, *allowed: str) -> list[End]:
        """Check the end of an attempt and start the next."""
        ends = self.finish(*allowed)
        names = Counter(end.name for end in ends)
        self.say("ended: " + ", ".join(f"{count} {name}" for name, count in names.items()))
        for text in {end.text[:200] for end in ends if end.is_torch}:
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
        return SLACK_S + 2 * float(self.options.timeout_s)

    @property
    def step_limit_s(self) -> float:
        """Seconds for some steps, until the next checkpoint and more."""
        return SLACK_S + 3 * SAVE_EVERY * float(self.options.step_ms) / 1000

    def rank_killed(self, fault: Fault) -> None:
        """Kill a rank: an error on the others."""
        self.running.signal(signal.SIGKILL, self.victim(fault))
        self.wait(self.running.has_ended, self.peer_limit_s, "a lost rank")
        self.again("killed", "PeerError")

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
        attempt = self.running
        limit_s = self.peer_limit_s + self.step_limit_s
        self.wait(lambda: attempt.step >= goal or attempt.has_ended(), limit_s, "a killed worker")
        if attempt.has_ended():
            self.again("WorkerError", "PeerError")
        else:
            self.counts["worker killed, training went on"] += 1

    def short_stop(self, fault: Fault) -> None:
        """Stop a rank for less than the timeout: it costs nothing."""
        self.running.signal(signal.SIGSTOP, self.victim(fault))
        self.train(self.options.timeout_s * (0.1 + 0.4 * fault.length))
        self.running.signal(signal.SIGCONT, self.victim(fault))
        goal = self.running.step + SAVE_EVERY
        limit_s = self.step_limit_s
        self.wait(lambda: self.running.step >= goal, limit_s, "steps after a stop", alive=True)

    def long_stop(self, fault: Fault) -> None:
        """Stop a rank for longer than the timeout: an error on the others, then on the rank."""
        victim, attempt = self.victim(fault), self.running
        attempt.signal(signal.SIGSTOP, victim)
        self.wait(lambda: attempt.has_ended(but=victim), self.peer_limit_s, "a stopped rank")
        attempt.signal(signal.SIGCONT, victim)
        self.wait(attempt.has_ended, self.peer_limit_s, "the end of the stopped rank")
        ends = self.again("PeerError")
        if all(end.is_torch for end in ends):
            self.counts["long stop, torch's error alone"] += 1

    def full_disk(self, _fault: Fault) -> None:
        """Fill the disk: an error of writing."""
        if not self.has_disk:
            self.say("full disk: skipped, it needs Linux, root and `unshare`")
            self.counts["full disk skipped"] += 1
            return
        ballast = self.disk / "ballast"
        for size in (1 << 16, 1):
            with suppress(OSError), ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        limit_s = self.peer_limit_s + self.step_limit_s
        self.wait(self.running.has_ended, limit_s, "a full disk")
        ballast.unlink()
        ends = self.again("OSError", "PeerError")
        if not any(os.strerror(errno.ENOSPC) in end.text for end in ends):
            raise SoakError(f"no rank names the full disk: {ends}")

    def other_ranks(self, fault: Fault) -> None:
        """Resume on another number of ranks; within an epoch of plain ranks, a stream refuses."""
        before, wanted = self.ranks, RANKS[(RANKS.index(self.ranks) + 1) % len(RANKS)]
        at_once = self.virtual_ranks is not None or fault.place < 0.3
        for _ in range(5):
            if not at_once:
                self.wait_for_epoch()
            self.running.signal(signal.SIGKILL)
            self.finish("killed")
            self.ranks, at_once = wanted, False
            if self.start(may_refuse=self.virtual_ranks is None):
                self.say(f"resumed at step {self.running.first_step} on {wanted} ranks")
                return
            self.counts["other ranks, refused within an epoch"] += 1
            self.say(f"{wanted} ranks are refused within an epoch")
            self.ranks = before
            self.start()
        raise SoakError("the number of ranks could not change")

    def wait_for_epoch(self) -> None:
        """Wait until an epoch has ended."""
        goal = self.running.epochs_ended + 1
        self.wait(lambda: self.running.epochs_ended >= goal, EPOCH_S, "an epoch", alive=True)

    def quiet(self, fault: Fault) -> None:
        """Let the ranks train for longer."""
        self.train(self.pause_s * (1 + 4 * fault.length))

    # --- measurements -----------------------------------------------------------------------------

    @property
    def settled_s(self) -> float:
        """Seconds after the first step of an attempt at which it is measured for comparison."""
        return min(SETTLED_S, self.pause_s / 3)

    def measure(self) -> None:
        """Measure all processes, once they have settled."""
        self._measured_s = now_s = time.monotonic()
        attempt = self.running
        if not attempt.began_s or now_s - attempt.began_s < self.settled_s:
            return
        if (usage := Usage.of(attempt, self.servers, self.began_s)) is None:
            return
        if not self._usages:
            kind = "virtual" if self.virtual_ranks else "plain"
            self.usages.setdefault((kind, attempt.job.ranks), []).append(usage)
        self._usages.append(usage)
        if now_s - self._printed_s > PRINT_S:
            self._printed_s = now_s
            load = os.getloadavg()[0]
            self.say(f"step {attempt.step}, {attempt.job.ranks} ranks: {usage}; load {load:.1f}")

    def report(self) -> None:
        """Print the summary; raise an error if processes or shared memory are left."""
        print(f"\nseed {self.options.seed}, {(time.monotonic() - self.began_s) / 60:.1f} minutes")
        for name, count in sorted(self.counts.items()):
            print(f"  {name}: {count}")
        print("ends of ranks: " + ", ".join(f"{n} {name}" for name, n in self.ends.most_common()))
        print(f"the most of a process, {self.settled_s:g} s after the first step of an attempt:")
        for (kind, ranks), usages in sorted(self.usages.items()):
            print(f"  {kind}, {ranks} ranks, {len(usages)} attempts")
            for usage in (usages[0], usages[len(usages) // 2], usages[-1]):
                print(f"    minute {usage.minute:.0f}: {usage}")
        print("the longest attempts, from then on:")
        self.grown.sort(key=lambda pair: pair[0].attempt_s - pair[1].attempt_s)
        for pair in self.grown[:5]:
            for usage in pair:
                print(f"    second {usage.attempt_s:.0f}: {usage}")
        print("longest waits, and their limits:")
        for what, (waited_s, limit_s) in sorted(self.longest.items()):
            if what:
                print(f"  {what}: {waited_s:.1f} s of {limit_s:.0f}")
        driver = psutil.Process()
        print(f"driver: {driver.num_fds()} files, {driver.memory_info().rss >> 20} MiB")
        processes = {*marked()} - self.servers
        names = {*os.listdir("/dev/shm")} - self.shm_before if self.has_disk else set()
        print(f"left: {len(processes)} processes, {len(names)} names in /dev/shm")
        if processes or names:
            raise SoakError(f"left: {processes or names}")

    def end(self) -> None:
        """Kill all processes of the ranks."""
        for pid, process in marked().items():
            if pid not in self.servers:
                with suppress(psutil.Error):
                    process.kill()


def enter_own_mounts() -> None:
    """Start this script again where its mounts are its own, and vanish with it."""
    if IN_OWN_MOUNTS in os.environ or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0:
        command = ["unshare", "--mount", sys.executable, __file__, *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, IN_OWN_MOUNTS: "1"})


def mount_tmpfs(folder: Path, size: int) -> None:
    """Mount a disk of so many bytes of memory."""
    options = ["-t", "tmpfs", "-o", f"size={size}"]
    subprocess.run(["mount", *options, "tmpfs", str(folder)], check=True)


def main() -> None:
    """Soak, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60, help="of faults (%(default)s)")
    add("--seed", type=int, default=0, help="of the faults (%(default)s)")
    add("--samples", type=int, default=12000, help="of an epoch (%(default)s)")
    add("--timeout-s", type=float, default=15, help="for another rank (%(default)s)")
    add("--step-ms", type=float, default=60, help="sleep of a step (%(default)s)")
    add("--output", type=Path, default=Path("runs/soak"), help="folder (%(default)s)")
    options = parser.parse_args()
    enter_own_mounts()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    options.output = options.output.absolute()
    if IN_OWN_MOUNTS in os.environ:
        mount_tmpfs(Path("/dev/shm"), SHM_BYTES)
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    soak = Soak(options)
    runs = max(2, round(options.minutes / 10))
    try:
        for number in range(runs):
            soak.run(number, 60 * options.minutes / runs)
        soak.report()
    except SoakError as error:
        soak.say(f"FAILED: {error}")
        for log in sorted((options.output / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise SystemExit(1) from None
    finally:
        soak.end()
    print("OK")


if __name__ == "__main__":
    main()
