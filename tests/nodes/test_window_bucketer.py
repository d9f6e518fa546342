import io
import pickle
import re
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import fewer
from torchdata.nodes import IterableWrapper, Mapper

from odb_nodes import (
    LengthObserver,
    Loader,
    Sample,
    SampleError,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes._core import progress
from odb_nodes.nodes.read_ahead import ReadAhead
from odb_nodes.testing import assert_resumes_exactly


def samples(lengths):
    return IterableWrapper([Sample(i, n, n - 1) for i, n in enumerate(lengths)])


def bucketer(lengths, budget=100, window=16, **options):
    node = WindowBucketer(samples(lengths), budget, window, **options)
    node.reset(None)
    return node


def ids(groups):
    return [[sample.data for sample in group] for group in groups]


LENGTHS = np.random.default_rng(1).integers(1, 60, 200).tolist()


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80),
    tokens=st.integers(40, 200),
    window=st.integers(1, 40),
    state=st.sampled_from(["replay", "payload"]),
    oversize=st.sampled_from(["alone", "drop"]),
    layout=st.sampled_from(["padded", "packed"]),
    every=st.integers(1, 5),
)
@pytest.mark.filterwarnings("ignore:.*exceeds.*")
@fewer(5)
def test_it_resumes_exactly_for_any_lengths(
    lengths, tokens, window, state, oversize, layout, every, sampled
):
    budget = TokenBudget(tokens, oversize=oversize, layout=layout)
    if oversize == "drop":
        lengths = [*lengths, 1]  # at least one group
    assert_resumes_exactly(
        lambda: WindowBucketer(samples(lengths), budget, window, state),
        every=every,
        **sampled(horizon=12, chain=1),
    )


@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "packed"},
        {"layout": "packed", "max_samples": 3, "pad_to_multiple_of": 8},
        {"layout": "packed", "shapes": 60},
        {"shapes": 6},
        {"attention_tokens": 100},
        {"row_sizes": "friendly"},
        {"layout": "packed", "attention_tokens": 100},
    ],
    ids=str,
)
def test_every_layout_resumes_exactly_at_every_step(fields, state, sampled):
    budget = TokenBudget(100, **fields)
    report = assert_resumes_exactly(
        lambda: WindowBucketer(samples(LENGTHS[:60]), budget, 16, state),
        **sampled(every=5, horizon=12, chain=0),
    )
    assert report.steps > 25


@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("window", [16, 64])
def test_it_resumes_exactly_amid_the_dearest_groups(layout, state, window, sampled):
    def make():
        return WindowBucketer(
            samples(LENGTHS[:60]), TokenBudget(100, layout=layout), window, state, dearest_first=5
        )

    assert_resumes_exactly(make, **sampled(every=5, horizon=12, chain=1))
    longest = [max(sample.tokens for sample in group) for group in make()]
    assert longest[0] == max(LENGTHS[: min(window, 60)])
    assert window == 16 or longest[:5] == sorted(longest[:5], reverse=True)  # not refilled


def test_a_run_that_goes_on_with_dearest_first_begins_with_them():
    loader = Loader(bucketer(LENGTHS))
    steps = iter(loader)
    for _ in range(5):
        next(steps)
    again = WindowBucketer(samples(LENGTHS), 100, 16, dearest_first=1)
    changed = Loader(again)
    changed.load_state_dict(loader.state_dict(), strict=False)
    with pytest.warns(UserWarning, match="`dearest_first` was 'absent' when saved, but is 1 now"):
        rest = list(changed)
    assert max(one.tokens for one in rest[0]) >= max(one.tokens for one in next(steps))


def test_a_replay_takes_at_most_five_and_a_quarter_windows_and_says_how_many():
    # A rare long sample stays as long as it may.
    lengths = [400 if i % 301 == 0 else 1 + i % 50 for i in range(3000)]
    node, window = bucketer(lengths, 800, 64), 64
    most = 0
    for _ in node:
        again = WindowBucketer(samples(lengths), 800, window)
        again.reset(node.state_dict())
        most = max(most, again.replayed_samples)
    assert window < most <= 5.25 * window


