"""Several datasets in one `ODBDataLoader`: by weight, each with processing of its own."""

from collections import Counter
from pathlib import Path

import pytest
from mixed_sources import (
    FUNCTIONS,
    SIZES,
    WEIGHTS,
    chat,
    encode,
    make,
    mixture,
    ocr,
    rows,
    write_chats,
)
from torch.utils.data import DataLoader

from odb_nodes import (
    JsonlSource,
    Mixing,
    ODBDataLoader,
    SampleError,
    ShardedSampler,
    SourceCount,
    SourceMixer,
    StateError,
    TokenBudget,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.testing import assert_resumes_exactly


@pytest.fixture
def datasets(tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl")
    return lambda: mixture(chats)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_every_step_resumes(datasets, by, stop, sampled):
    mixing = Mixing(weights=WEIGHTS, by=by, stop=stop)
    less = sampled(every=3, horizon=8, chain=1)
    assert_resumes_exactly(lambda: make(datasets, weights=mixing), **less)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"state": "payload"}], ids=str)
def test_every_step_resumes_with(datasets, options, sampled):
    assert_resumes_exactly(lambda: make(datasets, **options), **sampled(horizon=8, chain=1))


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_random_templates_are_those_of_any_number_of_workers(datasets, by, num_workers):
    mixing = Mixing(weights=WEIGHTS, by=by)
    with make(datasets, weights=mixing) as inline:
        expected = [rows(inline), rows(inline)]
    assert expected[0] != expected[1]
    workers = WorkerOptions(num_workers=num_workers, chunk_size=4)
    with make(datasets, weights=mixing, workers=workers) as parallel:
        assert [rows(parallel), rows(parallel)] == expected


def test_random_templates_resume_among_workers(datasets):
    workers = WorkerOptions(num_workers=2, chunk_size=4)
    with make(datasets, workers=workers) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
        expected = rows(iterator)
    with make(datasets) as resumed:
        resumed.load_state_dict(state)
        assert rows(resumed) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_every_sample_of_every_source_is_counted_once(datasets, by, num_workers):
    with make(datasets, weights=Mixing(by=by), num_workers=num_workers) as loader:
        samples, tokens = Counter(), Counter()
        for batch in loader:
            info = pop_step_info(batch)
            assert sum(count.samples for count in info.local_sources.values()) == info.local_samples
            real = int(batch["attention_mask"].sum())
            assert sum(count.tokens for count in info.local_sources.values()) == real
            for name, count in info.local_sources.items():
                samples[name] += count.samples
                tokens[name] += count.tokens
        assert samples == SIZES
        assert all(tokens[name] > samples[name] for name in samples)


def test_the_length_of_an_epoch_is_known_where_that_of_each_dataset_is(datasets):
    sized = {"a": [1] * 30, "b": [1] * 12}
    assert make(lambda: sized, weights=None, process_fn=None).num_samples == 42
    with pytest.raises(TypeError):
        _ = make(datasets).num_samples
    with pytest.raises(TypeError, match='where `stop` is "cycle"'):
        mixing = Mixing(stop="cycle")
        _ = make(lambda: sized, weights=mixing, process_fn=None).num_samples


def test_one_function_may_serve_all():
    loader = ODBDataLoader(
        {"a": ["x y"] * 3, "b": ["z"] * 5}, token_budget=24, window=8, process_fn=encode
    )
    counts = [pop_step_info(batch).local_sources for batch in loader]
    assert [count["a"] for count in counts if "a" in count] == [SourceCount(3, 9)]
    assert [count["b"] for count in counts if "b" in count] == [SourceCount(5, 5)]


def test_a_single_dataset_has_no_sources():
    loader = ODBDataLoader([{"input_ids": [1, 2]}], token_budget=8)
    assert [pop_step_info(batch).local_sources for batch in loader] == [{}]


def test_a_dict_with_other_keys_is_one_dataset():
    items = {n: {"input_ids": [n] * 3} for n in range(4)}
    (batch,) = ODBDataLoader(items, token_budget=100)
    assert len(batch["input_ids"]) == 4
    assert pop_step_info(batch).local_sources == {}


