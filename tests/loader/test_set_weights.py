"""Weights of a mixture that are set within an epoch, on all ranks at the same round.

That a run which has set them goes on exactly is tested by the resume machine.
"""

from collections import Counter

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks

from odb_nodes import (
    GroupCollator,
    Ledger,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    ParallelProcessor,
    PeerError,
    PerSource,
    RankAligner,
    ShardedSampler,
    SourceMixer,
    StateError,
    WeightSchedule,
    WindowBucketer,
    WorkerOptions,
    audit,
    pop_step_info,
)
from odb_nodes.tools.steps import remake_from_checkpoint

NAMES = ("a", "b", "c")
FIRST = {"a": 3, "b": 2, "c": 1}
CALLS = {  # after these steps of the first epoch
    7: {"a": 1, "b": 1, "c": 8},
    14: {"a": 8, "b": 1, "c": 1},
    15: {"a": 1, "b": 8, "c": 1},
    26: {"a": 1, "b": 1, "c": 1},
}
SIZE = 180
SCHEDULE = [(0, FIRST), (90, {"a": 0, "b": 1, "c": 0}), (300, FIRST)]

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens of the first")


class Job:
    """Loaders of ranks that set weights after some steps."""

    def __init__(self, by="samples", calls=CALLS, size=SIZE, **options):
        self.by, self.calls, self.size, self.options = by, calls, size, options

    def loader(self, exchange=None, **options):
        data = {n: [{"input_ids": [i] * (3 + 7 * i % 29)} for i in range(self.size)] for n in NAMES}
        mixing = Mixing(weights=FIRST, by=self.by, settable=True)
        given = {"token_budget": 160, "window": 12, "seed": 1, "round_size": 8, "prefetch": 2}
        given |= {"timeout_s": TIMEOUT_S, "workers": WorkerOptions(chunk_size=4), "weights": mixing}
        return ODBDataLoader(data, process_group=exchange, **given | self.options | options)

    def steps(self, loader):
        """Yield each batch, once weights are set after it."""
        for batch in loader:
            info = pop_step_info(batch)
            if info.epoch == 0 and info.step in self.calls:
                loader.set_weights(self.calls[info.step])
            yield info, batch["input_ids"].tolist()

    def run(self, exchange=None, **options):
        """Of each step: what it holds, and the state after it."""
        with self.loader(exchange, **options) as loader:
            return [(*one, loader.state_dict()) for one in self.steps(loader)]


def places(steps):
    """The steps at which the shares change, and the largest one's source."""
    shares = [info.source_shares for info, *_ in steps]
    ats = [at for at in range(1, len(shares)) if shares[at] != shares[at - 1]]
    return [(at, max(shares[at], key=shares[at].get)) for at in ats]


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_set_takes_effect_on_all_ranks_and_each_sample_comes_once(ranks, by):
    found = on_ranks(ranks, Job(by).run)
    seen = Counter()
    for steps in found:
        assert steps[0][0].source_shares == pytest.approx({"a": 1 / 2, "b": 1 / 3, "c": 1 / 6})
        # Of two calls that the same round tells, the last one counts.
        assert [name for _, name in places(steps)][:2] in (["c", "b"], ["c", "a"])
        for info, *_ in steps:
            seen.update(zip(info.row_sources, info.keys, strict=True))
    assert seen == Counter((name, key) for name in NAMES for key in range(SIZE))


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_are_within_a_hundredth_of_what_is_set(by):
    job = Job(by, size=6000, calls={100: CALLS[7], 400: CALLS[15]}, token_budget=1600)
    counts = {}
    for info, _ in job.steps(job.loader()):
        if info.step == 700:
            break
        of_these = counts.setdefault(tuple(info.source_shares.values()), Counter())
        for name, one in info.local_sources.items():
            of_these[name] += one.samples if by == "samples" else one.tokens
    assert len(counts) == 3
    for shares, had in counts.items():
        for name, share in zip(NAMES, shares, strict=True):
            # What waits in the pool at a change comes out later.
            assert abs(had[name] / had.total() - share) < 0.01


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_the_number_of_workers_changes_nothing(by):
    def held(steps):
        return [one[:2] for one in steps]

    job, threads = Job(by), WorkerOptions(num_workers=2, method="thread", chunk_size=4)
    expected = on_ranks(2, job.run)
    found = on_ranks(2, lambda exchange: job.run(exchange, workers=threads, prefetch=2))
    assert [*map(held, found)] == [*map(held, expected)]


