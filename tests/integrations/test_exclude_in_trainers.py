"""Under each trainer, a run that resumes leaves samples out, and its ledger says so."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import accelerate_jobs as a
import lightning_runs as l
import trainer_jobs as t
from ledgers import rows_of

from odb_nodes import audit
from odb_nodes.integrations.lightning import ODBCallback

SIZE = 40


def excluded_after(folder, steps):
    """Keys of epoch 0, of which the first was trained on before that step, and three after it."""
    rows = [[key for key, *_ in step] for step in rows_of(folder)]
    before = sum(map(len, rows[:steps]))
    later = [key for step in rows for key in step][before:SIZE]
    return [rows[0][0], later[0], later[len(later) // 2], later[-1]]


def check(folder):
    found = audit(folder, SIZE)
    assert found.ok, found.problems
    assert [one.is_complete for one in found.epochs] == [True, True]
    assert [one.fates for one in found.epochs] == [
        {"trained": SIZE - 3, "excluded": 3},
        {"trained": SIZE - 4, "excluded": 4},
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_under_a_trainer_of_transformers(tmp_path, accumulate):
    folder, place = tmp_path / "ledger", 2
    options = {"gradient_accumulation_steps": accumulate}
    t.make_trainer(
        tmp_path, "whole", save_strategy="steps", save_steps=1, odb={"ledger": folder}, **options
    ).train()
    excluded = excluded_after(folder, place * accumulate)
    odb = {"ledger": folder, "exclude": excluded}
    resumed = t.make_trainer(tmp_path, "resumed", odb=odb, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{place}"))
    check(folder)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_under_accelerate(tmp_path, accumulate):
    folder, place = tmp_path / "ledger", 2
    options = {"accumulate": accumulate, "ledger": folder}
    a.train(tmp_path, "whole", save_every=1, **options)
    excluded = excluded_after(folder, place * accumulate)
    resume = f"{tmp_path}/step-{place}"
    a.train(tmp_path, "resumed", resume=resume, exclude=excluded, **options)
    check(folder)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_under_lightning(tmp_path, accumulate):
    folder, place = tmp_path / "ledger", 2
    save = l.SaveEverywhere(tmp_path)
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    l.fit(odb=[save, ODBCallback(ledger=folder)], **options)
    excluded = excluded_after(folder, place * accumulate)
    (path, *_) = (one for one in save.paths if one.endswith(f"batch-start-step{place}.ckpt"))
    l.fit(
        odb=[ODBCallback(ledger=folder)],
        checkpoint=path,
        data_options={"exclude": excluded},
        **options,
    )
    check(folder)
