import json
import random
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from toys import Stream

from odb_nodes import (
    JsonlSource,
    Observation,
    ODBDataLoader,
    Skipped,
    StateError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.tools.lengths import LengthTable, observe_lengths

DATASET = [{"input_ids": [1] * (n % 40 + 1), "labels": [-100] * (n % 40) + [1]} for n in range(300)]


def crop(item):
    return {"input_ids": item["input_ids"][: random.randint(1, 40)]}


def skip_short(item):
    return Skipped("short") if len(item["input_ids"]) < 5 else item


def test_a_row_says_what_a_sample_costs():
    dataset = [{"words": "a bc d", "pictures": 3}, {"words": "ef", "pictures": 0}]

    def observe(sample):
        return Observation(len(sample["words"].split()), targets=1, patches=sample["pictures"])

    table = observe_lengths(dataset, observe=observe)
    assert table.tokens.tolist() == [3, 1]
    assert table.targets.tolist() == [1, 1]
    assert table.patches.tolist() == [3, 0]
    assert table.keys.tolist() == [0, 1]
    assert (table.names, table.sizes, table.is_whole) == (("",), (2,), True)


def test_it_is_told_of_where_most_samples_are_skipped():
    data = [{"input_ids": [1] * n} for n in (1, 2, 3, 9)]
    with pytest.warns(UserWarning, match=r"3 of 4 samples are skipped: .* skipped \(short\)"):
        observe_lengths(data, process_fn=skip_short)


def test_samples_that_are_skipped_have_a_row_without_tokens():
    table = observe_lengths(DATASET, process_fn=skip_short)
    lengths = [len(item["input_ids"]) for item in DATASET]
    assert table.tokens.tolist() == [length if length >= 5 else 0 for length in lengths]
    assert table.lengths().tolist() == [length for length in lengths if length >= 5]
    assert table.keys.tolist() == [*range(300)]


@pytest.mark.slow
def test_random_lengths_are_those_of_the_first_epoch_whatever_the_workers():
    loader = ODBDataLoader(DATASET, token_budget=100, window=20, process_fn=crop, seed=5)
    seen = {}
    for batch in loader:
        info = pop_step_info(batch)
        seen |= dict(zip(info.keys, batch["attention_mask"].sum(1).tolist(), strict=True))
    for workers in (None, WorkerOptions(num_workers=2, chunk_size=7)):
        table = observe_lengths(DATASET, process_fn=crop, seed=5, workers=workers)
        assert table.tokens.tolist() == [seen[key] for key in range(300)]


@pytest.mark.parametrize("dataset", [DATASET, Stream(DATASET)])
def test_some_are_drawn_at_random_by_the_seed(dataset):
    table = observe_lengths(dataset, samples=60)
    assert (len(table), table.num_samples, table.is_whole) == (60, 300, False)
    keys = table.keys.tolist()
    assert keys == sorted({*keys})
    assert 90 < np.mean(keys) < 210
    assert table.tokens.tolist() == [key % 40 + 1 for key in keys]
    assert observe_lengths(dataset, samples=60).digest == table.digest
    assert observe_lengths(dataset, samples=60, seed=1).digest != table.digest
    assert observe_lengths(dataset, samples=900).is_whole


def test_every_item_of_a_stream_is_drawn_with_the_same_chance():
    counts = np.zeros(300)
    for seed in range(100):
        counts[observe_lengths(Stream(DATASET), samples=30, seed=seed).keys] += 1
    thirds = counts.reshape(3, 100).sum(1) / counts.sum()
    assert np.abs(thirds - 1 / 3).max() < 0.03


def test_sources_are_kept_apart(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1] * n}) + "\n" for n in (3, 1, 2)))
    dataset = {"list": DATASET, "lines": JsonlSource(path)}
    table = observe_lengths(dataset, process_fn={"list": crop, "lines": None})
    assert (table.names, table.sizes) == (("list", "lines"), (300, 3))
    assert table.lengths("lines").tolist() == [3, 1, 2]
    assert len(table.lengths("list")) == 300
    drawn = observe_lengths(dataset, samples=2)
    assert (drawn.names, drawn.sizes, len(drawn)) == (("list", "lines"), (300, 3), 4)
    assert table.streams == drawn.streams == ()
    dataset = JsonlSource(path, shuffle=False)
    assert observe_lengths(dataset).streams == ("",)  # which a loader reads in its order


def test_a_table_that_is_drawn_has_all_rows_about_equally_often():
    table = LengthTable.of([5, 6, 7])
    drawn = table.drawn(10)
    assert sorted(np.bincount(drawn.tokens)[5:].tolist()) == [3, 3, 4]
    assert drawn.is_whole and len(drawn) == 10


def test_a_file_holds_the_table(tmp_path):
    table = observe_lengths({"a": DATASET, "b": DATASET[:9]}, process_fn=skip_short, samples=20)
    table.save(tmp_path / "lengths.npz")
    loaded = LengthTable.load(tmp_path / "lengths.npz")
    assert str(loaded) == str(table)
    assert loaded.digest == table.digest and loaded.digest in str(table)
    assert loaded.names == ("a", "b") and loaded.made_by == table.made_by
    assert (loaded.data_id, replace(table, data_id="x").digest == table.digest) == ("", False)
    assert "skip_short" in str(table) and "29 of 309 samples" in str(table)


def test_the_digest_is_of_all_that_the_table_holds():
    table, other = LengthTable.of([3, 4, 5]), np.array([9, 9, 9])
    changed = [replace(table, **{name: other}) for name in ("tokens", "targets", "patches", "keys")]
    changed.append(replace(table, made_by={"seed": "1"}))
    assert len({variant.digest for variant in (table, *changed)}) == 6


def test_what_is_no_table_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "lengths.npz"
    with pytest.raises(FileNotFoundError):
        LengthTable.load(path)
    np.savez(path, tokens=np.array([1]))
    with pytest.raises(StateError, match="no table of lengths .* `observe_lengths"):
        LengthTable.load(path)
    table = LengthTable.of([3, 4, 9])
    table.save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 85]) + content[place + 1 :])
        try:
            assert LengthTable.load(path).digest == table.digest  # a byte that says nothing
        except StateError:
            pass
    path.write_bytes(content)
    monkeypatch.setattr("odb_nodes.core.sources.known_lengths.TABLE_VERSION", 2)
    with pytest.raises(StateError, match="of version 2"):
        LengthTable.load(path)


test_errors_name_what_is_wrong = refuses(
    [
        ([], {}, ValueError, "empty"),
        (DATASET, {"samples": 0}, ValueError, "`samples`"),
        (DATASET, {"process_fn": lambda _: Skipped("all")}, ValueError, "not skipped"),
        ({"input_ids": [[1, 2]]}, {}, TypeError, "columns"),
        ({"a": DATASET}, {"process_fn": {"b": None}}, ValueError, "`process_fn`"),
    ],
    lambda dataset, options: observe_lengths(dataset, **options),
)
