"""Virtual ranks: the same optimizer steps on any number of processes that host them."""

import threading
import time

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks
from elastic import job, make, states_at
from jobs import Job, JobSpec, by_virtual_rank
from refusals import refuses
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    PaddingCollate,
    ParallelProcessor,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    StateError,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
    reshard,
)
from odb_nodes.core.alignment.peers import VirtualTeam
from odb_nodes.core.alignment.virtual_ranks import VirtualRanks
from odb_nodes.training.memory import OomGuard

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(Further samples|were skipped|were dropped|not emitted)"
)


@pytest.mark.parametrize("kind", ["accumulate", "threads", "stateful"])
def test_all_numbers_of_processes_take_the_steps_of_plain_ranks(kind, tmp_path):
    jobs = [Job(JobSpec(kind, 4, tmp_path))]
    jobs += [Job(JobSpec(f"virtual {kind}", processes, tmp_path)) for processes in (4, 2, 1)]
    for _ in range(2):
        expected, *steps_of_virtual_ranks = [by_virtual_rank(run.epoch()) for run in jobs]
        assert {rank for *_, rank in expected} == {0, 1, 2, 3}
        assert steps_of_virtual_ranks == [expected] * 3
    for run in jobs:
        run.end()


def test_counts_are_those_of_all_virtual_ranks_and_the_last_batch_ends_the_epoch():
    loader = make(None, virtual_ranks=3)
    infos = [pop_step_info(batch) for batch in loader]
    assert (loader.num_samples, loader.accumulate) == (230, 3)
    assert loader.skipped_samples == {"thirty-first": 4, "other": 4}
    assert (infos[-1].micro_steps, infos[-1].world_size) == (3, 1)
    assert [info.ends_epoch for info in infos] == [False] * (len(infos) - 1) + [True]


def test_virtual_ranks_share_workers_and_what_is_in_flight():
    workers = WorkerOptions(num_workers=8, in_flight_samples=400, in_flight_bytes=100 << 20)
    loader = make(None, virtual_ranks=4, workers=workers)
    shares = [graph.samples.runner.options for graph in loader._graphs]
    for name in ("num_workers", "in_flight_samples", "in_flight_bytes"):
        assert sum(getattr(share, name) for share in shares) == getattr(workers, name)


def failing(index):
    if index == 77:
        raise OSError("disk")
    return {"input_ids": [1] * (index % 9 + 2)}


def test_an_error_reaches_all_processes():
    def run(exchange):
        loader = make(exchange, virtual_ranks=4, process_fn=failing, exclude=None)
        with pytest.raises(Exception, match="disk") as raised:
            list(loader)
        return type(raised.value).__name__

    assert sorted(on_ranks(2, run)) == ["PeerError", "SampleError"]


# --- states ---------------------------------------------------------------------------------------


def virtual(processes=2, batches=3, **options):
    """The states of processes after some batches."""
    return states_at(job(processes, steps=batches, virtual_ranks=4, **options), batches)


@pytest.mark.parametrize(
    ("batches", "changed", "message"),
    [((3, 3), {"seed": 9}, "seed"), ((2, 3), {}, "are out` is 0 on rank 0, 1 on rank 1")],
)
def test_states_that_do_not_fit_fail_on_all_processes(batches, changed, message):
    states = [virtual(batches=number)[rank] for rank, number in enumerate(batches)]

    def run(exchange):
        loader = make(exchange, virtual_ranks=4, **(changed if exchange.rank else {}))
        loader.load_state_dict(states[exchange.rank])
        has_items = "seed" in changed and not exchange.rank
        with pytest.raises(PeerError if has_items else StateError, match=message):
            next(iter(loader))

    on_ranks(2, run)


def of_two_epochs():
    """A state of each process, at the same batch of two epochs."""
    ranks = job(2, virtual_ranks=4, epochs=2)
    first = [info.epoch for info, _ in ranks[0][0]].index(1)
    return [states_at(ranks, 4)[0], states_at(ranks, first + 4)[1]]


def refused_now(states, virtual_ranks):
    loader = make(None, virtual_ranks=virtual_ranks)
    loader.load_state_dict(states[0])
    iter(loader)


test_states_of_other_processes_or_within_a_step_are_refused = refuses(
    [
        (lambda: reshard(virtual(1, 6), 2), "within an optimizer step"),
        (lambda: reshard(virtual(1, 4, accumulate=2), 2), "within an optimizer step"),
        (lambda: reshard(virtual(2, 4), 3), "must divide it"),
        (lambda: reshard(virtual(2, 4)[:1], 4), r"ranks \[1\] are missing"),
        (lambda: reshard(virtual(2, 4)[:1] * 2, 1), "rank 0 and rank 1|of ranks"),
        (lambda: reshard(of_two_epochs(), 1), "`epoch` is 0 on rank 0, but 1 on rank"),
        (lambda: refused_now(virtual(2, 4), 4), "virtual_ranks|world_size"),
        (lambda: refused_now(virtual(2, 4), None), "VirtualRanks"),
    ],
    error=StateError,
)


