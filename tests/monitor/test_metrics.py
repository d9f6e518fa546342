import pytest
import torch

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.monitor import StepMeter, summarize


def test_one_rank():
    dataset = [{"input_ids": [1] * (n % 7 + 2)} for n in range(50)]
    meter, padded, batches = StepMeter(), 0, 0
    for batch in ODBDataLoader(dataset, token_budget=32, window=8, accumulate=2):
        meter.add(batch, pop_step_info(batch), wait_s=0.25)
        padded += batch["input_ids"].numel()
        batches += 1
    rows, steps, seconds = meter.take()
    assert steps == -(-batches // 2)
    assert seconds > 0
    metrics = summarize(rows[None], steps, 10.0)
    real = sum(len(sample["input_ids"]) for sample in dataset)
    assert metrics["odb/padding_share"] == pytest.approx(1 - real / padded)
    assert metrics["odb/real_tokens_per_step"] == real / steps
    assert metrics["odb/real_tokens_per_s"] == real / 10
    assert metrics["odb/samples_per_step"] == 50 / steps
    assert metrics["odb/data_wait_share"] == pytest.approx(0.25 * batches / 10)
    assert metrics["odb/rank_balance"] == 1
    assert metrics["odb/filler_share"] == 0
    assert len(meter) == 0
    assert meter.take()[0].shape == (0, 5)


def test_the_balance_of_two_ranks():
    rows = torch.tensor(
        [[[2, 10, 10, 0, 0], [2, 8, 10, 0, 0]], [[1, 20, 20, 0, 0], [0, 0, 5, 1, 0]]]
    )
    metrics = summarize(rows, 2, 1.0)
    assert metrics["odb/rank_balance"] == pytest.approx(45 / (2 * 30))
    assert metrics["odb/padding_share"] == pytest.approx(1 - 38 / 45)
    assert metrics["odb/filler_share"] == 0.25


def test_nothing_counted():
    assert summarize(torch.zeros(2, 0, 5), 0, 0.0)["odb/padding_share"] == 0
