"""Rows that share a prefix: once in a batch, with the losses and gradients of whole rows."""

from collections import Counter

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch.nn.functional import cross_entropy

from odb_nodes import (
    ODBDataLoader,
    PackedCollate,
    PaddingCollate,
    SampleError,
    StateError,
    TokenBudget,
    pop_step_info,
)
from odb_nodes.collate import RowsCollate, RowsObserve, check_packing
from odb_nodes.testing import assert_resumes_exactly

VOCABULARY = 61
BUDGET = TokenBudget(160, layout="packed")


def row_of(ids, targets):
    """A row of which the tokens at `targets` are predicted."""
    labels = [token if index in targets else -100 for index, token in enumerate(ids)]
    return {"input_ids": [*ids], "labels": labels}


def answers_of(seed, prompt=None, count=4):
    """A prompt and its answers, of which one may be a single token."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, VOCABULARY, prompt or rng.integers(1, 30)).tolist()
    rows = []
    for length in rng.integers(1, 12, count):
        ids = prefix + rng.integers(1, VOCABULARY, length).tolist()
        rows.append(row_of(ids, range(len(prefix), len(ids))))
    return rows


def turns_of(seed):
    """A chat as a row for each turn, of which the last part is the answer."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, 40).tolist()
    return [row_of(ids[:end], range(end - 5, end)) for end in (12, 23, 40)]


def sharing(dtype=torch.bool, **options):
    return RowsCollate(PackedCollate(mask_dtype=dtype, **options), share_prefix=True)


def test_the_last_token_of_a_prompt_is_repeated_where_each_answer_is_predicted():
    sample = [row_of([1, 2, 3, 8, 9], {3, 4}), row_of([1, 2, 3, 7], {3}), row_of([1, 2, 3, 8], {3})]
    batch = sharing(pad_to_multiple_of=12)([sample, row_of([5], ())])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 8, 9, 3, 7, 3, 8, 5, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 2, 3, 0, 0, 0]]
    masked = -100
    assert batch["labels"].tolist() == [[masked] * 3 + [8, 9, masked, 7, masked, 8] + [masked] * 3]
    seen = [row.nonzero().flatten().tolist() for row in batch["attention_mask"][0, 0]]
    assert seen[4] == [0, 1, 2, 3, 4] and seen[6] == [0, 1, 5, 6] and seen[8] == [0, 1, 7, 8]
    assert seen[9:] == [[9], [10], [11]]
    assert batch["use_cache"] is False and "cu_seq_lens_q" not in batch


def test_only_tokens_at_which_a_row_predicts_nothing_are_shared():
    ids = [1, 2, 3, 4, 5]
    lengths = {
        "a supervised prefix": [row_of([*ids, 6], range(6)), row_of([*ids, 7], range(6))],
        "supervised in the first row alone": [row_of([*ids, 6], range(6)), row_of([*ids, 7], {5})],
        "supervised from token 2": [row_of([*ids, 6], {5}), row_of([*ids, 7], range(2, 6))],
        "nothing in common": [row_of(ids, {4}), row_of([2, *ids], {5})],
        "equal rows without targets": [row_of(ids, ()), row_of(ids, ())],
        "without labels": [{"input_ids": ids}, {"input_ids": ids}],
        "with types that differ": [
            {**row_of(ids, {4}), "token_type_ids": [0, 0, *kinds]} for kinds in ([0] * 3, [1] * 3)
        ],
    }
    tokens = {name: sharing()([rows])["input_ids"].shape[1] for name, rows in lengths.items()}
    assert [*tokens.values()] == [12, 12 - 4, 12 - 1, 11, 10 - 4, 10, 10 - 2]
    for name, rows in lengths.items():
        assert RowsObserve(share_prefix=True)(rows).tokens == tokens[name]


def contexts_of(batch):
    """How often each target follows each context, by the mask and the positions."""
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    counts = Counter()
    for place in (labels[1:] != -100).nonzero().flatten().tolist():
        seen = batch["attention_mask"][0, 0, place].nonzero().flatten()
        assert batch["position_ids"][0, seen].tolist() == [*range(len(seen))]
        counts[tuple(ids[seen].tolist()), labels[place + 1].item()] += 1
    return counts


