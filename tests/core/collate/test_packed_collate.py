import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    ODBDataLoader,
    PackedCollate,
    PaddingCollate,
    SampleError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)

ROWS = [[1, 2, 3], [4], [5, 6]]


def samples(kind=list, **more):
    return [{"input_ids": kind(row), "labels": kind(row), **more} for row in ROWS]


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda row: np.array([row])])
def test_samples_of_any_kind_are_packed_alike_prepared_or_not(kind):
    collate = PackedCollate()
    prepared = [collate.prepare(sample) for sample in samples(kind)]
    assert all(type(sample["labels"]) is np.ndarray for sample in prepared)
    for batch in (collate(samples(kind)), collate(prepared)):
        assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
        assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, 6]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
        assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
        assert batch["max_length_q"] == batch["max_length_k"] == 3
        assert batch["use_cache"] is False
        assert "attention_mask" not in batch


def test_the_names_and_values_are_those_of_transformers():
    flattening = pytest.importorskip("transformers").DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_tensors="pt"
    )
    for rows in (samples(), [{"input_ids": row} for row in ROWS]):
        batch, expected = PackedCollate()(rows), flattening(rows)
        assert batch.pop("use_cache") is False
        assert batch.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(value))
            assert getattr(batch[key], "dtype", int) == getattr(value, "dtype", int)


def test_padding_is_a_sample_of_its_own_that_nothing_is_learnt_from():
    batch = PackedCollate(pad_token_id=9, pad_to_multiple_of=8)(samples())
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, 6, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    without_labels = PackedCollate(pad_to_multiple_of=8)([{"input_ids": row} for row in ROWS])
    assert torch.equal(without_labels["labels"], batch["labels"])


def test_batches_of_one_shape_differ_in_no_shape():
    budget = TokenBudget(16, layout="packed", shapes=1, max_samples=4)
    collate = PackedCollate.of(budget)
    batches = [collate(samples()), collate([{"input_ids": [7] * 16, "labels": [7] * 16}])]
    for batch in batches:
        assert batch["input_ids"].shape == batch["labels"].shape == (1, 16)
        assert batch["cu_seq_lens_q"].shape == (4 + 2,)
        assert batch["max_length_q"] == 16
    assert batches[0]["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 16, 16]
    assert batches[1]["cu_seq_lens_q"].tolist() == [0, 16, 16, 16, 16, 16]
    without = PackedCollate.of(TokenBudget(16, layout="packed", shapes=1))(samples())
    assert set(without) == {"input_ids", "labels", "position_ids", "use_cache"}
    assert collate([{"input_ids": [7] * 17}])["input_ids"].shape == (1, 17)  # oversize


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), multiple=st.sampled_from([1, 8])
)
def test_a_mask_allows_each_token_its_own_sample_up_to_itself(lengths, multiple):
    collate = PackedCollate(pad_to_multiple_of=multiple, mask_dtype=torch.bool)
    batch = collate([{"input_ids": [1] * length} for length in lengths])
    positions = batch["position_ids"][0].tolist()
    first = [index - position for index, position in enumerate(positions)]
    allowed = [
        [first[row] <= column <= row for column in range(len(first))] for row in range(len(first))
    ]
    assert batch["attention_mask"].tolist() == [[allowed]]
    added = PackedCollate(pad_to_multiple_of=multiple, mask_dtype=torch.bfloat16)
    mask = added([{"input_ids": [1] * length} for length in lengths])["attention_mask"]
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask == 0, batch["attention_mask"])
    assert mask[mask != 0].eq(torch.finfo(torch.bfloat16).min).all()


