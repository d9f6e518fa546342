"""Context parallelism: each rank has its part of every row, and together they train as one does."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from rank_jobs import run_ranks
from refusals import refuses

from odb_nodes import ODBDataLoader, PackedCollate, PaddingCollate, TokenBudget, pop_step_info
from odb_nodes.core.collate import shard_context

ROWS = [[*range(1, 9)], [*range(21, 25)], [31, 32]]


def collated(lengths, **options):
    return PackedCollate(**options)([{"input_ids": [1] * length} for length in lengths])


def packed(multiple):
    collate = PackedCollate(sample_multiple=multiple, pad_token_id=0)
    return collate([collate.prepare({"input_ids": row, "weight": 2.0}) for row in ROWS])


def test_samples_are_padded_to_parts_of_equal_length():
    batch = packed(4)
    assert batch["input_ids"].tolist() == [[*range(1, 9), *range(21, 25), 31, 32, 0, 0]]
    assert batch["labels"].tolist() == [
        [-100, *range(2, 9), -100, 22, 23, 24, -100, 32, -100, -100]
    ]
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12, 16]
    assert batch["position_ids"].tolist() == [[*range(8), *range(4), *range(4)]]


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        ("zigzag", [1, 2, 7, 8, 21, 24, 31, 0], [3, 4, 5, 6, 22, 23, 32, 0]),
        ("contiguous", [1, 2, 3, 4, 21, 22, 31, 32], [5, 6, 7, 8, 23, 24, 0, 0]),
    ],
)
def test_each_rank_has_its_part_of_each_sample(order, first, second):
    batch = packed(4)
    parts = [shard_context(batch, rank, 2, order=order) for rank in range(2)]
    assert [part["input_ids"].tolist() for part in parts] == [[first], [second]]
    following = dict(zip(range(1, 9), [*range(2, 9), -100], strict=True))
    for part in parts:
        assert part["cu_seq_lens_q"].tolist() == [0, 4, 6, 8] and part["max_length_k"] == 4
        assert part["weight"].tolist() == [2.0] * 3 and "labels" not in part
        for token, label in zip(part["input_ids"][0], part["shift_labels"][0], strict=True):
            if int(token) in following:
                assert following[int(token)] == label
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12, 16]


def test_rows_of_a_padded_batch_are_cut_alike_and_keep_their_positions():
    batch = PaddingCollate(pad_to_multiple_of=4)([{"input_ids": row} for row in ROWS])
    short = PaddingCollate(pad_to_multiple_of=4)(
        [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}]
    )
    assert shard_context(short, 0, 2)["input_ids"].tolist() == [[1, 0]]
    batch["pixel_values"] = torch.zeros(3, 3, 4, 4)  # an image for each row
    part = shard_context(batch, 1, 2)
    assert part["pixel_values"].shape == (3, 3, 4, 4)
    assert part["input_ids"].tolist() == [[3, 4, 5, 6], [23, 24, 0, 0], [0, 0, 0, 0]]
    assert part["position_ids"].tolist() == [[2, 3, 4, 5]] * 3
    assert part["attention_mask"].tolist() == [[1] * 4, [1, 1, 0, 0], [0] * 4]


def test_positions_of_several_dimensions_are_cut():
    batch = packed(4)
    places = torch.stack([batch["position_ids"] + 100 * n for n in range(4)])
    part = shard_context({**batch, "position_ids": places}, 1, 2)
    expected = shard_context(batch, 1, 2)["position_ids"]
    assert torch.equal(part["position_ids"], torch.stack([expected + 100 * n for n in range(4)]))


ONES = {"attention_mask": torch.ones(1, 8, dtype=torch.int64)}
RESTARTS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
IMAGE = torch.tensor([[[0, 0, 0, 0, 2, 3, 4, 5]], [[0, 0, 1, 1, 2, 3, 4, 5]], [[0, 1] * 4]])
LEFT = {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])}


@pytest.mark.parametrize(
    ("more", "is_packed"),
    [
        ({"position_ids": RESTARTS}, True),
        ({"position_ids": RESTARTS, **ONES}, True),
        ({"position_ids": RESTARTS.expand(4, 1, 8)}, True),
        ({"position_ids": torch.cat((RESTARTS, torch.arange(8)[None]))}, True),
        ({"position_ids": torch.zeros(1, 8, dtype=torch.int64)}, True),
        ({"position_ids": IMAGE}, False),  # which begins a row, so that height and time stay 0
        ({"position_ids": torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]]), **LEFT}, False),
        ({"position_ids": torch.tensor([[9, 9, 9, 0, 1, 2, 3, 4]])}, False),
        (ONES, False),
    ],
)
def test_a_packed_row_without_bounds_is_never_cut_across_its_samples(more, is_packed):
    rows = 2 if more.get("position_ids", ONES["attention_mask"]).shape == (2, 8) else 1
    batch = {"input_ids": torch.ones(rows, 8, dtype=torch.int64), **more}
    if is_packed:
        with pytest.raises(ValueError, match="by its `cu_seq_lens_q`, but has none"):
            shard_context(batch, 0, 2)
    else:
        assert shard_context(batch, 0, 2)["position_ids"].shape[-1] == 4
    assert shard_context(batch, 0, 1)["input_ids"].shape[1] == 8


test_what_cannot_be_cut_is_named = refuses(
    [
        (packed(2), (0, 2), r"multiple of 4 tokens.* end at \[8, 12, 14\].*sample_multiple=4"),
        (PaddingCollate()([{"input_ids": [1, 2, 3]}]), (0, 1), "each row.* multiple of 2"),
        (packed(4), (2, 2), r"`rank` must be in range\(2\)"),
        (collated([4], mask_dtype=torch.bool), (0, 2), "`attention_mask` is a mask of all"),
        (collated([4, 4], model_arguments=False), (0, 2), "its `cu_seq_lens_q`, but has none"),
    ],
    lambda batch, ranks: shard_context(batch, *ranks),
    ValueError,
)


def test_the_budget_holds_the_padding_and_targets_are_those_of_the_samples():
    rows = [{"input_ids": [1 + index % 5] * (index % 13 + 2)} for index in range(200)]
    budget = TokenBudget(64, layout="packed")
    collate = PackedCollate.of(budget, sample_multiple=4)
    targets = 0
    for batch in ODBDataLoader(rows, token_budget=budget, window=32, collate_fn=collate):
        info = pop_step_info(batch)
        assert batch["input_ids"].shape[1] <= 64 and not (batch["cu_seq_lens_q"] % 4).any()
        assert info.local_targets == (shard_context(batch, 0, 1)["shift_labels"] != -100).sum()
        targets += info.local_targets
    assert targets == sum(len(row["input_ids"]) - 1 for row in rows)


@pytest.mark.parametrize(
    ("state", "observe"),
    [("replay", None), ("payload", lambda row: -(-len(row["input_ids"]) // 4) * 4)],
)
def test_the_padding_of_samples_is_no_real_token(state, observe):
    rows = [{"input_ids": [1] * (index % 13 + 2)} for index in range(90)]
    budget = TokenBudget(64, layout="packed")
    collate = PackedCollate.of(budget, sample_multiple=4)
    options = {"token_budget": budget, "window": 16, "collate_fn": collate, "state": state}

    def tokens_of(batches):
        for batch in batches:
            info = pop_step_info(batch)
            lengths = [len(rows[key]["input_ids"]) for key in info.keys]
            assert info.local_tokens == sum(lengths) == info.local_sources["text"].tokens
            assert info.local_padded_tokens == batch["input_ids"].numel() > sum(lengths)
            yield info.local_tokens

    def make_loader():
        return ODBDataLoader({"text": rows}, observe=observe, **options)

    loader = make_loader()
    tokens = tokens_of(loader)
    seen = [next(tokens) for _ in range(3)]
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert sum(seen) + sum(tokens_of(resumed)) == sum(len(row["input_ids"]) for row in rows)


AS_TORCH = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from odb_nodes.core.collate import shard_context
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids = torch.arange(3 * 16).reshape(3, 16)
    ours = shard_context({"input_ids": ids}, rank, 2)["input_ids"]
    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={ids}):
        pass
    print(json.dumps([ours.tolist(), ids.tolist()]))
"""


