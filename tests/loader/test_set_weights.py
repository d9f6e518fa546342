"""Weights of a mixture that are set within an epoch, on all ranks at the same round."""

import copy
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
from odb_nodes.testing import assert_resumes_exactly
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

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens of the first")


class Stream:
    """An iterable without keys: a replay reads its items again from an older state."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Job:
    """Loaders of ranks that set weights after some steps.

    Args:
        kind: "keys" or "iterable": whether a restore makes samples again by their keys.
    """

    def __init__(self, kind="keys", by="samples", calls=CALLS, size=SIZE, **options):
        self.kind, self.by, self.calls, self.size = kind, by, calls, size
        self.options = options

    def loader(self, exchange=None, num_workers=0, **options):
        data = {n: [{"input_ids": [i] * (3 + 7 * i % 29)} for i in range(self.size)] for n in NAMES}
        if self.kind == "iterable":
            data = {name: Stream(items) for name, items in data.items()}
        given = {"token_budget": 160, "window": 12, "seed": 1, "round_size": 8, "prefetch": 2}
        workers = WorkerOptions(num_workers=num_workers, chunk_size=4)
        given |= {"timeout_s": TIMEOUT_S, "workers": workers, **self.options, **options}
        mixing = Mixing(weights=FIRST, by=self.by, settable=True)
        return ODBDataLoader(data, weights=mixing, process_group=exchange, **given)

    def steps(self, loader):
        """Yield each batch, once weights are set after it."""
        for batch in loader:
            info = pop_step_info(batch)
            if info.epoch == 0 and info.step in self.calls:
                loader.set_weights(self.calls[info.step])
            yield info, batch["input_ids"].tolist()

    def run(self, exchange=None, state=None, epochs=1, **options):
        """Of each step: what it holds, and the state after it."""
        with self.loader(exchange, **options) as loader:
            if state is not None:
                loader.load_state_dict(copy.deepcopy(state))
            found = []
            while not found or found[-1][0].epoch < epochs - 1:
                found += [(*one, loader.state_dict()) for one in self.steps(loader)]
        return found


def held(steps):
    return [(info, rows) for info, rows, _ in steps]


def keys_of(info):
    return zip(info.row_sources, info.keys, strict=True)


def places(steps):
    """The steps at which the shares change, and the largest one's source."""
    shares = [info.source_shares for info, *_ in steps]
    ats = [at for at in range(1, len(shares)) if shares[at] != shares[at - 1]]
    return [(at, max(shares[at], key=shares[at].get)) for at in ats]


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_set_takes_effect_on_all_ranks_and_each_sample_comes_once(ranks, by):
    found = on_ranks(ranks, Job(by=by).run)
    seen = Counter()
    for steps in found:
        assert steps[0][0].source_shares == pytest.approx({"a": 1 / 2, "b": 1 / 3, "c": 1 / 6})
        # Of two calls that the same round tells, the last one counts.
        assert [name for _, name in places(steps)][:2] in (["c", "b"], ["c", "a"])
        seen += Counter((s, k) for info, *_ in steps for s, k in keys_of(info))
    assert seen == Counter((name, key) for name in NAMES for key in range(SIZE))


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_are_within_a_hundredth_of_what_is_set(by):
    job = Job(by=by, size=6000, calls={100: CALLS[7], 400: CALLS[15]}, token_budget=1600)
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_the_number_of_workers_changes_nothing(by, ranks):
    job = Job(by=by)
    expected = on_ranks(ranks, job.run)
    assert all(len(places(steps)) >= 2 for steps in expected)
    for workers in (
        {"num_workers": 2},
        {"workers": WorkerOptions(num_workers=1, method="thread", chunk_size=4)},
    ):
        found = on_ranks(ranks, lambda exchange, workers=workers: job.run(exchange, **workers))
        assert [*map(held, found)] == [*map(held, expected)]


class Setting:
    """A loader that sets weights by itself, for `assert_resumes_exactly`."""

    def __init__(self, job, **options):
        self.job, self._loader = job, job.loader(**options)
        self.state_dict, self.close = self._loader.state_dict, self._loader.close
        self.load_state_dict = self._loader.load_state_dict

    def __iter__(self):
        return self.job.steps(self._loader)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", [{}, {"state": "payload"}, {"accumulate": 3}], ids=str)
@pytest.mark.parametrize("kind", ["keys", "iterable"])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_a_run_of_one_rank_resumes_exactly_at_every_step(by, kind, options, sampled):
    job = Job(kind, by, size=60, **options)
    assert_resumes_exactly(lambda: Setting(job), epochs=2, **sampled(every=11, horizon=12, chain=1))


@pytest.mark.slow
def test_a_run_with_workers_resumes_exactly(sampled):
    job = Job(size=60)
    less = {"every": 6, "horizon": 25, "chain": 1}
    assert_resumes_exactly(lambda: Setting(job, num_workers=2), epochs=1, **sampled(**less))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("uneven", ["fill", "stop"])