def test_what_is_set_after_a_load_counts_from_there_and_in_the_next_epoch():
    job = Job(calls={})
    state = job.run()[4][2]
    first, second, third = (job.loader() for _ in range(3))
    first.load_state_dict(state)
    first.set_weights(CALLS[7])
    second.load_state_dict(first.state_dict())  # before anything is reset to it
    third.load_state_dict(state)
    iter(third)
    third.set_weights(CALLS[7])
    found = [[*job.steps(loader)] for loader in (first, second, third)]
    assert found[0] == found[1] == found[2]
    assert places(found[0])[0][1] == "c"
    second.set_weights(CALLS[15])  # between epochs
    third.load_state_dict(second.state_dict())
    for loader, share in ((first, 0.1), (second, 0.8), (third, 0.8)):
        assert next(job.steps(loader))[0].source_shares["b"] == share


@pytest.mark.parametrize("other", [CALLS[14], None])
@pytest.mark.parametrize("step", [5, None], ids=["within", "between"])
def test_ranks_that_set_different_weights_all_raise(step, other):
    job = Job()

    def run(exchange):
        loader = job.loader(exchange)
        weights = CALLS[7] if exchange.rank == 0 else other
        if step is None and weights:
            loader.set_weights(weights)
        with pytest.raises((StateError, PeerError)) as caught:
            for batch in loader:
                if pop_step_info(batch).step == step and weights:
                    loader.set_weights(weights)
        return str(caught.value)

    for message in on_ranks(2, run):
        if step is None:
            assert "weights of the mixture" in message
        else:
            assert "set different weights" in message
            assert ("ranks [1] none" in message) == (other is None)


def test_a_state_does_not_grow_with_the_number_of_changes():
    calls = {step: {"a": 1, "b": 1, "c": 1 + step % 5} for step in range(0, 120, 3)}
    steps = Job(calls=calls, size=600).run()
    changes = [state["root"]["source"]["source"]["weight_changes"] for *_, state in steps[30:]]
    assert 1 <= max(map(len, changes)) < 30
    assert max(len(state["root"]["calls"]) for *_, state in steps) < 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ledger_says_from_which_step_on_a_run_that_resumed_drew_by_other_shares(
    tmp_path, ranks
):
    job = Job()
    whole = on_ranks(ranks, job.run)

    def run(exchange):
        for start, stop in ((0, 18), (12, None)):  # killed at 18, goes on from 12
            with job.loader(exchange) as loader:
                if start:
                    loader.load_state_dict(whole[exchange.rank][start - 1][2])
                ledger = Ledger(tmp_path, rank=exchange.rank, world_size=ranks)
                for info, _ in job.steps(loader):
                    ledger.record(info)
                    if info.step + 1 == stop:
                        break
            ledger.close()

    on_ranks(ranks, run)
    found = audit(tmp_path, dict.fromkeys(NAMES, SIZE))
    assert found.ok and found.epochs[0].is_complete
    shares = found.epochs[0].shares
    assert [step for step, _ in shares] == [0, *(at for at, _ in places(whole[0]))]
    for step, one in shares:
        assert one == pytest.approx(whole[0][step][0].source_shares, abs=1e-6)