@pytest.mark.parametrize("window", [256, 8192])
def test_a_state_takes_few_bytes_per_pooled_sample(window):
    lengths = np.random.default_rng(0).integers(1, 4000, 3 * window).tolist()
    node = bucketer(lengths, 16384, window)
    for _ in range(20):
        next(node)
    state = node.state_dict()
    own = len(pickle.dumps({**state, "source": None}))
    assert own <= 32 * len(node._pool)


def test_the_state_right_after_a_reset_is_the_state_of_the_reset():
    for mode in ("replay", "payload"):
        node = bucketer(LENGTHS, state=mode)
        for _ in range(9):
            next(node)
        state = node.state_dict()
        again = WindowBucketer(samples(LENGTHS), 100, 16, mode)
        again.reset(state)
        assert again.state_dict() == state


def test_a_state_shares_nothing_with_the_node():
    for mode in ("replay", "payload"):
        node = bucketer(LENGTHS, state=mode)
        next(node)
        state = node.state_dict()
        kept = pickle.loads(pickle.dumps(state))
        rest = ids(node)
        assert state == kept
        again = WindowBucketer(samples(LENGTHS), 100, 16, mode)
        again.reset(state)
        state["source"].clear()
        state["config"].clear()
        assert ids(again) == rest


def test_source_that_mutates_what_it_is_given_is_kept_at_arms_length():
    class Adopting(IterableWrapper):  # as torchdata's MultiNodeWeightedSampler does
        def reset(self, initial_state=None):
            super().reset(initial_state)
            if initial_state is not None:
                initial_state.clear()

        def get_state(self):
            self.live = super().get_state()
            return self.live

        def next(self):
            if hasattr(self, "live"):
                self.live.clear()
            return super().next()

    def make():
        return WindowBucketer(Adopting(list(samples(LENGTHS[:60]).iterable)), 100, 16)

    assert_resumes_exactly(make)


def test_processing_that_is_not_deterministic_is_an_error_that_names_the_remedy():
    draws = iter(np.random.default_rng(0).integers(1, 50, 10_000).tolist())

    def make(mode):
        processed = Mapper(ShardedSampler(100, rank=0, world_size=1), lambda _: next(draws))
        return WindowBucketer(LengthObserver(processed, int), 100, 16, mode)

    node = make("replay")
    node.reset(None)
    next(node)
    with pytest.raises(
        StateError, match=r"sample \d+ of the epoch had .* not seeded \(seed it.*payload"
    ):
        make("replay").reset(node.state_dict())

    node = make("payload")
    node.reset(None)
    first = [len(next(node)) for _ in range(5)]
    pooled = list(node._pool.items().values())
    again = make("payload")
    again.reset(node.state_dict())
    assert list(again._pool.items().values()) == pooled
    assert sum(first) + sum(map(len, again)) == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-5], "the source ended before sample 19"),
        (lambda data: data + data[:5], "had ended after 200 samples .* but has more now"),
        (lambda data: [n + 1 for n in data], r"had \d+ tokens when saved"),
    ],
)
def test_data_that_changed_under_a_state_is_an_error(change, message):
    node = bucketer(LENGTHS)
    while not node.state_dict()["ended"]:
        next(node)
    state = node.state_dict()
    with pytest.raises(StateError, match=message):
        WindowBucketer(samples(change(LENGTHS)), 100, 16).reset(state)


def test_oversize_alone_gives_a_warning_a_summary_and_a_count():
    with pytest.warns(UserWarning, match="sample 1 of the epoch, with 300 tokens .* own") as caught:
        node = bucketer([5, 300, 5, 200, 5])
        groups = ids(node)
    assert len(caught) == 2  # the first sample, and the summary of the epoch
    assert sorted(groups) == [[0, 2, 4], [1], [3]]
    assert (node.oversize_samples, node.dropped_samples) == (2, 0)