@pytest.mark.parametrize("kind", ["keys", "iterable"])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_two_ranks_resume_exactly_at_every_step(by, kind, uneven, sampled):
    job = Job(kind, by, uneven=uneven)
    whole = on_ranks(2, lambda exchange: job.run(exchange, epochs=2))
    assert all(len(places(steps)) >= 2 for steps in whole)
    for at in range(0, len(whole[0]) - 1, sampled(every=7).get("every", 1)):

        def resume(exchange, at=at):
            return job.run(exchange, whole[exchange.rank][at][2], epochs=2)

        for steps, before in zip(on_ranks(2, resume), whole, strict=True):
            assert held(steps) == held(before[at + 1 :])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_says_what_was_set_though_the_batches_were_read_ahead(ranks):
    """The state of the aligner is older than the call, which it has not heard of."""
    job = Job()

    def run(exchange):
        with job.loader(exchange, num_workers=1, prefetch=4) as loader:
            steps = job.steps(loader)
            for info, _ in steps:
                if info.step == 7:
                    state = loader.state_dict()
                    break
            return state, list(steps)

    def resume(exchange):
        loader = job.loader(exchange, prefetch=4)
        loader.load_state_dict(found[exchange.rank][0])
        return [*job.steps(loader)]

    found = on_ranks(ranks, run)
    assert on_ranks(ranks, resume) == [rest for _, rest in found]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_epoch_begins_with_what_was_set_last(ranks):
    job = Job(calls={5: CALLS[7]})

    def run(exchange, state=None, set_again=True):
        loader = job.loader(exchange)
        if state is None:
            list(job.steps(loader))
        else:
            loader.load_state_dict(state)
        if set_again:
            loader.set_weights(CALLS[15])
        state = loader.state_dict()
        return [info.source_shares for info, _ in job.steps(loader)], state

    whole = on_ranks(ranks, run)
    kept = on_ranks(ranks, lambda exchange: run(exchange, set_again=False))
    again = on_ranks(ranks, lambda one: run(one, kept[one.rank][1]))  # set after a load
    saved = on_ranks(ranks, lambda one: run(one, whole[one.rank][1], set_again=False))
    for (shares, _), (without, _), (loaded, _), (resumed, _) in zip(
        whole, kept, again, saved, strict=True
    ):
        assert without[0] == {"a": 0.1, "b": 0.1, "c": 0.8}
        assert shares[0] == {"a": 0.1, "b": 0.8, "c": 0.1}
        assert shares == loaded == resumed


def test_what_is_set_after_a_load_counts_from_there():
    job = Job(calls={})
    state = job.run()[4][2]
    first, second = job.loader(), job.loader()
    first.load_state_dict(state)
    first.set_weights(CALLS[7])
    saved = first.state_dict()  # before anything is reset to it
    second.load_state_dict(saved)
    expected = [*job.steps(first)]
    assert [*job.steps(second)] == expected
    third = job.loader()
    third.load_state_dict(state)
    iter(third)
    third.set_weights(CALLS[7])
    assert [*job.steps(third)] == expected
    assert places(expected)[0][1] == "c"


@pytest.mark.parametrize("other", [CALLS[14], None])
def test_ranks_that_set_different_weights_all_raise(other):
    job = Job()

    def run(exchange):
        loader = job.loader(exchange)
        for batch in loader:
            if pop_step_info(batch).step == 5:
                weights = CALLS[7] if exchange.rank == 0 else other
                if weights is not None:
                    loader.set_weights(weights)

    raised = []

    def caught(exchange):
        with pytest.raises(StateError, match="set different weights .* same step") as one:
            run(exchange)
        raised.append(str(one.value))

    on_ranks(2, caught)
    assert len(raised) == 2 and len({*raised}) == 1
    assert ("ranks [1] none" in raised[0]) == (other is None)


def test_ranks_that_begin_an_epoch_with_different_weights_all_raise():
    job = Job()

    def run(exchange):
        loader = job.loader(exchange)
        loader.set_weights(CALLS[7 if exchange.rank else 15])
        with pytest.raises((StateError, PeerError), match="weights of the mixture"):
            next(iter(loader))

    on_ranks(2, run)


def test_a_state_does_not_grow_with_the_number_of_changes():
    calls = {step: {"a": 1, "b": 1, "c": 1 + step % 5} for step in range(0, 400, 3)}
    steps = Job(calls=calls, size=2000).run()
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


@pytest.mark.parametrize("further", [0, 6, 12])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_after_a_checkpoint_is_made_again_by_what_was_set_before_it(ranks, further):
    """The rounds after the checkpoint tell of the weights, and change them."""
    job = Job(calls={6: CALLS[7]}, token_budget=80)
    whole = on_ranks(ranks, job.run)
    states = [steps[6][2] for steps in whole]
    remade = remake_from_checkpoint(job.loader, states, further=further)
    for again, steps in zip(remade, whole, strict=True):
        assert again.info == steps[7 + further][0]
        assert again.batch["input_ids"].tolist() == steps[7 + further][1]