def test_other_keys_become_what_they_can():
    batch = PackedCollate(model_arguments=False)(
        [
            {"input_ids": row, "token_type_ids": np.ones(len(row)), "n": i, "box": [1] * len(row)}
            | {"name": "x", "weight": np.float32(i), "attention_mask": [1] * len(row)}
            | {"position_ids": torch.arange(len(row))}
            for i, row in enumerate(ROWS)
        ]
    )
    assert batch["token_type_ids"].tolist() == [[1] * 6]
    assert batch["n"].tolist() == batch["weight"].tolist() == [0, 1, 2]
    assert batch["name"] == ["x", "x", "x"]
    assert batch["box"] == [[1, 1, 1], [1], [1, 1]]  # not told to have a value per token
    assert set(batch) == {
        *("input_ids", "labels", "position_ids", "token_type_ids", "n", "name", "box", "weight")
    }
    packed = PackedCollate(token_keys=("input_ids", "box"))
    assert packed([{"input_ids": row, "box": row} for row in ROWS])["box"].shape == (1, 6)


test_samples_that_cannot_be_packed_are_an_error = refuses(
    [
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], ValueError, "the same keys"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, "sample 0 .*`labels` must have"),
        (["text"], TypeError, "sample 0 of the group is a `str`"),
        ([{"text": "x"}], TypeError, "mappings with `input_ids`"),
        ([{"input_ids": [0.5]}], SampleError, "`input_ids` must hold integers"),
        ([{"input_ids": [1], "labels": ["x"]}], SampleError, "`labels` must hold numbers"),
        (
            [{"input_ids": [1], "attention_mask": [0]}],
            SampleError,
            "`attention_mask` .* is .0.",
        ),
        (
            [{"input_ids": [1], "position_ids": [3]}],
            SampleError,
            "sample 0 .*`position_ids` .* .3.",
        ),
        ([{"input_ids": [1], "pixel_values": np.ones((4, 2))}], SampleError, "packs text alone"),
    ],
    lambda samples: PackedCollate()(samples),
)


test_what_is_refused_before_a_batch_is_made = refuses(
    [
        (lambda: prepare(attention_mask=[0, 1]), SampleError, "`attention_mask` must be 1"),
        (lambda: prepare(labels=[1]), SampleError, "`labels` must have the length"),
        (lambda: prepare(image_grid_thw=[[1, 2, 2]]), SampleError, "image_grid_thw"),
        (lambda: PackedCollate(mask_dtype=torch.int64), ValueError, "`mask_dtype` must be"),
        (lambda: PackedCollate(max_samples=0), ValueError, "`max_samples` must be"),
        (lambda: PackedCollate(sample_multiple=4)([{"input_ids": [1]}]), ValueError, "`prepare`"),
        (lambda: PackedCollate(pad_token_id=None), TypeError, "is None .*pass its `eos_token_id`"),
        (lambda: PackedCollate(pad_token_id=1.7), TypeError, "`pad_token_id` must be an integer"),
        (lambda: PackedCollate(token_keys="input_ids"), TypeError, "`token_keys` must be a list"),
        (lambda: PackedCollate(token_keys=["labels"]), ValueError, r"have `input_ids`.*'labels'"),
        (lambda: PackedCollate(shapes=[(-2, 8)]), ValueError, r"`shapes\[0\]` must be in 1\.\."),
        (lambda: PackedCollate(shapes=[(2, 8), (1, "x")]), TypeError, r"`shapes\[1\]`.*'x'"),
    ]
)


def prepare(**more):
    return PackedCollate().prepare({"input_ids": [1, 2], **more})


def test_labels_that_are_not_per_token_are_listed():
    batch = PackedCollate(token_keys=("input_ids",))([{"input_ids": [1, 2], "labels": [1]}])
    assert batch["labels"] == [[1]] and batch["position_ids"].tolist() == [[0, 1]]


def test_a_sample_without_tokens_is_not_filled_up():
    assert PackedCollate(sample_multiple=2).prepare({"x": 1}) == {"x": 1}


def test_keys_and_shapes_may_be_lists():
    lists = PackedCollate(token_keys=["input_ids"], shapes=[[1, np.int64(8)]])
    assert lists == PackedCollate(token_keys=("input_ids",), shapes=((1, 8),))
    assert hash(lists)