@pytest.mark.parametrize("further", [0, 12])
def test_a_step_after_a_checkpoint_is_made_again_by_what_was_set_before_it(further):
    """The rounds after the checkpoint tell of the weights, and change them."""
    job = Job(calls={6: CALLS[7]}, token_budget=80)
    whole = on_ranks(2, job.run)
    remade = remake_from_checkpoint(job.loader, [steps[6][2] for steps in whole], further=further)
    for again, steps in zip(remade, whole, strict=True):
        assert again.info == steps[7 + further][0]
        assert again.batch["input_ids"].tolist() == steps[7 + further][1]


def test_a_settable_mixture_that_is_not_set_draws_as_a_fixed_one():
    job = Job(calls={})
    with job.loader(weights=FIRST) as fixed:
        rows = [batch["input_ids"].tolist() for batch in fixed]
        assert "calls" not in fixed.state_dict()["root"]
        with pytest.raises(ValueError, match=r"`set_weights` needs .* `weights=Mixing\(settable"):
            fixed.set_weights(FIRST)
    assert [found for _, found, _ in job.run()] == rows


REFUSALS = [
    (lambda: Job().loader().set_weights({"a": 1, "b": 1}), ValueError, "the names of `sources`"),
    (lambda: Job().loader().set_weights({**FIRST, "d": 1}), ValueError, "but has .*'d'"),
    (lambda: Job().loader().set_weights({**FIRST, "a": 0}), ValueError, r"`weights\['a'\]`.* is 0"),
    (lambda: Job().loader().set_weights({**FIRST, "a": "x"}), ValueError, "but is 'x'"),
    (lambda: Job().loader().set_weights([1, 2, 3]), TypeError, "must be a dict by name"),
    (
        lambda: Mixing(weights=WeightSchedule([(0, FIRST)]), settable=True),
        ValueError,
        "`settable` must be False where",
    ),
    (lambda: Mixing(settable=1), TypeError, "`settable` must be True or False, but is 1"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_cannot_be_set_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_refused_call_changes_nothing_and_one_that_is_taken_is_in_the_state():
    loader = Job(calls={}).loader()
    next(iter(loader))
    with pytest.raises(ValueError, match="weights"):
        loader.set_weights({**FIRST, "a": -1})
    assert loader.state_dict()["root"]["calls"] == []
    loader.set_weights(CALLS[7])
    assert loader.state_dict()["root"]["calls"] == [(1, 3, {"a": 1.0, "b": 1.0, "c": 8.0})]


def test_shares_are_those_of_the_outermost_mixture():
    inner = SourceMixer(
        {name: ShardedSampler(40, seed=1, rank=0, world_size=1) for name in "ab"},
        WeightSchedule([(0, {"a": 1, "b": 3}), (9, {"a": 1, "b": 1})]),
        world_size=1,
    )
    samples = Job().loader().dataset["a"]
    read = {"in": lambda item: samples[item.item], "c": None}
    loader = ODBDataLoader(
        {"in": inner, "c": samples}, process_fn=read, token_budget=160, window=12, seed=1
    )
    infos = [pop_step_info(batch) for batch in loader]
    assert {source for info in infos for source in info.row_sources} == {"in", "c"}
    assert not any(info.source_shares for info in infos)


@pytest.mark.parametrize("ramp", [False, True])
def test_a_graph_of_nodes_has_shares_that_no_number_of_workers_changes(ramp):
    def infos(num_workers):
        mixed = SourceMixer(
            {name: ShardedSampler(90, seed=1, rank=0, world_size=1) for name in NAMES},
            WeightSchedule(SCHEDULE, ramp),
            world_size=1,
        )
        process = PerSource(dict.fromkeys(NAMES, Job().loader().dataset["a"].__getitem__))
        workers = WorkerOptions(num_workers=num_workers, method="thread")
        processor = ParallelProcessor(mixed, process, workers=workers, rank=0, world_size=1)
        bucketer = WindowBucketer(LengthObserver(processor), 160, 12)
        with Loader(GroupCollator(RankAligner(bucketer))) as loader:
            return [pop_step_info(batch) for batch in loader]

    expected = infos(0)
    assert len(places([(info,) for info in expected])) > 1 + 2 * ramp
    assert infos(2) == expected