def test_a_source_node_is_a_dataset(tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", 9)
    loader = ODBDataLoader(JsonlSource(path), token_budget=400, process_fn=chat)
    assert sum(pop_step_info(batch).local_samples for batch in loader) == 9
    node = SourceMixer({"chat": JsonlSource(path)})
    with pytest.raises(ValueError, match=r"must not be given for a node \(`SourceMixer`\)"):
        ODBDataLoader(node, token_budget=400, shuffle=True)
    with pytest.raises(ValueError, match=r"must not be given for a node \(`JsonlSource`\)"):
        ODBDataLoader(JsonlSource(path), token_budget=400, sampler=[0])


def test_a_file_may_be_in_many_loaders_and_under_many_names(tmp_path):
    file = JsonlSource(write_chats(tmp_path / "chats.jsonl", 60))
    loaders = [
        ODBDataLoader({"a": file, "b": file}, token_budget=400, window=8, process_fn=chat)
        for _ in range(2)
    ]
    found = [0, 0]
    for batches in zip(*loaders, strict=True):
        for index, batch in enumerate(batches):
            found[index] += pop_step_info(batch).local_samples
    assert found == [120, 120]


class Chats(JsonlSource):
    """A source with arguments of its own."""

    def __init__(self, *, folder):
        super().__init__(folder / "chats.jsonl")


def test_a_source_with_arguments_of_its_own_may_be_in_many_loaders_too(tmp_path):
    write_chats(tmp_path / "chats.jsonl", 20)
    file = Chats(folder=tmp_path)
    options = {"token_budget": 400, "window": 8, "process_fn": chat}
    began, other = (ODBDataLoader(file, **options) for _ in range(2))
    next(iter(began))
    assert sum(pop_step_info(batch).local_samples for batch in other) == 20
    began.close()


def test_a_node_that_shares_its_items_is_refused_where_each_rank_has_data_of_its_own(tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", 9)
    own = {"token_budget": 400, "process_fn": chat, "sharded": True}
    with pytest.raises(
        ValueError, match="`JsonlSource` yields those of one of 2 ranks.*world_size=1"
    ):
        ODBDataLoader(JsonlSource(path, 0, 2), **own)
    with pytest.raises(ValueError, match="source 'a': `dataset` must yield all of its items"):
        ODBDataLoader({"a": JsonlSource(path, 1, 2)}, **own)
    assert sum(len(batch["input_ids"]) for batch in ODBDataLoader(JsonlSource(path), **own)) == 9


@pytest.mark.parametrize("oversize", ["alone", "error"])
def test_what_is_said_of_a_sample_that_is_too_large_names_its_source_and_the_limit(oversize):
    data = {"a": ["x"] * 3, "b": ["y" * 30]}
    budget = TokenBudget(20, pad_to_multiple_of=8, oversize=oversize)
    loader = ODBDataLoader(data, token_budget=budget, process_fn=encode)
    said = r"\(source 'b', key 0\), with 30 tokens .*: `tokens` is 20, in multiples of 8 16\."
    alone = oversize == "alone"
    with pytest.warns(match=said) if alone else pytest.raises(SampleError, match=said):
        list(loader)


def cut_labels(text):
    return {**encode(text), "labels": [1]}


def no_labels(text):
    return {"input_ids": encode(text)["input_ids"], "id": text}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            cut_labels,
            r"sample 0 of source 'b'.* `labels` must have the length of `input_ids` \(3\)",
        ),
        (
            no_labels,
            r"a sample \(source 'b', key 0\), `id` 'yyy': .* the same keys, .* also has",
        ),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_cannot_be_collated_name_their_source(function, message, num_workers):
    data, functions = {"a": ["x"] * 20, "b": ["yyy"]}, {"a": encode, "b": function}
    options = {"token_budget": 64, "process_fn": functions, "num_workers": num_workers}
    with ODBDataLoader(data, shuffle=False, **options) as loader:
        with pytest.raises(SampleError, match=message):
            list(loader)


def broken_ocr(pair):
    if pair[0][0] == 7:
        raise OSError("not there")
    return ocr(pair)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_an_error_of_processing_names_source_and_sample(datasets, by, num_workers):
    functions = {**FUNCTIONS, "ocr": broken_ocr}
    mixing = Mixing(weights=WEIGHTS, by=by)
    place = {"samples": "sample 7 of source 'ocr'", "tokens": "source 'ocr': .*sample 7 of epoch"}
    where = rf"{place[by]}.*OSError: not there"
    with (
        make(datasets, process_fn=functions, weights=mixing, num_workers=num_workers) as loader,
        pytest.raises(SampleError, match=where),
    ):
        list(loader)


def broken_chat(record):
    if "since 11" in record["answer"]:
        raise KeyError("role")
    return chat(record)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_processing_names_file_and_line(datasets, num_workers):
    functions = {**FUNCTIONS, "chat": broken_chat}
    where = r"sample \d+ of source 'chat', line 12 of .*chats.jsonl.*KeyError: 'role'"
    with make(datasets, process_fn=functions, num_workers=num_workers) as loader:
        with pytest.raises(SampleError, match=where):
            list(loader)


def test_a_sample_without_a_length_names_its_source(datasets):
    functions = {**FUNCTIONS, "ocr": None}
    with pytest.raises(SampleError, match="source 'ocr'.*a sample has no length"):
        list(make(datasets, process_fn=functions))


def test_an_order_of_its_own_for_each_source():
    same = [{"input_ids": [n + 1]} for n in range(50)]
    loader = ODBDataLoader({"a": same, "b": same}, token_budget=1, window=1)
    order = {"a": [], "b": []}
    for batch in loader:
        (name,) = pop_step_info(batch).local_sources
        order[name].append(batch["input_ids"].item())
    assert sorted(order["a"]) == sorted(order["b"]) == list(range(1, 51))
    assert order["a"] != order["b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {**WEIGHTS, "ocr": 0.3}}, "`weights` was"),
        ({"weights": Mixing(weights=WEIGHTS, stop="cycle")}, "`stop` was"),
        ({"process_fn": {**FUNCTIONS, "ocr": broken_ocr}}, "`process_fn` was"),
    ],
)
def test_another_mixture_is_refused(datasets, change, message):
    state = make(datasets).state_dict()
    changed = make(datasets, **change)
    changed.load_state_dict(state)
    with pytest.raises(StateError, match=message):
        iter(changed)