# --- in a loader ------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(4).integers(1, 60, 120).tolist()
DATASET = [
    {"input_ids": [i] * n, "labels": [-100] * (i % 7) + [i] * max(0, n - i % 7), "id": i}
    for i, n in enumerate(LENGTHS)
]
DATASET = [{**row, "labels": row["labels"][: len(row["input_ids"])]} for row in DATASET]


def loader(budget, **options):
    return ODBDataLoader(DATASET, token_budget=budget, window=24, **options)


@pytest.mark.parametrize("shapes", [None, 1])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_packed_budget_packs_by_default_and_counts_what_the_loss_sees(shapes, workers):
    budget = TokenBudget(150, layout="packed", pad_to_multiple_of=8, shapes=shapes)
    seen = []
    with loader(budget, num_workers=workers) as batches:
        for batch in batches:
            info = pop_step_info(batch)
            width = batch["input_ids"].shape[1]
            assert width <= 144 and width % 8 == 0 and (shapes is None or width == 144)
            assert info.local_targets == (batch["labels"][0, 1:] != -100).sum()
            assert info.local_samples == len(batch["id"])
            seen += batch["id"].tolist()
    assert sorted(seen) == list(range(120))


@pytest.mark.filterwarnings("ignore:no token of:UserWarning")
def test_dummy_rows_are_not_counted():
    budget = TokenBudget(300, shapes=6)
    shapes = set()
    for batch in loader(budget):
        info = pop_step_info(batch)
        shapes.add(tuple(batch["input_ids"].shape))
        assert info.local_targets == (batch["labels"][:, 1:] != -100).sum()
        assert info.local_samples == len(batch["id"]) == (batch["attention_mask"][:, 0] == 1).sum()
        assert batch["attention_mask"][info.local_samples :].sum() == 0
    assert shapes <= set(budget.shape_ladder()) and len(shapes) > 1


@pytest.mark.parametrize(
    ("budget", "collate_fn", "message"),
    [
        (TokenBudget(99, layout="packed"), PaddingCollate(), "is a `PaddingCollate`"),
        (TokenBudget(99), PackedCollate(), "`PackedCollate`.*`PaddingCollate.of"),
        (TokenBudget(99, shapes=9), PaddingCollate(), "9 shapes, but is a ladder of 0"),
        (TokenBudget(99), PaddingCollate.of(TokenBudget(99, shapes=9)), "is a ladder of 9"),
        (TokenBudget(99, layout="packed", shapes=9), PackedCollate(), "a ladder of 1 shapes"),
        (TokenBudget(99, pad_to_multiple_of=8), PaddingCollate(), "`pad_to_multiple_of` .* 8, but"),
        (TokenBudget(99, layout="packed", max_samples=3), PackedCollate(), "`max_samples` .* 3"),
    ],
)
def test_a_collate_function_for_another_budget_is_refused(budget, collate_fn, message):
    with pytest.raises(ValueError, match=message):
        loader(budget, collate_fn=collate_fn)
    source = WindowBucketer(LengthObserver(IterableWrapper(DATASET)), budget)
    with pytest.raises(ValueError, match=message):
        GroupCollator(source, collate_fn)
    assert GroupCollator(source, collate_fn.__call__).source is source  # a function: its own affair


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_options_of_the_default_collate_function_are_taken_beside_the_budget(layout):
    budget = TokenBudget(300, layout=layout, shapes=6)
    kind = PackedCollate if layout == "packed" else PaddingCollate
    batches = loader(budget, collate_fn=kind.of(budget, pad_token_id=777))
    assert any((batch["input_ids"] == 777).any() for batch in batches)
    nodes = GroupCollator(WindowBucketer(LengthObserver(IterableWrapper(DATASET)), budget))
    nodes.reset(None)
    assert tuple(next(nodes)["input_ids"].shape) in budget.shape_ladder()