@given(
    st.lists(
        st.lists(
            st.lists(st.tuples(st.integers(1, 2), st.booleans()), min_size=1, max_size=7),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, 8]),
)
def test_each_target_is_predicted_from_the_tokens_of_its_row(samples, multiple):
    """Over two tokens, so that rows share prefixes of any shape."""
    group = []
    expected = Counter()
    for sample in samples:
        rows = []
        for tokens in sample:
            ids, flags = zip(*tokens, strict=True)
            rows.append(row_of(ids, np.flatnonzero(flags)))
            for index in range(1, len(ids)):
                if flags[index]:
                    expected[ids[:index], ids[index]] += 1
        group.append(rows)
    batch = sharing(pad_to_multiple_of=multiple)(group)
    assert contexts_of(batch) == expected
    observed = [RowsObserve(share_prefix=True)(rows) for rows in group]
    tokens = sum(observation.tokens for observation in observed)
    assert batch["input_ids"].shape[1] == -(-tokens // multiple) * multiple
    assert sum(observation.targets for observation in observed) == expected.total()


def test_other_values_per_token_are_those_of_the_first_row_that_holds_a_token():
    sample = [row_of([1, 2, 8], {2}), row_of([1, 2, 9], {2})]
    sample = [{**row, "advantages": [number] * 3} for number, row in enumerate(sample)]
    keys = ("input_ids", "labels", "advantages")
    batch = sharing(token_keys=keys)([sample])
    assert batch["advantages"].tolist() == [[0, 0, 0, 1, 1]]


# --- models of transformers -----------------------------------------------------------------------


@pytest.fixture
def in_fp64(monkeypatch):
    """Norms and softmax that compute in fp64: those of transformers round to fp32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

    def normalized(self, states):
        mean = states.pow(2).mean(-1, keepdim=True)
        return self.weight * states * torch.rsqrt(mean + self.variance_epsilon)

    monkeypatch.setattr(modeling.LlamaRMSNorm, "forward", normalized)


def model(attention, kind="Llama", **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        initializer_range=0.3,  # so that attention is far from uniform
        **options,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def mean_loss(llama, batch):
    """The mean over targets in fp64: the loss of transformers is in fp32."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch["labels"][:, 1:].flatten()
    losses = cross_entropy(llama(**inputs).logits[:, :-1].flatten(0, 1), labels, reduction="sum")
    return losses / (labels != -100).sum()


def gradient_of(llama, compute):
    llama.zero_grad()
    compute()
    return torch.cat([parameter.grad.flatten() for parameter in llama.parameters()])


def gradient_alone(llama, rows):
    """The gradient of the mean over the targets of all rows, computed one by one."""
    targets = sum(int((np.array(row["labels"][1:]) != -100).sum()) for row in rows)

    def compute():
        for row in rows:
            batch = PaddingCollate()([row])
            count = (batch["labels"][:, 1:] != -100).sum()
            if count:
                (mean_loss(llama, batch) * count / targets).backward()

    return gradient_of(llama, compute)


def assert_equal(gradient, expected):
    assert (gradient - expected).norm() <= 1e-12 * expected.norm()


GROUPS = {
    "answers": [answers_of(0, 30)],
    "answers to two prompts": [answers_of(1), answers_of(2)],
    "turns": [turns_of(3)],
    "all, and a row of its own": [answers_of(4), turns_of(5), answers_of(6)[0]],
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("sdpa", torch.bool), ("sdpa", torch.float64), ("eager", torch.float64)],
)
@pytest.mark.usefixtures("in_fp64")
def test_the_gradient_is_that_of_rows_computed_alone(group, attention, dtype):
    llama = model(attention)
    batch = sharing(dtype, pad_to_multiple_of=16)(group)
    rows = [row for sample in group for row in (sample if isinstance(sample, list) else [sample])]
    assert batch["input_ids"].shape[1] < 0.8 * sum(len(row["input_ids"]) for row in rows)
    gradient = gradient_of(llama, lambda: mean_loss(llama, batch).backward())
    assert_equal(gradient, gradient_alone(llama, rows))


def test_attention_that_does_not_keep_rows_apart_is_found():
    batch = sharing()([answers_of(0)])
    check_packing(model("sdpa"), batch)
    with pytest.raises(ValueError, match="must not see each other.*`LlamaForCausalLM`"):
        check_packing(model("eager"), batch)  # which adds a boolean mask to the scores
    check_packing(model("eager"), sharing(torch.float64)([answers_of(0)]))
    llama = model("sdpa")
    llama.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="`attn_implementation`.*'flash_attention_2'"):
        check_packing(llama, batch)
    batch = sharing()([answers_of(0, 30)])
    check_packing(model("sdpa", "Mistral", sliding_window=64), batch)
    with pytest.raises(ValueError, match="at most 16 tokens, the `sliding_window`"):
        check_packing(model("sdpa", "Mistral", sliding_window=16), batch)


# --- loaders --------------------------------------------------------------------------------------