def test_a_settable_mixture_that_is_not_set_draws_as_a_fixed_one():
    job = Job(calls={})
    with ODBDataLoader(
        job.loader().dataset, weights=FIRST, token_budget=160, window=12, seed=1, round_size=8
    ) as fixed:
        rows = [batch["input_ids"].tolist() for batch in fixed]
        assert "calls" not in fixed.state_dict()["root"]
        with pytest.raises(ValueError, match=r"`set_weights` needs .* `weights=Mixing\(settable"):
            fixed.set_weights(FIRST)
    assert [found for _, found, _ in job.run()] == rows


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"a": 1, "b": 1}, ValueError, r"must have the names of `sources`, \['a', 'b', 'c'\]"),
        ({**FIRST, "d": 1}, ValueError, "but has .*'d'"),
        ({**FIRST, "a": 0}, ValueError, r"`weights\['a'\]` must be a positive number, but is 0"),
        ({**FIRST, "a": -1}, ValueError, "a positive number, but is -1"),
        ({**FIRST, "a": "x"}, ValueError, "a positive number, but is 'x'"),
        ([1, 2, 3], TypeError, "must be a dict by name"),
    ],
)
def test_weights_that_are_not_valid_are_refused_and_change_nothing(weights, error, message):
    loader = Job().loader()
    with pytest.raises(error, match=message):
        loader.set_weights(weights)
    assert loader.state_dict()["root"]["calls"] == []


def test_what_cannot_be_set_is_refused_when_the_loader_is_made():
    with pytest.raises(ValueError, match='`uneven` must not be "join" where `weights` are sett'):
        Job(uneven="join").loader()
    with pytest.raises(ValueError, match="`settable` must be False where `weights` follow a sched"):
        Mixing(weights=WeightSchedule([(0, FIRST)]), settable=True)
    with pytest.raises(TypeError, match="`settable` must be True or False, but is 1"):
        Mixing(settable=1)


SCHEDULE = [(0, FIRST), (90, {"a": 0, "b": 1, "c": 0}), (150, {"a": 1, "b": 1, "c": 8})]


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_resumes_exactly_and_yields_each_sample_once(ranks, workers, ramp, sampled):
    data = Job(size=60).loader().dataset

    def run(exchange, state=None, num_workers=workers):
        mixing = Mixing(weights=WeightSchedule(SCHEDULE, ramp))
        options = {"weights": mixing, "token_budget": 160, "window": 12, "round_size": 8}
        options |= {"num_workers": num_workers, "process_group": exchange, "timeout_s": TIMEOUT_S}
        with ODBDataLoader(data, **options) as loader:
            if state is not None:
                loader.load_state_dict(copy.deepcopy(state))
            return [
                (pop_step_info(batch), batch["input_ids"].tolist(), loader.state_dict())
                for batch in loader
            ]

    whole = on_ranks(ranks, run)
    inline = on_ranks(ranks, lambda exchange: run(exchange, num_workers=0))
    assert [*map(held, inline)] == [*map(held, whole)]
    seen = Counter(pair for steps in whole for info, *_ in steps for pair in keys_of(info))
    assert seen == Counter((name, key) for name in NAMES for key in range(60))
    least = sampled(every=9 if workers else 3).get("every", 1)
    for at in range(0, len(whole[0]) - 1, least):

        def resume(exchange, at=at):
            return run(exchange, whole[exchange.rank][at][2])

        for steps, before in zip(on_ranks(ranks, resume), whole, strict=True):
            assert held(steps) == held(before[at + 1 :])


def test_a_state_that_was_asked_for_before_is_taken_anew():
    loader = Job(calls={}).loader()
    next(iter(loader))
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


def test_a_graph_of_nodes_has_shares_that_no_number_of_workers_changes():
    def infos(num_workers):
        mixed = SourceMixer(
            {name: ShardedSampler(90, seed=1, rank=0, world_size=1) for name in NAMES},
            WeightSchedule([*SCHEDULE[:2], (300, FIRST)]),
            world_size=1,
        )
        process = PerSource(dict.fromkeys(NAMES, Job().loader().dataset["a"].__getitem__))
        workers = WorkerOptions(num_workers=num_workers, method="thread")
        processor = ParallelProcessor(mixed, process, workers=workers, rank=0, world_size=1)
        bucketer = WindowBucketer(LengthObserver(processor), 160, 12)
        with Loader(GroupCollator(RankAligner(bucketer))) as loader:
            return [pop_step_info(batch) for batch in loader]

    expected = infos(0)
    assert len(places([(info,) for info in expected])) == 2
    assert infos(2) == expected
