"""Samples that processing skips: left out in order, counted by reason, exact after a resume."""

import pytest
import torch
from torchdata.nodes import IterableWrapper
from worker_functions import SkipSome

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    PerSource,
    Sample,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceItem,
    SourceMixer,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    load_state,
    save_state,
)
from odb_nodes.testing import assert_resumes_exactly

SIZE = 90
skip_some = SkipSome()
COUNTS = {"corrupt": 12, "missing": 18}
KEPT = [index for index in range(SIZE) if skip_some.reason(index) is None]

pytestmark = pytest.mark.filterwarnings("ignore:sample .* is skipped")


def make(**options):
    given = {"token_budget": 64, "window": 12, "process_fn": skip_some, **options}
    return ODBDataLoader(range(SIZE), **given)


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def flat(epoch):
    return sorted(index for batch in epoch for index in batch)


@pytest.mark.parametrize(
    "workers",
    [
        WorkerOptions(),
        WorkerOptions(num_workers=1, chunk_size=7),
        WorkerOptions(num_workers=3, chunk_size=4),
        WorkerOptions(num_workers=2, method="thread"),
    ],
)
def test_every_sample_comes_out_once_or_is_counted_once(workers):
    with make(workers=workers) as loader:
        for _ in range(2):
            epoch = ids(loader)
            assert flat(epoch) == KEPT
            assert loader.skipped_samples == COUNTS
    assert sum(COUNTS.values()) + len(KEPT) == SIZE
    with make(workers=workers) as loader:
        assert ids(loader) == ids(make())


@pytest.mark.parametrize("state", ["replay", "payload"])
def test_a_graph_that_skips_resumes_exactly(state, sampled):
    report = assert_resumes_exactly(lambda: make(state=state), **sampled(horizon=8))
    assert report.resumes > 20


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("state", ["replay", "payload"])
def test_the_count_is_exact_from_every_step(state, num_workers, tmp_path):
    states, counts, batches = [], [], []
    with make(state=state, num_workers=num_workers, prefetch=0) as loader:
        for batch in loader:
            batches.append(batch["id"].tolist())
            save_state(loader.state_dict(), tmp_path / f"{len(states)}")
            states.append(tmp_path / f"{len(states)}")
            counts.append(loader.skipped_samples)
    assert counts[0] != counts[-1] == COUNTS
    for step, path in list(enumerate(states))[:: 1 if num_workers == 0 else 5]:
        with make(state=state, num_workers=num_workers, prefetch=0) as resumed:
            resumed.load_state_dict(load_state(path))
            found = [(batch["id"].tolist(), resumed.skipped_samples) for batch in resumed]
            assert found == list(zip(batches, counts, strict=True))[step + 1 :]
            assert resumed.skipped_samples == COUNTS


def test_the_first_of_each_reason_is_shown():
    with pytest.warns(UserWarning) as caught:
        ids(make(shuffle=False))
    shown = [str(one.message) for one in caught if "is skipped" in str(one.message)]
    assert shown == [
        "sample 0 of the epoch (key 0) is skipped (missing): no file for 0. Further ones are only "
        "counted, see `skipped_samples`.",
        "sample 3 of the epoch (key 3) is skipped (corrupt): cannot read 3. Further ones are only "
        "counted, see `skipped_samples`.",
    ]


def test_an_epoch_of_which_nothing_is_left_is_an_error():
    loader = ODBDataLoader([0, 5, 10], token_budget=8, process_fn=skip_some)
    with pytest.raises(SampleError, match="all 3 samples .* left out: {'missing': 3} skipped in"):
        ids(loader)
    budget = TokenBudget(2, oversize="drop")
    with (
        pytest.warns(UserWarning, match="exceeds"),
        pytest.raises(SampleError, match="{'missing': 1} skipped in processing, 1 dropped"),
    ):
        ids(ODBDataLoader([0, 1], token_budget=budget, process_fn=skip_some))


def test_data_that_was_mended_or_lost_between_save_and_resume():
    loader = make(shuffle=False)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    lost = ODBDataLoader(
        range(SIZE),
        token_budget=64,
        window=12,
        process_fn=SkipSome(also=range(SIZE)),
        shuffle=False,
    )
    lost.load_state_dict(state)
    with pytest.raises(StateError, match="was good when saved, but is skipped now .lost.: gone"):
        next(iter(lost))
    mended = ODBDataLoader(
        range(SIZE), token_budget=64, window=12, process_fn=SkipSome(never=True), shuffle=False
    )
    mended.load_state_dict(state)
    rest = flat(ids(mended))
    # What was skipped stays so, what comes later is good: nothing twice.
    assert len(rest) == len(set(rest)) and sum(mended.skipped_samples.values()) < sum(
        COUNTS.values()
    )


def test_nodes_pass_a_skipped_sample_on():
    items = [Skipped("a"), SourceItem("x", Skipped("b")), SourceItem("x", {"input_ids": [1]})]
    observed = list(Loader(LengthObserver(IterableWrapper(items))))
    skipped = Skipped("b", source="x")
    assert observed == [Skipped("a"), skipped, Sample({"input_ids": [1]}, 1, 0, 0, "x", "tokens")]


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_a_mixer_of_observed_sources_leaves_them_to_the_bucketer(by):
    def source(first):
        items = [skip_some(index) for index in range(first, first + 30)]
        return LengthObserver(IterableWrapper(items))

    mixer = SourceMixer({"a": source(0), "b": source(30)}, {"a": 2, "b": 1}, by=by)
    node = WindowBucketer(mixer, 64, 8)
    epoch = ids(Loader(GroupCollator(node)))
    assert flat(epoch) == [index for index in KEPT if index < 60]
    assert sum(node.skipped_samples.values()) == 60 - len(flat(epoch))
    assert sum(mixer.samples.values()) == len(flat(epoch))


def test_each_source_may_skip():
    sources = {name: ShardedSampler(40, rank=0, world_size=1) for name in "ab"}
    processing = PerSource({"a": skip_some, "b": SkipSome(never=True)})
    loader = ODBDataLoader(
        SourceMixerDataset(sources), token_budget=64, window=8, process_fn=processing, sharded=True
    )
    found = flat(ids(loader))
    kept = [index for index in KEPT if index < 40]
    assert found == sorted([*kept, *range(40)])
    assert sum(loader.skipped_samples.values()) == 40 - len(kept)


class SourceMixerDataset(torch.utils.data.IterableDataset):
    """Two sources as one iterable dataset."""

    def __init__(self, sources):
        self.sources = sources

    def __iter__(self):
        return iter(Loader(SourceMixer(self.sources)))
