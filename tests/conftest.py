"""Which tests are slow, and how much of what can be sampled is tested.

`slow.txt` lists the slow tests: those that took more than a tenth of a second on two quiet
cores, or that start processes. `pytest -n 2 --runslow --record-slow` writes it anew. A file stands
there whole where all its tests are slow, or where importing it takes seconds: the fast loop does
not import it. A single slow case of a test is marked `slow` by hand; what belongs into the fast
loop all the same, `fast`.
"""

import multiprocessing
import os
import random
import threading
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

TABLE = Path(__file__).with_name("slow.txt")
SLOW_S = 0.1  # of a test with its fixtures

# Hypothesis: examples of each property. `fast` is the fast loop's, `ci` that of a run of all tests.
EXAMPLES = {"fast": 10, "ci": 100, "exhaustive": 1000}

# Why a test may be skipped in CI, where all extras are installed.
ALLOWED_SKIPS = ("GPU", "--exhaustive", "same in both states", "of later versions", "now and then")
ALLOWED_SKIPS += ("wandb is not installed", "mlflow is not installed")  # the extra `tracking`
ALLOWED_SKIPS += ("needs root and `ip`",)

BEFORE = {f"`{name}` in the environment" for name in os.environ}
forks = [0]
os.register_at_fork(after_in_parent=lambda: forks.__setitem__(0, forks[0] + 1))


def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true", help="slow tests, too")
    parser.addoption("--exhaustive", action="store_true", help="all tests, and nothing is sampled")
    parser.addoption("--shard", metavar="K/N", help="the K-th of N parts of the tests, from 1")
    parser.addoption("--record-slow", action="store_true", help="write which tests were slow")


def is_fast_loop(config):
    """Whether slow tests are left out: unless options, or files, ask for them."""
    option, named = config.option, any(".py" in argument for argument in config.args)
    return not (named or option.runslow or option.exhaustive or "slow" in option.markexpr)


def pytest_configure(config):
    for name, examples in EXAMPLES.items():
        settings.register_profile(name, max_examples=examples, deadline=None)
    fitting = "exhaustive" if config.option.exhaustive else "ci"
    fitting = "fast" if is_fast_loop(config) else fitting
    settings.load_profile(config.getoption("--hypothesis-profile") or fitting)
    if config.option.record_slow and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipGuard())


@cache
def slow_names():
    """Files and tests of the table, as the first parts of test ids."""
    return frozenset(line for line in TABLE.read_text().splitlines() if line[:1] not in ("", "#"))


def pytest_ignore_collect(collection_path, config):
    """Do not even import what no test is asked of: frameworks take many seconds."""
    if collection_path.suffix == ".py" and is_fast_loop(config):
        return (
            True if f"tests/{collection_path.relative_to(TABLE.parent)}" in slow_names() else None
        )
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    if not config.option.exhaustive:
        leave_out_cases(config, items)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if not any(map(item.get_closest_marker, ("slow", "fast"))):
            item.user_properties.append(("recorded", True))
        if not slow_names().isdisjoint((name, name.partition("::")[0])):
            item.add_marker("slow")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
    if is_fast_loop(config):
        deselect(config, items, lambda item: item.get_closest_marker("slow"))
        items.sort(key=lambda item: not item.get_closest_marker("fast"))  # they take longest
    if config.option.shard:
        shard, shards = map(int, config.option.shard.split("/"))
        deselect(config, items, lambda item: zlib.crc32(item.nodeid.encode()) % shards != shard - 1)


def deselect(config, items, unwanted):
    left_out = [item for item in items if unwanted(item)]
    if left_out:
        items[:] = [item for item in items if not unwanted(item)]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """Refuse processes in the fast loop, but where the marker `fast` says they are worth it."""
    before = forks[0]
    outcome = yield
    item.user_properties.append(("forks", started := forks[0] - before))
    if started and is_fast_loop(item.config) and not item.get_closest_marker("fast"):
        message = f"starts {started} processes: mark it `slow`, or see `--record-slow`"
        outcome.force_exception(pytest.fail.Exception(message, pytrace=False))


RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def of_this_process():
    """What other tests would run into: a process group, its environment, child processes."""
    leftovers = {f"`{name}` in the environment" for name in RANK_VARIABLES & os.environ.keys()}
    leftovers |= {f"process {child.name}" for child in multiprocessing.active_children()}
    return leftovers | {"a process group"} if torch.distributed.is_initialized() else leftovers


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Refuse a module of tests that leaves something behind."""
    outcome = yield
    if nextitem is None or nextitem.path != item.path:
        if left := of_this_process() - BEFORE:
            BEFORE.update(left)  # which no further module is blamed for
            message = f"tests of {item.path.name} leave behind: {', '.join(sorted(left))}"
            outcome.force_exception(pytest.fail.Exception(message, pytrace=False))


class SkipGuard:
    """Fails a run that skips a test for a reason that is not allowed."""

    def __init__(self):
        self.found = set()

    def pytest_runtest_logreport(self, report):
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
            if not any(allowed in reason for allowed in ALLOWED_SKIPS):
                self.found.add(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self, session):
        if self.found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in sorted(self.found):
            terminalreporter.write_line(f"skipped, which fails CI: {line}", red=True)


class Recorder:
    """Writes the table of slow tests at the end of a run."""

    def __init__(self):
        self.seconds, self.forking = defaultdict(float), set()

    def pytest_runtest_logreport(self, report):
        if not dict(report.user_properties).get("recorded"):
            return
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and dict(report.user_properties).get("forks"):
            self.forking.add(report.nodeid)

    def pytest_sessionfinish(self):
        tests = defaultdict(set)  # of each file
        for name in self.seconds:
            tests[name.partition("::")[0]].add(name.partition("[")[0])
        slow = {name for name, seconds in self.seconds.items() if seconds > SLOW_S} | self.forking
        slow = {name.partition("[")[0] for name in slow}
        whole = {file for file, of_file in tests.items() if of_file <= slow or file in slow_names()}
        ran = {*tests, *set().union(*tests.values())}
        table = (
            (slow_names() - ran)
            | whole
            | {name for name in slow if name.partition("::")[0] not in whole}
        )
        TABLE.write_text("\n".join(sorted(table)) + "\n")


def leave_out_cases(config, items):
    """Deselect most cases of the tests that are marked so; each value of a parameter stays."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.split("[")[0]].append(item)
    left_out = [item for test in cases.values() for item in not_needed(test)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def not_needed(cases):
    """Return the cases of a test but for a sample that has every value of every parameter."""
    (every,) = cases[0].get_closest_marker("sampled").args
    rest, missing = [*cases], set().union(*map(values_of, cases))
    random.Random(cases[0].originalname).shuffle(rest)
    while missing or len(cases) - len(rest) < len(cases) / every:
        chosen = max(rest, key=lambda case: len(values_of(case) & missing))
        rest.remove(chosen)
        missing -= values_of(chosen)
    return rest


def values_of(case):
    return {(name, id(value)) for name, value in case.callspec.params.items()}


@pytest.fixture(scope="session")
def exhaustive(request):
    """Whether slow sweeps run in full."""
    return request.config.getoption("--exhaustive")


@pytest.fixture(scope="session")
def sampled(exhaustive):
    """`sampled(every=5)` gives these options to a sweep, or with `--exhaustive` none of them."""
    return lambda **options: {} if exhaustive else options


@pytest.fixture(scope="session", autouse=True)
def fresh_ranks(exhaustive):
    """With `--exhaustive`, every rank has an interpreter of its own."""
    if exhaustive:
        from rank_jobs import RankJob

        RankJob.fresh = True


@pytest.fixture(scope="session")
def s3():
    """An S3 server on loopback, behind a proxy that puts in faults."""
    from object_store import object_store

    with object_store() as store:
        yield store


@pytest.fixture
def new_threads():
    """Tell which threads run now that did not run before the test."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]