def test_oversize_drop_gives_a_warning_a_summary_and_a_count_that_the_state_keeps():
    with pytest.warns(UserWarning, match="dropped") as caught:
        node = bucketer([300, 5, 5, 200, 5], TokenBudget(100, oversize="drop"))
        next(node)
    assert len(caught) == 2
    assert (node.oversize_samples, node.dropped_samples) == (2, 2)
    again = bucketer([300, 5, 5, 200, 5], TokenBudget(100, oversize="drop"))
    again.reset(node.state_dict())
    assert (again.oversize_samples, again.dropped_samples) == (2, 2)


@pytest.mark.parametrize("mode", ["replay", "payload"])
@pytest.mark.filterwarnings("ignore:.*exceeds.*")
def test_an_epoch_whose_samples_were_all_dropped_is_an_error(mode):
    lengths, budget = [200] * 50, TokenBudget(100, oversize="drop")
    node = bucketer(lengths, budget, state=mode)
    before = node.state_dict()
    for _ in range(2):
        with pytest.raises(SampleError, match=r"all 50 samples .*TokenBudget\(tokens=100.*dropped"):
            next(node)
        after = node.state_dict()
        for state in (before, after, None):  # resumed, and in the next epoch
            again = bucketer(lengths, budget, state=mode)
            again.reset(state)
            with pytest.raises(SampleError, match="all 50 samples"):
                next(again)
    assert sum(map(len, bucketer([*lengths, 5], budget))) == 1
    assert list(bucketer([], budget)) == []


def test_oversize_error_names_the_sample_and_loses_nothing():
    lengths = [5] * 30 + [300] + [5] * 30
    node = bucketer(lengths, TokenBudget(100, oversize="error"))
    groups = []
    with pytest.raises(SampleError, match="sample 30 of the epoch, with 300 tokens"):
        for group in node:
            groups.append(group)
    with pytest.raises(SampleError, match="sample 30"):
        next(node)
    mended = WindowBucketer(samples([min(n, 50) for n in lengths]), node._budget, 16)
    mended.reset(node.state_dict())
    seen = ids(groups) + ids(mended)
    assert sorted(i for group in seen for i in group) == list(range(61))


@pytest.mark.parametrize("mode", ["replay", "payload"])
def test_a_source_that_raises_in_the_middle_loses_nothing(mode):
    class Breaking(IterableWrapper):
        broken = True

        def next(self):
            item = super().next()
            if item.data == 50 and self.broken:
                raise OSError("disk")
            return item

    def make(broken):
        node = WindowBucketer(Breaking(list(samples(LENGTHS).iterable)), 100, 16, mode)
        node.source.broken = broken
        return node

    node, groups = make(True), []
    node.reset(None)
    with pytest.raises(OSError, match="disk"):
        for group in node:
            groups.append(group)
    with pytest.raises(OSError, match="disk"):
        next(node)
    state = node.state_dict()
    mended = make(False)
    mended.reset(state)
    reference = make(False)
    reference.reset(None)
    assert ids(groups) + ids(mended) == ids(reference)


def test_what_is_no_sample_is_refused():
    node = WindowBucketer(IterableWrapper([1]), 100)
    node.reset(None)
    with pytest.raises(SampleError, match="must yield `Sample`, but yielded `int`"):
        next(node)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "`budget`"),
        ({"window": 0}, "`window`"),
        ({"window": 2.5}, "`window`"),
        ({"dearest_first": -1}, "`dearest_first`"),
        ({"diversity": -0.1}, r"`diversity` must be in 0\.\.1, but is -0.1"),
        ({"diversity": 1.1}, r"`diversity` must be in 0\.\.1, but is 1.1"),
        ({"diversity": float("nan")}, r"`diversity` must be in 0\.\.1, but is nan"),
        ({"diversity": "0.5"}, r"`diversity` must be a number in 0\.\.1, but is '0.5'"),
        ({"diversity": True}, r"`diversity` must be a number in 0\.\.1, but is True"),
        ({"state": "pickle"}, "`state`"),
    ],
)
def test_arguments_that_are_not_valid_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        WindowBucketer(samples([1]), **{"budget": 10, **options})


