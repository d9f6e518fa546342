"""Samples are left out by their keys: what the resume machine does not see of it."""

import json
from collections import Counter
from pathlib import Path

import pytest
from aligned_ranks import on_ranks
from rank_jobs import run_ranks
from torchdata.nodes import ParallelMapper, Prefetcher

from odb_nodes import (
    GroupCollator,
    IterableSource,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    StateError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.nodes.exclusions import ExcludedKeys

SIZE = 72
BUDGET = TokenBudget(64, oversize="drop")

pytestmark = pytest.mark.filterwarnings("ignore:.*(Further ones|were skipped)")


def text(index):
    """A sample; every 17th is skipped, and some exceed the budget; some labels are masked."""
    if index % 17 == 5:
        return Skipped("seventeenth")
    length = 90 if index in (40, 60) else 5 + index * 7 % 23
    labels = [-100 if (index + place) % 3 == 0 else 1 for place in range(length)]
    return {"input_ids": [1] * length, "labels": labels, "id": index}


def loader_of(data=range(SIZE), **options):
    return ODBDataLoader(
        data, **{"token_budget": BUDGET, "window": 8, "process_fn": text, **options}
    )


def taken(loader):
    return [pop_step_info(batch) for batch in loader]


def keys_of(steps):
    return [key for info in steps for key in info.keys]


def excluded_in(steps):
    return [one.key for info in steps for one in info.left_out if one.reason == "excluded"]


def alone(exclude=None, make_source=ShardedSampler, state="replay", above=lambda node: node):
    source = make_source(SIZE) if make_source is ShardedSampler else make_source(range(SIZE))
    node = LengthObserver(ParallelProcessor(source, text))
    bucketer = WindowBucketer(node, BUDGET, 8, state, exclude)
    return Loader(above(GroupCollator(bucketer)))


@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("make_source", [ShardedSampler, IterableSource])
def test_a_bucketer_needs_no_aligner(make_source, state):
    def above(node):
        return Prefetcher(node, 3)

    loader = alone(None, make_source, state, above)
    saved, steps = [loader.state_dict()], []
    for batch in loader:
        steps.append(pop_step_info(batch))
        saved.append(loader.state_dict())
    for at in range(0, len(saved), 4):
        excluded = {at, at + 7, 3 * at % SIZE}
        loader = alone(excluded, make_source, state, above)
        loader.load_state_dict(saved[at])
        batches, after = iter(loader), []
        for batch in batches:
            after.append(pop_step_info(batch))
            if len(after) == 2:  # and then nobody names them again
                later = loader.state_dict()
        rows = keys_of([*steps[:at], *after])
        rows += [one.key for info in [*steps[:at], *after] for one in info.left_out]
        assert sorted(rows) == [*range(SIZE)] or not after
        assert not {*keys_of(after)} & excluded
        if len(after) > 2:
            loader = alone(None, make_source, state, above)
            loader.load_state_dict(later)
            assert taken(loader) == after[2:]


@pytest.mark.parametrize(
    "above",
    [
        lambda node: Prefetcher(node, 3, snapshot_frequency=2),
        lambda node: ParallelMapper(node, dict, 1, prebatch=2),
    ],
)
def test_a_node_that_takes_batches_once_more_is_refused_above(above):
    alone(None, above=above)
    with pytest.raises(ValueError, match="`exclude` must be empty below a `.*` that takes items"):
        alone({3}, above=above)


def test_a_node_between_pool_and_aligner_may_hold_samples():
    def graph(exclude=None):
        node = LengthObserver(ParallelProcessor(ShardedSampler(SIZE), text))
        bucketer = WindowBucketer(node, BUDGET, 8, exclude=exclude)
        return Loader(GroupCollator(RankAligner(Prefetcher(bucketer, 2), accumulate=2)))

    assert 3 not in keys_of(taken(graph([3])))
    it = iter(loader := graph())
    for _ in range(4):
        next(it)
    resumed = graph([3])
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="its source must be the `WindowBucketer` itself"):
        iter(resumed)
    list(it)
    resumed.load_state_dict(loader.state_dict())
    assert 3 not in keys_of(taken(resumed))


# --- the loader -----------------------------------------------------------------------------------


def test_a_loader_counts_them_and_keeps_them_in_its_state():
    excluded = [*range(3, SIZE, 9)]
    loader = loader_of(exclude=excluded)
    next(iter(loader))
    state = loader.state_dict()
    loader = loader_of()
    loader.load_state_dict(state)
    taken(loader)
    for _ in range(2):
        assert sorted(excluded_in(taken(loader))) == excluded
        assert loader.excluded_samples == len(excluded)


def test_of_a_mixture_those_of_one_source_go_however_often_they_come():
    data = {"long": range(60), "short": range(7)}
    steps = taken(loader_of(data, weights=Mixing(stop="cycle"), exclude={"short": [3]}))
    rows = Counter(pair for info in steps for pair in zip(info.row_sources, info.keys, strict=True))
    assert rows["short", 4] > 3
    assert rows["long", 3] == 1
    assert not rows["short", 3]
    assert {*excluded_in(steps)} == {3}
    assert abs(len(excluded_in(steps)) - rows["short", 4]) <= 1