class Splits(dict):
    """As some libraries return the parts of a dataset."""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": {"a": 1}}, ValueError, "`weights` must have the names of `sources`"),
        ({"weights": 3}, TypeError, "`weights` must be a dict by name"),
        (
            {"process_fn": {"a": encode}},
            ValueError,
            "`process_fn` must have the names of `dataset`",
        ),
        ({"process_fn": {"a": encode, "b": 3}}, TypeError, r"`process_fn\['b'\]` must be a func"),
        ({"sampler": [1]}, ValueError, "`sampler` must be None where `dataset` is a dict"),
        ({"dataset": {"a": [1], "b": []}}, ValueError, "source 'b': `dataset` must have at least"),
        ({"dataset": {"a": [1], "b": 3}}, TypeError, "source 'b': `dataset` must be an iterable"),
        (
            {"dataset": {"a": [1], "b": "b.jsonl"}},
            TypeError,
            r"but is 'b.jsonl'.*JsonlSource\(path\)",
        ),
        ({"dataset": DataLoader([1])}, TypeError, r"`ODBDataLoader.from_dataloader\(loader"),
        ({"dataset": Path("a.jsonl")}, TypeError, r"For the records .* `JsonlSource\(path\)`"),
        ({"dataset": Splits(a=[1], b=[1])}, TypeError, r"a `Splits` of \['a', 'b'\]\. Pass one"),
        ({"dataset": [1], "weights": {"a": 1}}, ValueError, "`weights` must be None, unless"),
        ({"dataset": [1], "process_fn": {"a": encode}}, TypeError, "`process_fn` must be a func"),
        ({"dataset": {}}, ValueError, "`dataset` must have at least 1 sample"),
    ],
)
def test_arguments_that_are_not_valid_are_named(options, error, message):
    given = {"dataset": {"a": ["x"], "b": ["y"]}, "token_budget": 10, **options}
    with pytest.raises(error, match=message):
        ODBDataLoader(**given)


def test_shares_in_proportion_to_the_sizes_of_datasets(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"input_ids": [3]}\n' * 50)
    data = {
        "a": [{"input_ids": [1]}] * 100,
        "b": [{"input_ids": [2]}] * 300,
        "c": JsonlSource(path),
    }
    loader = ODBDataLoader(data, weights="proportional", token_budget=45, window=9)
    counts = Counter()
    for step, batch in enumerate(loader, 1):
        for name, count in pop_step_info(batch).local_sources.items():
            counts[name] += count.samples
        if step % 3 == 0:
            total = sum(counts.values())
            assert counts["b"] / total == pytest.approx(300 / 450, abs=12 / total)
    assert counts == {"a": 100, "b": 300, "c": 50}


class Stream:
    def __iter__(self):
        yield {"input_ids": [1]}


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([{"input_ids": [1]}], {"sharded": True}, ValueError, "`sharded` False. Pass weights"),
        (Stream(), {}, TypeError, "source 'a': .* has no len.*pass weights"),
        (ShardedSampler(4), {}, TypeError, "which a node does not tell"),
    ],
)
def test_shares_in_proportion_to_unknown_sizes_are_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        ODBDataLoader({"a": data}, weights="proportional", token_budget=9, **options)