def test_a_payload_holds_what_torch_can_load_safely():
    data = {"ids": np.arange(3, dtype=np.uint16), "x": [torch.ones(2), ("a", None, 1.5, True)]}
    data |= {"none": np.zeros((0, 2)), "bytes": b"", "scalar": np.float32(2), 3: np.array(7)}
    node = WindowBucketer(IterableWrapper([Sample(data, 2, 1)] * 3), 2, 4, "payload")
    node.reset(None)
    next(node)
    buffer = io.BytesIO()
    torch.save(node.state_dict(), buffer)
    buffer.seek(0)
    again = WindowBucketer(IterableWrapper([Sample(data, 2, 1)] * 3), 2, 4, "payload")
    again.reset(torch.load(buffer, weights_only=True))
    back = next(again)[0].data
    assert list(back) == list(data)
    for key in ("ids", "none", 3):
        assert back[key].dtype == data[key].dtype
        assert back[key].shape == data[key].shape
        assert back[key].tolist() == data[key].tolist()
    assert (back["bytes"], back["scalar"], type(back["scalar"])) == (b"", 2.0, np.float32)
    assert back["x"][0].tolist() == [1, 1]
    assert back["x"][1] == ("a", None, 1.5, True)


class NotPlain(torch.Tensor):
    """As the images of torchvision: `torch.load` refuses it."""


@pytest.mark.parametrize("data", [object(), torch.ones(2).as_subclass(NotPlain)])
def test_a_payload_that_cannot_be_plain_data_is_an_error(data):
    node = WindowBucketer(IterableWrapper([Sample(data, 2, 1)] * 3), 2, 4, "payload")
    node.reset(None)
    next(node)
    with pytest.raises(SampleError, match=f"cannot hold `{type(data).__name__}`"):
        node.state_dict()