def test_a_file_names_keys_and_sources(tmp_path):
    path = tmp_path / "exclude.jsonl"
    lines = [17, {"source": "ocr", "key": 4, "reason": "NaN"}, {"key": 2**63 - 1}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    expected = ExcludedKeys({"": [17, 2**63 - 1], "ocr": [4]})
    for given in (path, str(path), expected, {"": iter([17, 2**63 - 1]), "ocr": {4}}):
        assert ExcludedKeys.of(given) == expected
    assert ExcludedKeys.from_state(expected.to_state()) == expected
    with pytest.warns(UserWarning, match="keys of source 'ocr', but `dataset` is no dict"):
        assert 17 not in keys_of(taken(loader_of(exclude=path)))
    path.write_text("\ufeff17\n" + json.dumps({"key": 4, "note": "a\u2028b"}, ensure_ascii=False))
    assert ExcludedKeys.of(path) == ExcludedKeys({"": [17, 4]})


REFUSALS = [
    (3, TypeError, "`exclude` must be integers, a mapping"),
    (b"x", TypeError, "`exclude` must be integers"),
    ([1, "x"], TypeError, r"`exclude\[1\]` must be an integer, but is 'x'"),
    ([True], TypeError, r"`exclude\[0\]` must be an integer, but is True"),
    ([-1], ValueError, r"`exclude\[0\]` must be in 0\.\.\d+, but is -1"),
    ([2**63], ValueError, r"`exclude\[0\]` must be in 0"),
    ({"ocr": [1.5]}, TypeError, r"`exclude\['ocr'\]\[0\]` must be an integer"),
    ({"ocr": 3}, TypeError, r"`exclude\['ocr'\]` must be integers"),
    ({3: [1]}, TypeError, "a source in `exclude` must be a string"),
    ("not-there.jsonl", ValueError, "'not-there.jsonl' cannot be read"),
]


@pytest.mark.parametrize(("exclude", "error", "rule"), REFUSALS)
def test_what_is_not_valid_is_named(exclude, error, rule):
    for make in (lambda: loader_of(exclude=exclude), lambda: alone(exclude)):
        with pytest.raises(error, match=rule):
            make()


@pytest.mark.parametrize("exclude", [[3], {"A": [3]}])
def test_keys_of_a_source_that_there_is_not_are_an_error(exclude):
    with pytest.raises(ValueError, match="`exclude` has keys of source .*, but the sources are"):
        loader_of({"a": range(9), "b": range(9)}, exclude=exclude)


@pytest.mark.parametrize(
    "line", ["x", '"x"', "1.5", "-1", "true", "{}", '{"key": "3"}', '{"source": 3, "key": 3}']
)
def test_a_line_that_is_not_valid_is_named(tmp_path, line):
    path = tmp_path / "exclude.jsonl"
    path.write_text(f"3\n\n{line}\n4\n")
    with pytest.raises(ValueError, match=r"^`exclude`, line 3 of '.*exclude.jsonl': must be a key"):
        loader_of(exclude=path)


def test_an_epoch_of_which_nothing_is_left_says_why():
    with pytest.raises(SampleError, match=f"`exclude` leaves out {SIZE} samples"):
        taken(loader_of(exclude=range(SIZE)))
    with pytest.raises(SampleError, match="all 4 samples of the epoch were left out: .*skipped"):
        taken(loader_of(exclude=set(range(SIZE)) - set(range(5, SIZE, 17))))


# --- what ranks must do alike ---------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 5])
def test_ranks_that_exclude_other_keys_are_an_error_on_all(steps):
    def run(exchange):
        loader = loader_of(process_group=exchange)
        for _ in zip(range(steps), loader, strict=False):
            pass
        other = loader_of(process_group=exchange, exclude=range(3 + exchange.rank))
        other.load_state_dict(loader.state_dict())
        with pytest.raises(StateError) as caught:
            taken(other)
        return str(caught.value)

    for message in on_ranks(2, run):
        assert '`exclude` is "[0, 1, 2]" on rank 0, "[0, 1, 2, 3]" on rank 1' in message
    assert repr(ExcludedKeys({"": range(9)})) != repr(ExcludedKeys({"": [*range(8), 9]}))


@pytest.mark.slow
def test_over_real_ranks_with_workers(tmp_path):
    body = """
        sys.path.append(sys.argv[1])
        import test_exclude as t
        import warnings
        warnings.simplefilter("ignore")
        options = {"num_workers": 2, "round_size": 4, "accumulate": 2}
        with t.loader_of(**options) as loader:
            it = iter(loader)
            before = [pop_step_info(next(it)) for _ in range(6)]
            state, rest = loader.state_dict(), [pop_step_info(batch) for batch in it]
        keys = {*rest[0].keys[:1], *before[0].keys[:1], *rest[-1].keys[:1]}
        excluded = {key for some in r.gathered(keys) for key in some}
        with t.loader_of(exclude=excluded, **options) as loader:
            loader.load_state_dict(state)
            after = t.taken(loader)
        ranks, befores = r.gathered(after), r.gathered(before)
        rows = [key for steps in (*ranks, *befores) for key in t.keys_of(steps)]
        out = [one.key for steps in (*ranks, *befores) for info in steps for one in info.left_out]
        assert sorted(rows + out) == [*range(t.SIZE)]
        gone = {key for steps in ranks for key in t.excluded_in(steps)}
        assert gone == excluded - {key for steps in befores for key in t.keys_of(steps)}
        assert sum(r.gathered(loader.excluded_samples)) == len(gone) >= 3
        r.finish(len(after))
    """
    steps = run_ranks(tmp_path, body, 2, Path(__file__).parent)
    assert steps[0] == steps[1] > 3