def loader_of(process_group=None, share_prefix=True, **options):
    """A loader over 40 prompts, whose samples are their answers."""
    return ODBDataLoader(
        range(40),
        token_budget=BUDGET,
        process_fn=answers_of,
        observe=RowsObserve(share_prefix=share_prefix),
        collate_fn=RowsCollate(
            PackedCollate.of(BUDGET, mask_dtype=torch.bool), share_prefix=share_prefix
        ),
        window=8,
        process_group=process_group,
        **options,
    )


def test_a_budget_counts_shared_tokens_once():
    counts = {}
    for share_prefix in (True, False):
        keys = []
        for batch in loader_of(share_prefix=share_prefix):
            info = pop_step_info(batch)
            assert batch["input_ids"].numel() == info.local_tokens <= BUDGET.tokens
            assert (batch["labels"][:, 1:] != -100).sum() == info.local_targets
            keys.append(info.keys)
        assert sorted(key for step in keys for key in step) == [*range(40)]
        counts[share_prefix] = len(keys)
    assert counts[True] < 0.7 * counts[False]


@pytest.mark.usefixtures("in_fp64")
def test_ranks_that_share_prefixes_have_the_mean_over_all_tokens():
    def run(exchange):
        return [(pop_step_info(batch), batch) for batch in loader_of(exchange, accumulate=2)]

    llama = model("sdpa")
    ranks = on_ranks(2, run)
    assert len(ranks[0]) == len(ranks[1]) > 4
    for begin in range(0, len(ranks[0]), 2):
        step = [pair for rank in ranks for pair in rank[begin : begin + 2]]

        def compute(step=step):
            for info, batch in step:
                (mean_loss(llama, batch) * info.loss_scale / 2).backward()

        keys = [key for info, _ in step if not info.is_filler for key in info.keys]
        rows = [row for key in keys for row in answers_of(key)]
        assert_equal(gradient_of(llama, compute), gradient_alone(llama, rows))


def test_a_loader_that_shares_prefixes_resumes_exactly_and_not_without():
    assert_resumes_exactly(loader_of, epochs=1, every=3)
    loader, other = loader_of(), loader_of(share_prefix=False)
    next(iter(loader))
    with pytest.raises(StateError, match="share_prefix"):
        other.load_state_dict(loader.state_dict())
        next(iter(other))


class TakesStep(PackedCollate):
    def collate_step(self, samples, _info):
        return self(samples)


def test_an_error_of_a_row_names_its_sample():
    def process(index):
        rows = answers_of(index)
        return [*rows[1:], {**rows[0], "score": 1}] if index == 3 else rows

    for collate_fn in (sharing(), RowsCollate(PackedCollate()), RowsCollate(TakesStep())):
        loader = ODBDataLoader(
            range(5),
            token_budget=TokenBudget(4096, layout="packed"),
            process_fn=process,
            observe=RowsObserve(),
            collate_fn=collate_fn,
        )
        with pytest.raises(SampleError, match=r"^a sample \(key 3\).*'score'"):
            next(iter(loader))


def test_a_collate_function_may_change_the_rows_that_it_is_given():
    sample = {"input_ids": [1]}
    collate = RowsCollate(lambda rows: [row.pop("input_ids") for row in rows])
    assert collate([sample, [sample]]) == [[1], [1]]
    assert sample == {"input_ids": [1]}


PACKED = PackedCollate(mask_dtype=torch.bool)

test_what_cannot_share_is_refused = refuses(
    [
        (lambda: RowsCollate(PackedCollate(), share_prefix=True), ValueError, "`mask_dtype`"),
        (lambda: RowsCollate(list, share_prefix=True), ValueError, "`PackedCollate`.*list"),
        (lambda: sharing(sample_multiple=4), ValueError, "`sample_multiple`"),
        (lambda: RowsCollate(PACKED, share_prefix=1), TypeError, "`share_prefix`.*1"),
        (
            lambda: RowsObserve(layout="padded", share_prefix=True),
            ValueError,
            "`layout`.*packed.*'padded'",
        ),
        (lambda: sharing()([[{"labels": [1]}]]), TypeError, "mappings with `input_ids`"),
        (lambda: RowsObserve(layout="packd"), ValueError, "`layout` must be one of.*'packd'"),
        (lambda: RowsObserve()([]), SampleError, "must have a row.*`Skipped"),
        (lambda: RowsObserve(layout="padded")([]), SampleError, "must have a row.*`Skipped"),
        (
            lambda: ODBDataLoader(
                range(4),
                token_budget=TokenBudget(64, layout="packed", pad_to_multiple_of=8),
                process_fn=answers_of,
                observe=RowsObserve(share_prefix=True),
                collate_fn=RowsCollate(PACKED, share_prefix=True),
            ),
            ValueError,
            "`pad_to_multiple_of` of `collate_fn`",
        ),
    ]
)