def warnings_of(node, epochs=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            node.reset(None)
            list(node)
    return [str(one.message) for one in caught]


def lognormal(count):
    draws = np.random.default_rng(0).lognormal(4, 0.8, count)
    return [int(length) + 1 for length in draws]


def test_a_pool_too_small_for_the_budget_is_told_of_with_a_window_that_does():
    def bucketer(window, budget=16_384):
        return WindowBucketer(samples(lognormal(8000)), budget, window)

    (message,) = warnings_of(bucketer(64), epochs=2)
    assert "of the tokens of the first 16 batches are padding" in message
    window = int(re.search(r"Raise it to `window=(\d+)`", message)[1])
    assert 1000 < window < 8000
    assert warnings_of(bucketer(window)) == []
    assert warnings_of(bucketer(256, 1900)) == []
    assert warnings_of(bucketer(64, TokenBudget(16_384, max_samples=4))) == []
    assert warnings_of(bucketer(64, TokenBudget(16_384, layout="packed"))) == []


def test_a_pool_is_large_enough_where_its_samples_fill_budgets_with_what_attention_adds():
    def said(window, **fields):
        lengths = [min(length, 150) for length in lognormal(3000)]
        return warnings_of(WindowBucketer(samples(lengths), TokenBudget(4000, **fields), window))

    windows = []
    for fields in ({}, {"attention_tokens": 20}):
        (message,) = said(16, **fields)
        windows.append(int(re.search(r"Raise it to `window=(\d+)`", message)[1]))
        assert said(windows[-1], **fields) == []
    assert 4 * windows[1] < windows[0]


def test_an_auto_window_is_told_of_where_the_most_samples_are_too_few():
    lengths = [1 + length // 8 for length in lognormal(30_000)]
    (message,) = warnings_of(WindowBucketer(samples(lengths), 12_000), epochs=2)
    assert "the pool of 4096 samples" in message
    enough = int(re.search(r"Raise it to `window=(\d+)`", message)[1])
    assert 4096 < enough < 40_000
    assert warnings_of(WindowBucketer(samples(lengths), 2000)) == []


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("state", ["replay", "payload"])
def test_alone_it_chooses_its_window_after_the_first_group(layout, state, sampled):
    lengths = [1 + min(length, 300) // 4 for length in lognormal(400)]
    budget = TokenBudget(100, layout=layout)

    def make():
        return Loader(WindowBucketer(samples(lengths), budget, state=state))

    assert_resumes_exactly(make, epochs=2, **sampled(every=7, horizon=10, chain=1))
    loader = make()
    pulled, windows = [], []
    for _ in loader:
        pulled.append(loader.root.pulled_samples)
        windows.append(loader.root.window.samples)
    assert windows[0] == pulled[0] == 128
    assert pulled[1] > windows[1] == windows[-1] > 128
    assert windows[1] == round(32 * 100 * 128 / sum(lengths[:128]))
    next(iter(loader))
    assert loader.root.pulled_samples == windows[-1]  # the next epoch begins with it


def test_alone_it_begins_an_epoch_by_the_one_before_even_if_that_had_one_group():
    lengths = [1 + length // 3 for length in LENGTHS * 3]

    def make():
        return Loader(ReadAhead(WindowBucketer(samples(lengths), 100), 4))

    loader = make()
    next(iter(loader))  # the thread has read some more
    loader.set_epoch(1)
    left = loader.state_dict()
    expected = ids(loader)
    resumed = make()
    resumed.load_state_dict(left)
    assert ids(resumed) == expected


def test_no_pooled_sample_gets_older_than_5_windows_while_the_window_grows():
    lengths = [100, *[10] * 3000]
    node = bucketer(lengths, budget=100, window="auto")
    for group in node:
        age = node.pulled_samples - min(sample.data for sample in group)
        assert age <= 5 * node.window.samples


@pytest.mark.parametrize("oversize", ["alone", "drop"])
def test_an_epoch_ends_with_a_summary_of_samples_that_are_too_large(oversize):
    lengths = [90, 10, 10, 95, 10, 99, 10]
    node = WindowBucketer(samples(lengths), TokenBudget(64, oversize=oversize), 4)
    first, summary = warnings_of(node, epochs=1)
    assert "sample 0 of the epoch" in first
    assert summary.startswith("of the 7 samples of the epoch, 3 exceed")
    assert ("dropped" in summary) == (oversize == "drop")


def test_one_sample_that_is_too_large_needs_no_summary():
    assert len(warnings_of(WindowBucketer(samples([90, 10, 10]), 64, 4), epochs=1)) == 1


def test_a_summary_that_is_that_of_the_epoch_before_is_not_repeated():
    messages = warnings_of(WindowBucketer(samples([90, 95, 10, 10]), 64, 4), epochs=3)
    assert sum("of the 4 samples" in one for one in messages) == 1


def slow_bucketer():
    def slow(sample):
        time.sleep(0.01)
        return sample

    node = WindowBucketer(Mapper(samples(LENGTHS), slow), 100, 40)
    node.reset(None)
    return node


@pytest.mark.slow
def test_a_long_fill_of_the_pool_says_how_far_it_is_and_no_later_one_does(monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    node = slow_bucketer()
    next(node)
    filling = r"samples in the pool before the first batch: \d+ of 40 after 0 s"
    assert re.fullmatch(filling, caplog.messages[0])
    said = len(caplog.messages)
    assert said <= 3
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    list(node)
    assert len(caplog.messages) == said


def test_a_long_replay_says_how_far_it_is(monkeypatch, caplog):
    node = slow_bucketer()
    next(node)
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    node.reset(node.state_dict())
    replaying = r"samples made again to restore a state: \d+ of 40 after 0 s"
    assert re.fullmatch(replaying, caplog.messages[0])
    assert len(caplog.messages) <= 3