REFUSALS = [
    ({"virtual_ranks": 2.0}, TypeError, "virtual_ranks"),
    ({"sharded": True}, ValueError, "sharded"),
    ({"dataset": IterableWrapper([{"input_ids": [1]}])}, TypeError, "must not be a node"),
]


test_what_cannot_be_the_same_on_all_is_refused = refuses(
    REFUSALS,
    lambda options: ODBDataLoader(
        **{"dataset": range(9), "token_budget": 9, "virtual_ranks": 2} | options
    ),
)


class Locked(IterableDataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __iter__(self):
        return iter(())


def test_a_stream_must_be_copied_and_a_guard_needs_plain_ranks():
    with pytest.raises(TypeError, match="must be copied"):
        ODBDataLoader(Locked(), token_budget=9, virtual_ranks=2)
    with pytest.raises(TypeError, match="virtual_ranks"):
        OomGuard(make(None, virtual_ranks=2))


def test_virtual_ranks_must_divide_over_processes():
    def run(exchange):
        with pytest.raises(ValueError, match=r"multiple of the number of ranks \(2\)"):
            make(exchange, virtual_ranks=3)

    on_ranks(2, run)


class Breaks:
    """Raises once, at one of its calls; then it is mended."""

    def __init__(self, error, call):
        self.error, self.left = error, call

    def __call__(self, value):
        self.left -= 1
        if not self.left:
            raise self.error
        return value


class Data:
    """A dataset that may break where it is read."""

    def __init__(self, check):
        self.check = check

    def __len__(self):
        return 72

    def __getitem__(self, index):
        return self.check({"input_ids": [index] * (2 + 7 * index % 23)})


def unchanged(value):
    return value


def virtual_loader(data=unchanged, cost=unchanged, collate=unchanged):
    """A loader of three virtual ranks, whose costs are the tokens of a group."""
    team, ranks = VirtualTeam(3, None, TIMEOUT_S), []
    for exchange in team.ranks():
        shard = {"rank": exchange.rank, "world_size": exchange.world_size}
        node = ParallelProcessor(ShardedSampler(72, **shard), Data(data).__getitem__, **shard)
        node = WindowBucketer(LengthObserver(node), 60, 8)
        ranks.append(
            RankAligner(
                node,
                exchange,
                8,
                step_time=lambda group: sum(sample.tokens for sample in cost(group)),
            )
        )
    ends = [GroupCollator(rank, lambda group: PaddingCollate()(collate(group))) for rank in ranks]
    return Loader(VirtualRanks(ends, ranks, team))


def keys_of(loader):
    """The keys of each batch until the loader ends or raises, and the error."""
    keys = []
    try:
        for batch in loader:
            keys.append(pop_step_info(batch).keys)
    except BaseException as error:
        return keys, error
    return keys, None


@pytest.mark.parametrize(
    ("place", "call", "error"),
    [
        ("data", 30, KeyboardInterrupt("now")),
        ("data", 30, StopIteration("end")),
        ("cost", 20, StopIteration("end")),
        ("collate", 11, OSError("disk")),
    ],
)
def test_an_error_within_a_step_is_raised_once_and_loses_nothing(place, call, error):
    expected, _ = keys_of(virtual_loader())
    threads, start = {*threading.enumerate()}, time.monotonic()
    loader = virtual_loader(**{place: Breaks(error, call)})
    keys, raised = keys_of(loader)
    assert time.monotonic() - start < TIMEOUT_S
    assert isinstance(error, Exception) or raised is error
    assert isinstance(raised, SampleError) or place != "data" or raised is error
    if place == "cost" and isinstance(error, StopIteration):
        assert "`step_time` raised StopIteration" in str(raised)
    state = loader.state_dict()
    again = virtual_loader()
    again.load_state_dict(state)
    for resumed in (loader, again):
        rest, later = keys_of(resumed)
        assert raised is not None and later is None
        assert keys + rest == expected
    assert {*threading.enumerate()} == threads


def test_virtual_ranks_whose_states_are_at_different_steps_are_named():
    states = []
    for batches in (3, 6):
        it = iter(loader := virtual_loader())
        for _ in range(batches):
            next(it)
        states.append(loader.root.state_dict())
    states[0]["sources"]["1"] = states[1]["sources"]["1"]
    del states[0]["digest"]  # It would differ, too.
    node = virtual_loader().root
    node.reset(states[0])
    with pytest.raises(StateError, match="virtual ranks .*differ in .*step"):
        next(node)


class Numbers(IterableDataset):
    def __iter__(self):
        yield from ({"input_ids": [n] * (n % 7 + 1)} for n in range(80))


def test_a_rank_that_fills_with_a_sample_of_another_restores_without_keys():
    """Whose number in the epoch is one of the other rank."""

    def make():
        odd = range(1, 80, 2)  # all that the second rank has
        options = {"token_budget": 16, "window": 8, "round_size": 4, "virtual_ranks": 2}
        return ODBDataLoader(Numbers(), exclude=odd, **options)

    states, ids = [], []
    for batch in (loader := make()):
        ids.append(batch["input_ids"].tolist())
        states.append(loader.state_dict())
    for step in range(1, len(ids), 12):
        resumed = make()
        resumed.load_state_dict(states[step - 1])
        assert [batch["input_ids"].tolist() for batch in resumed] == ids[step:]
