"""Several datasets in one `ODBDataLoader`: by weight, each with processing of its own."""

from collections import Counter

import numpy as np
import pytest
from mixed_sources import (
    FUNCTIONS,
    WEIGHTS,
    chat,
    encode,
    make,
    mixture,
    ocr,
    rows,
    write_chats,
)

from odb_nodes import (
    IterableSource,
    JsonlSource,
    LengthObserver,
    Mixing,
    Observation,
    ODBDataLoader,
    SampleError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)


@pytest.fixture
def datasets(tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl")
    return lambda: mixture(chats)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_random_templates_are_those_of_any_number_of_workers(datasets, by):
    mixing = Mixing(weights=WEIGHTS, by=by)
    inline = make(datasets, weights=mixing)
    expected = [rows(inline), rows(inline)]
    assert expected[0] != expected[1]
    workers = WorkerOptions(num_workers=2, chunk_size=4)
    with make(datasets, weights=mixing, workers=workers) as parallel:
        assert [rows(parallel), rows(parallel)] == expected


def test_the_length_of_an_epoch_is_known_where_that_of_each_dataset_is(datasets):
    sized = {"a": [1] * 30, "b": [1] * 12}
    assert make(lambda: sized, weights=None, process_fn=None).num_samples == 42
    with pytest.raises(TypeError):
        _ = make(datasets).num_samples
    with pytest.raises(TypeError, match='where `stop` is "cycle"'):
        _ = make(lambda: sized, weights=Mixing(stop="cycle"), process_fn=None).num_samples


class Chats(JsonlSource):
    """A source with arguments of its own."""

    def __init__(self, *, folder):
        super().__init__(folder / "chats.jsonl")


def test_a_source_may_be_in_many_loaders_and_under_many_names(tmp_path):
    file = JsonlSource(write_chats(tmp_path / "chats.jsonl", 20))
    given = {"token_budget": 400, "window": 8, "process_fn": chat}
    for data, size in (({"a": file, "b": file}, 40), (file, 20), (Chats(folder=tmp_path), 20)):
        loaders = [ODBDataLoader(data, **given) for _ in range(2)]
        both = [
            [pop_step_info(batch) for batch in batches] for batches in zip(*loaders, strict=True)
        ]
        assert sum(info.local_samples for info, _ in both) == size
        assert all(one == other for one, other in both)


def test_each_source_has_an_order_of_its_own():
    same = [{"input_ids": [n + 1]} for n in range(50)]
    order = {"a": [], "b": []}
    for batch in ODBDataLoader({"a": same, "b": same}, token_budget=1, window=1):
        (name,) = pop_step_info(batch).local_sources
        order[name].append(batch["input_ids"].item())
    assert sorted(order["a"]) == sorted(order["b"]) == list(range(1, 51))
    assert order["a"] != order["b"]


def test_shares_in_proportion_to_the_sizes_of_datasets(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"input_ids": [3]}\n' * 50)
    data = {"a": [{"input_ids": [1]}] * 100, "b": [{"input_ids": [2]}] * 300}
    loader = ODBDataLoader(
        {**data, "c": JsonlSource(path)}, weights="proportional", token_budget=45, window=9
    )
    counts = Counter()
    for step, batch in enumerate(loader, 1):
        sources = pop_step_info(batch).local_sources
        counts.update({name: count.samples for name, count in sources.items()})
        if step % 3 == 0:
            total = sum(counts.values())
            assert counts["b"] / total == pytest.approx(300 / 450, abs=12 / total)
    assert counts == {"a": 100, "b": 300, "c": 50}


# Errors name the source, and the sample or the line.


@pytest.mark.parametrize("oversize", ["alone", "error"])
@pytest.mark.filterwarnings("ignore:no token of:UserWarning")
def test_what_is_said_of_a_sample_that_is_too_large_names_its_source_and_the_limit(oversize):
    data = {"a": ["x y"] * 3, "b": ["y" * 30]}
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


def broken_ocr(pair):
    if pair[0][0] == 7:
        raise OSError("not there")
    return ocr(pair)


def broken_chat(record):
    if "since 11" in record["answer"]:
        raise KeyError("role")
    return chat(record)


def short(function):
    return {"a": ["x"] * 9, "b": ["yyy"]}, {"a": encode, "b": function}


FAULTS = {
    "labels": (*short(cut_labels), r"sample 0 of source 'b'.*`labels` must have the length"),
    "keys": (*short(no_labels), r"\(source 'b', key 0\), `id` 'yyy': .* also has"),
    "no length": (None, {"ocr": None}, "source 'ocr'.*a sample has no length"),
    "sample": (None, {"ocr": broken_ocr}, "sample 7 of source 'ocr'.*OSError: not there"),
    "line": (
        None,
        {"chat": broken_chat},
        r"sample \d+ of source 'chat', line 12 of .*chats.jsonl.*KeyError: 'role'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_source_and_sample(datasets, fault, num_workers):
    data, functions, message = FAULTS[fault]
    if data is None:
        loader = make(datasets, process_fn={**FUNCTIONS, **functions}, num_workers=num_workers)
    else:
        given = {"token_budget": 64, "process_fn": functions, "num_workers": num_workers}
        loader = ODBDataLoader(data, shuffle=False, **given)
    with loader, pytest.raises(SampleError, match=message):
        list(loader)


def test_where_shares_are_of_tokens_too(datasets):
    functions = {**FUNCTIONS, "ocr": broken_ocr}
    mixing = Mixing(weights=WEIGHTS, by="tokens")
    with pytest.raises(SampleError, match="source 'ocr': .*sample 7 of epoch.*not there"):
        list(make(datasets, process_fn=functions, weights=mixing))


# Batches that mix tasks more evenly.


def test_a_task_that_is_observed_counts_like_a_source():
    lengths = np.random.default_rng(0).integers(4, 30, 200).tolist()
    items = [(tokens, "ab"[n % 3 == 0]) for n, tokens in enumerate(lengths)]

    def groups(names, **options):
        source = IterableSource([(tokens, names[task]) for tokens, task in items])
        observed = LengthObserver(source, lambda item: Observation(item[0], task=item[1]))
        bucketer = WindowBucketer(observed, 128, 16, **options)
        return [[sample.data[0] for sample in group] for group in bucketer]

    mixed = groups({"a": "a", "b": "b"}, diversity=0.5)
    assert groups({"a": "z", "b": "y"}, diversity=0.5) == mixed
    assert groups({"a": "a", "b": "b"}) != mixed


def test_samples_without_a_task_are_refused():
    loader = ODBDataLoader([{"input_ids": [1, 2]}] * 8, token_budget=99, diversity=0.5)
    with pytest.raises(SampleError, match=r"`diversity` must be 0 .* sample \(key \d\) has none"):
        next(iter(loader))