@pytest.mark.slow
def test_the_order_is_that_of_torch(tmp_path):
    for ours, theirs in run_ranks(tmp_path, AS_TORCH, 2):
        assert ours == theirs


class Model(torch.nn.Module):
    """A language model of one layer, whose attention has the tokens of all ranks of a group."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = torch.nn.Embedding(50, 8), torch.nn.Embedding(64, 8)
        self.mixed, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 50)
        self.double()

    def loss(self, part, gather=lambda tensor: tensor):
        """The sum over the labels of a part of a packed row."""
        place = part["position_ids"][0]
        sample = torch.repeat_interleave(part["cu_seq_lens_q"].diff())
        x = self.embed(part["input_ids"][0]) + self.place(place)
        query, key, value = self.mixed(x).chunk(3, -1)
        samples, places = gather(sample), gather(place)
        seen = (sample[:, None] == samples) & (place[:, None] >= places)
        scores = (query @ gather(key).T).masked_fill(~seen, -torch.inf)
        logits = self.head(x + scores.softmax(-1) @ gather(value))
        labels = part["shift_labels"][0]
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def loader_of(**options):
    draw = np.random.default_rng(0)
    rows = [{"input_ids": draw.integers(0, 50, draw.integers(2, 40))} for _ in range(60)]
    budget = TokenBudget(96, layout="packed")
    collate = PackedCollate.of(budget, sample_multiple=4)
    return ODBDataLoader(rows, token_budget=budget, window=16, collate_fn=collate, **options)


ON_A_MESH = """
    sys.path.insert(0, sys.argv[1])
    import test_context as t
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    group, results = mesh["cp"].get_group(), []
    gather = lambda tensor: all_gather_tensor_autograd(tensor.contiguous(), 0, group)
    for order in ("zigzag", "contiguous"):
        model, targets = t.Model(), []
        for batch in t.loader_of(process_group=mesh):
            info = r.pop_step_info(batch)
            part = t.shard_context(batch, mesh["cp"].get_local_rank(), 2, order=order)
            loss = model.loss(part, gather) / max(info.local_targets, 1)
            (loss * info.loss_scale * 2).backward()  # 2 ranks have parts of the same mean
            targets.append(info.all_targets)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        grads = [(p.grad / world_size).flatten().tolist() for p in model.parameters()]
        results.append([targets, grads])
    print(json.dumps(results))
"""


@pytest.mark.slow
def test_gradients_of_a_mesh_are_those_of_one_process(tmp_path):
    def batches(exchange):
        return [(pop_step_info(batch), batch) for batch in loader_of(process_group=exchange)]

    model, targets = Model(), []
    for step in zip(*on_ranks(2, batches), strict=True):
        targets.append(step[0][0].all_targets)
        for info, batch in step:
            if not info.is_filler:
                (model.loss(shard_context(batch, 0, 1)) / targets[-1]).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    results = run_ranks(tmp_path, ON_A_MESH, 4, Path(__file__).parent)
    for rank_targets, grads in chain(*results):
        assert rank_targets == targets and len(targets) > 4
        off = torch.tensor([*chain(*grads)], dtype=torch.float64) - expected
        assert off.abs().max() < 1e-12 * expected.abs().max()
