"""Hosts whose network fails: two hosts of two ranks, as namespaces that a link joins.

A lost link is an error of every rank, soon, and no sample is lost: see `parted_job.py`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import parted_job
import pytest
from aligned_ranks import on_ranks

import odb_nodes
from odb_nodes import Checkpoints, Ledger, audit

UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_part():
    """Whether this machine lets us make hosts and links."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    link = "ip link add name odb0 type veth peer name odb1".split()
    return subprocess.run([*UNSHARE, *link], capture_output=True, timeout=60).returncode == 0


pytestmark = [
    pytest.mark.skipif(not can_part(), reason="needs root and `ip`, for network namespaces"),
    pytest.mark.timeout(280),
]

RANKS_OF_HOST = 2
TIMEOUT_S = 8.0  # of the loaders
MARGIN_S = 30.0  # for rounds that are planned already, and for a machine that is busy
START_S = 150.0  # for ranks to import torch and take steps


class Host:
    """A host with its ranks, which start once the host has a link."""

    def __init__(self, folder, number, hosts, **options):
        root = Path(odb_nodes.__file__).parents[1]
        variables = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "odb0"}
        variables |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
        variables["WORLD_SIZE"] = str(hosts * RANKS_OF_HOST)
        first, self.number, self.folder = number * RANKS_OF_HOST, number, folder
        options = {"timeout_s": TIMEOUT_S, "moment": None, "step_s": 0.05, **options}
        program = [sys.executable, parted_job.__file__, folder, first, first + RANKS_OF_HOST]
        self.log = open(folder / f"log-{number}", "w")
        self.process = subprocess.Popen(
            [*UNSHARE, *map(str, program), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )

    def run(self, command):
        network = f"--net=/proc/{self.process.pid}/ns/net"
        subprocess.run(["nsenter", network, *command.split()], check=True, timeout=60)

    def connect(self):
        """Give the end of the link its address, and start the ranks."""
        self.run(f"ip address add 10.77.0.{self.number + 1}/24 dev odb0")
        self.run("ip link set odb0 up")
        self.run("ip link set lo up")
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def set_link(self, state):
        self.run(f"ip link set odb0 {state}")

    def kill(self):
        """End all processes of the host at once; its network goes with them."""
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.log.close()

    def left(self):
        """The processes that its ranks left behind."""
        wait_until(lambda: self.process.poll() is not None, parted_job.PATIENCE_S + MARGIN_S)
        return json.loads((self.folder / f"left-{self.number * RANKS_OF_HOST}").read_text())


@pytest.fixture
def start(tmp_path):
    """Start a job on some hosts; they end with the test."""
    with ExitStack() as stack:

        def start_hosts(number_of_hosts=2, **options):
            for pattern in ("reached-*", "go", "result-*", "left-*"):
                for file in tmp_path.glob(pattern):
                    file.unlink()
            hosts = []
            for number in range(number_of_hosts):
                hosts.append(Host(tmp_path, number, number_of_hosts, **options))
                stack.callback(hosts[-1].kill)
            link(hosts)
            return hosts

        yield start_hosts


def link(hosts):
    """Join the hosts; a host alone has an end of a link that leads nowhere."""
    networks = [Path(f"/proc/{host.process.pid}/ns/net") for host in hosts]
    outside = Path("/proc/self/ns/net").readlink()
    wait_until(lambda: all(network.readlink() != outside for network in networks), START_S)
    first, last = hosts[0].process.pid, hosts[-1].process.pid
    peer = "odb0" if len(hosts) > 1 else "odb1"
    command = f"ip link add name odb0 netns {first} type veth peer name {peer} netns {last}"
    subprocess.run(command.split(), check=True, timeout=60)
    for host in hosts:
        host.connect()


def wait_until(condition, limit_s, show=""):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s {show}"
        time.sleep(0.05)


def await_files(folder, name, ranks, limit_s=START_S):
    """Wait until each of the ranks has written its file."""
    paths = [folder / f"{name}-{rank}" for rank in ranks]
    logs = [path.read_text()[-3000:] for path in folder.glob("log-*")]
    wait_until(lambda: all(path.exists() for path in paths), limit_s, f"{paths} {logs}")
    return paths


def results_of(folder, ranks, limit_s=START_S):
    return [json.loads(path.read_text()) for path in await_files(folder, "result", ranks, limit_s)]


def check_errors(results, cut_s):
    for result in results:
        assert result["error"] is not None and result["error"].startswith("PeerError: "), result
        assert result["ended_s"] - cut_s < TIMEOUT_S + MARGIN_S


def check_each_sample_once(folder):
    report = audit(folder / "ledger", parted_job.SAMPLES)
    assert report.ok, report


def finish_alone(folder):
    """Resume on a single rank, this process, to the end of the epoch. Returns where it began."""
    with parted_job.make_loader(TIMEOUT_S) as loader, Ledger(folder / "ledger") as ledger:
        start = Checkpoints(folder / "checkpoints", {"loader": loader}).load()
        for batch in loader:
            ledger.record(parted_job.keys_of(batch)[1])
    return start


@pytest.mark.parametrize("moment", parted_job.MOMENTS)
def test_a_lost_link_is_an_error_of_all_ranks_and_loses_no_sample(moment, start, tmp_path):
    hosts = start(moment=moment)
    await_files(tmp_path, "reached", range(4))
    hosts[0].set_link("down")
    cut_s = time.monotonic()
    (tmp_path / "go").touch()
    check_errors(results_of(tmp_path, range(4)), cut_s)
    assert [host.left() for host in hosts] == [[], []]
    resumed_at = finish_alone(tmp_path)
    assert (resumed_at > 0) == (moment != "before the first round")
    check_each_sample_once(tmp_path)


def test_a_link_that_heals_in_time_costs_no_step(start, tmp_path):
    hosts = start(moment="in a round", timeout_s=100.0)
    await_files(tmp_path, "reached", range(4))
    hosts[0].set_link("down")
    time.sleep(8)  # longer than the steps that remain
    assert not [*tmp_path.glob("result-*")]
    hosts[0].set_link("up")
    results = results_of(tmp_path, range(4))
    assert [result["error"] for result in results] == [None] * 4
    assert [host.left() for host in hosts] == [[], []]

    def run(exchange):
        with parted_job.make_loader(TIMEOUT_S, process_group=exchange) as loader:
            return [parted_job.keys_of(batch)[0] for batch in loader]

    assert [result["steps"] for result in results] == on_ranks(4, run)
    check_each_sample_once(tmp_path)


@pytest.mark.parametrize("number_of_hosts", [2, 1])
def test_after_a_host_is_lost_the_job_resumes_on_two_hosts_or_on_one(
    number_of_hosts, start, tmp_path
):
    hosts = start(moment="in a round")
    await_files(tmp_path, "reached", range(4))
    hosts[1].set_link("down")  # as in a loss of power: its connections are not closed
    hosts[1].kill()
    check_errors(results_of(tmp_path, range(2)), time.monotonic())
    assert hosts[0].left() == []
    start(number_of_hosts)
    results = results_of(tmp_path, range(number_of_hosts * RANKS_OF_HOST))
    assert [result["error"] for result in results] == [None] * len(results)
    assert all(result["start"] > 0 for result in results)
    check_each_sample_once(tmp_path)
