"""`Trainer` of transformers with dynamic batches, on one rank and on two real ones."""

import copy
import itertools
import json
import shutil
import signal
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import language_models as lm  # noqa: E402
import trainer_jobs as t  # noqa: E402
from ledgers import check_ledger  # noqa: E402
from rank_jobs import RankJob, run_ranks  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_utils import HPSearchBackend  # noqa: E402

from odb_nodes import PaddingCollate, StateError, TokenBudget  # noqa: E402
from odb_nodes._compat.transformers import model_inputs, shifts_labels  # noqa: E402
from odb_nodes.integrations.huggingface import (  # noqa: E402
    LrScaling,
    ODBConfig,
    ODBSeq2SeqTrainer,
    ODBTrainer,
    ODBTrainerMixin,
    configure_trainer,
)
from odb_nodes.integrations.huggingface.checks import check_trainer  # noqa: E402

SIZE = 40
WARM = ("transformers.trainer_seq2seq", "odb_nodes.integrations.huggingface")
IMPORTS = f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport trainer_jobs as t\n"
LOSSES = [
    ("Normalizing", None),
    ("Averaging", None),
    ("Ignoring", None),
    ("Plain", lm.sum_over_items),
    ("Plain", lm.mean_over_batch),
]


def places_of(exhaustive):
    """After the first step, within an epoch, around its end, and at the very end; or all."""
    return None if exhaustive else lambda steps: [1, steps // 2 - 1, steps // 2, steps]


# --- one rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model, function", LOSSES)
def test_the_gradient_is_that_of_the_mean_over_all_tokens(tmp_path, model, function, accumulate):
    trainer = t.make_trainer(
        tmp_path,
        model=model,
        compute_loss_func=function,
        gradient_accumulation_steps=accumulate,
    )
    trainer.train()
    entries = t.entries_of(tmp_path, "train")
    error, steps, _ = lm.check_steps([entries], SIZE, accumulate)
    assert error < 1e-12
    assert steps > 6
    assert all(torch.isfinite(torch.tensor(entry["gradient"])).all() for entry in entries)


@pytest.mark.skipif(not hasattr(Trainer, "loss_is_scaled_for_ga"), reason="is of later versions")
@pytest.mark.parametrize("model", ["Normalizing", "Averaging"])
def test_the_gradient_is_right_whatever_the_trainer_divides_by(tmp_path, model):
    class Divided(ODBTrainer):
        loss_is_scaled_for_ga = False

    trainer = t.make_trainer(tmp_path, model=model, kind=Divided, gradient_accumulation_steps=3)
    trainer.train()
    assert lm.check_steps([t.entries_of(tmp_path, "train")], SIZE, 3)[0] < 1e-12


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_gradient_check_sees_another_scale(tmp_path, factor):
    class Scaled(ODBTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * factor

    trainer = t.make_trainer(tmp_path, kind=Scaled, num_train_epochs=1)
    trainer.train()
    error, *_ = lm.check_steps([t.entries_of(tmp_path, "train")], SIZE, 1)
    assert error == pytest.approx(abs(factor - 1))


@pytest.mark.parametrize("model", ["Twice", "Undivided"])
def test_a_loss_that_is_scaled_twice_or_not_at_all_is_refused(tmp_path, model):
    trainer = t.make_trainer(tmp_path, model=model)
    with pytest.raises(ValueError, match="scaled twice, or not at all"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_subclass_that_normalises_again_is_refused(tmp_path):
    class Again(ODBTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch=torch.tensor(7))

    with pytest.raises(ValueError, match="would be normalized twice"):
        t.make_trainer(tmp_path, model="Averaging", kind=Again).train()


def test_a_subclass_that_does_not_weigh_the_loss_is_refused(tmp_path):
    class Alone(ODBTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs)["loss"]

    with pytest.raises(ValueError, match=r"`Alone` overrides it"):
        t.make_trainer(tmp_path, model="Averaging", kind=Alone).train()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, accumulate, exhaustive):
    entries = t.resume_everywhere(
        tmp_path, places_of(exhaustive), gradient_accumulation_steps=accumulate
    )
    lm.check_steps([entries], SIZE, accumulate)


def test_max_steps_ends_within_an_epoch(tmp_path, exhaustive):
    options = {"max_steps": 9, "gradient_accumulation_steps": 2, "size": 30}
    entries = t.resume_everywhere(tmp_path, places_of(exhaustive), **options)
    assert [entry["step"] for entry in entries] == list(range(1, 10))
    assert 1 < entries[-1]["epoch"] < 2


def test_a_run_of_so_many_steps_goes_on_by_epochs(tmp_path):
    t.make_trainer(tmp_path, "whole", num_train_epochs=1).train()
    t.make_trainer(tmp_path, "first", max_steps=4, save_strategy="steps", save_steps=4).train()
    rest = t.make_trainer(tmp_path, "rest", num_train_epochs=1)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    ids = [[entry["ids"] for entry in t.entries_of(tmp_path, name)] for name in ("whole", "rest")]
    assert ids[1] == ids[0][4:]
    assert rest.state.epoch == 1


def test_a_second_run_of_a_trainer_begins_anew(tmp_path):
    trainer = t.make_trainer(tmp_path, num_train_epochs=1, gradient_accumulation_steps=3)
    trainer.train()
    first = t.entries_of(tmp_path, "train")
    trainer.train()
    second = t.entries_of(tmp_path, "train")[len(first) :]
    for key in ("step", "epoch", "ids"):
        assert [entry[key] for entry in second] == [entry[key] for entry in first]
    assert lm.check_steps([second], SIZE, 3)[0] < 1e-12


def test_a_checkpoint_at_the_end_of_each_epoch_resumes_exactly(tmp_path):
    whole = t.make_trainer(tmp_path, "whole", save_strategy="epoch")
    whole.train()
    entries = t.entries_of(tmp_path, "whole")
    (place,) = [entry["step"] for entry in entries if entry["epoch"] == 1]
    resumed = t.make_trainer(tmp_path, "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{place}"))
    assert t.entries_of(tmp_path, "resumed") == entries[place:]
    assert torch.equal(lm.weights_of(resumed.model), lm.weights_of(whole.model))


def test_the_schedule_goes_on_as_it_was(tmp_path):
    for schedule in ("steps", "samples"):
        folder = tmp_path / schedule
        options = {"odb": {"schedule": schedule}, "lr_scheduler_type": "cosine"}
        t.resume_everywhere(folder, lambda steps: [steps // 3], **options)


def test_a_schedule_by_samples_ends_with_the_last_sample(tmp_path):
    odb = {"schedule": "samples", "steps_per_epoch": 5}  # there are more
    trainer = t.make_trainer(tmp_path, odb=odb, logging_steps=1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    epochs = [0.0, *(entry["epoch"] for entry in trainer.state.log_history if "loss" in entry)]
    assert len(rates) > 10
    assert rates == pytest.approx([t.LR * (1 - epoch / 2) for epoch in epochs[:-1]])


@pytest.mark.parametrize("steps_per_epoch", [None, 3, 100])
def test_epochs_are_whole_whatever_the_estimate(tmp_path, steps_per_epoch):
    ends, totals = [], []

    class Epochs(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            totals.append(state.max_steps)

        def on_epoch_end(self, args, state, control, **kwargs):
            ends.append(state.epoch)

    trainer = t.make_trainer(tmp_path, odb={"steps_per_epoch": steps_per_epoch})
    trainer.add_callback(Epochs())
    trainer.train()
    assert totals == [2 * (steps_per_epoch or 13)]
    entries = t.entries_of(tmp_path, "train")
    lm.check_steps([entries], SIZE, 1)
    assert trainer.state.global_step == trainer.state.max_steps == len(entries)
    assert trainer.args.max_steps == -1
    assert ends == [1.0, 2.0]
    assert trainer.args.ignore_data_skip is False


@pytest.mark.parametrize("steps_per_epoch, words", [(5, "goes on after"), (100, "ends after")])
def test_a_schedule_that_does_not_end_with_the_run_is_warned_of_once(
    tmp_path, steps_per_epoch, words
):
    def warnings_of(**options):
        odb = {"steps_per_epoch": steps_per_epoch, **options.pop("odb", {})}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            t.make_trainer(tmp_path, odb=odb, **options).train()
        return [str(one.message) for one in caught if "optimizer steps" in str(one.message)]

    (message,) = warnings_of()
    assert words in message
    assert 'give `schedule="samples"` or another `steps_per_epoch`' in message
    assert not warnings_of(odb={"schedule": "samples"})
    assert not warnings_of(odb={"steps_per_epoch": None})
    assert not warnings_of(max_steps=40)


def test_arguments_that_are_shares_of_the_whole(tmp_path):
    warmup = "warmup_ratio" if t.BEFORE_5 else "warmup_steps"
    trainer = t.make_trainer(tmp_path, logging_steps=0.2, **{warmup: 0.5})
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [6, 12, 18, 24]
    assert max(entries, key=lambda entry: entry["learning_rate"])["step"] == 12


def test_a_part_of_an_epoch(tmp_path):
    trainer = t.make_trainer(tmp_path, num_train_epochs=0.5)
    trainer.train()
    entries = t.entries_of(tmp_path, "train")
    assert [entry["epoch"] >= 0.5 for entry in entries] == [False] * (len(entries) - 1) + [True]


def test_another_callback_may_end_an_epoch(tmp_path):
    class EndAtThree(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 3

    def run(name, **options):
        trainer = t.make_trainer(tmp_path, name, **options)
        trainer.add_callback(EndAtThree())
        return trainer

    whole = run("whole", save_strategy="epoch")
    whole.train()
    entries = t.entries_of(tmp_path, "whole")
    ids = [index for entry in entries[3:] for group in entry["ids"] for index in group]
    assert sorted(ids) == list(range(SIZE))  # the second epoch, from its beginning
    resumed = run("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert t.entries_of(tmp_path, "resumed") == entries[3:]


def collate_pairs(samples):
    """Texts and their labels, of lengths of their own."""
    rows = {key: [torch.as_tensor(one[key]) for one in samples] for key in ("input_ids", "labels")}
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in rows["input_ids"]], batch_first=True)
    labels = pad(rows["labels"], batch_first=True, padding_value=-100)
    ids = pad(rows["input_ids"], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("wrapper", [torch.compile, torch.nn.DataParallel])
def test_what_a_model_is_within_its_wrappers(wrapper):
    for model, shifts in ((decoder(), True), (encoder_decoder(), False)):
        wrapped = wrapper(model)
        assert model_inputs(wrapped) == model_inputs(model)
        assert model_inputs(wrapped) > {"input_ids", "attention_mask", "labels"}
        assert shifts_labels(wrapped) is shifts


def decoder():
    config = LlamaConfig(
        vocab_size=lm.VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def encoder_decoder():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    sizes["decoder_start_token_id"] = 0
    config = T5Config(vocab_size=lm.VOCABULARY, dropout_rate=0.0, **sizes)
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ["decoder", "packed decoder", "encoder-decoder"])
def test_the_gradient_of_a_model_of_transformers(tmp_path, kind, accumulate):
    torch.manual_seed(0)
    shifts = kind != "encoder-decoder"
    layout = "packed" if kind == "packed decoder" else "padded"
    model = (decoder() if shifts else encoder_decoder()).double()
    reference = copy.deepcopy(model)
    data = [lm.sample_of(index) for index in range(SIZE)]
    if not shifts:  # whose first label is a target
        data = [{**sample, "labels": sample["input_ids"][::2]} for sample in data]
    errors, batches = [], []

    class Check(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            reference.load_state_dict(model.state_dict())

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            reference.zero_grad()
            rows = [row for batch in batches for row in rows_of(batch)]
            labels = [row["labels"][:, 1:] if shifts else row["labels"] for row in rows]
            counts = [int((label != -100).sum()) for label in labels]
            for row, count in zip(rows, counts, strict=True):
                if count:  # The loss of one sample alone is its mean.
                    (reference(**row).loss * count / sum(counts)).backward()
            expected, found = (lm.gradient_of(one) for one in (reference, model))
            errors.append((found - expected).norm() / expected.norm())
            batches.clear()

    def keep(module, args, kwargs):
        if module.training:
            keys = {"input_ids", "labels", "attention_mask", "position_ids"} & {*kwargs}
            assert ("position_ids" in keys) is (layout == "packed")
            batches.append({key: kwargs[key] for key in keys})

    model.register_forward_pre_hook(keep, with_kwargs=True)
    trainer = (ODBTrainer if shifts else ODBSeq2SeqTrainer)(
        model,
        t.arguments(
            tmp_path, max_steps=6, gradient_accumulation_steps=accumulate, seq2seq=not shifts
        ),
        train_dataset=data,
        data_collator=None if shifts else collate_pairs,
        odb=t.config(token_budget=TokenBudget(64, layout=layout)),
    )
    trainer.add_callback(Check())
    trainer.train()
    assert len(errors) == 6
    assert max(errors) < 1e-6  # they compute losses in fp32


def rows_of(batch):
    """Each sample of a batch alone: of a padded one as wide as it was; padding of a packed one."""
    if "position_ids" in batch:
        starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
        parts = itertools.pairwise([*starts, batch["position_ids"].shape[1]])
        return [{key: batch[key][:, a:b] for key in batch} for a, b in parts]
    count = len(batch["input_ids"])
    return [{key: value[row : row + 1] for key, value in batch.items()} for row in range(count)]


def test_evaluation_is_untouched(tmp_path):
    trainer = t.make_trainer(
        tmp_path,
        eval_strategy="epoch",
        per_device_eval_batch_size=2,
        eval_dataset=t.Texts(10),
        data_collator=PaddingCollate(),
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    stock = Trainer(
        trainer.model, trainer.args, eval_dataset=t.Texts(10), data_collator=PaddingCollate()
    )
    assert stock.evaluate()["eval_loss"] == losses[-1]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_evaluation_pads_where_training_does(tmp_path, layout):
    def make(kind, **options):
        args = t.arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2)
        data = [lm.sample_of(index) for index in range(SIZE)]
        return kind(model, args, train_dataset=data, eval_dataset=data[:10], **options)

    model = decoder()
    budget = TokenBudget(64, layout=layout, pad_to_multiple_of=8)
    trainer = make(ODBTrainer, odb=t.config(token_budget=budget))
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(found) == 2
    stock = make(Trainer, data_collator=PaddingCollate(pad_to_multiple_of=8))
    assert stock.evaluate()["eval_loss"] == found[-1]
    expected = stock.predict(stock.eval_dataset).predictions
    assert (trainer.predict(trainer.eval_dataset).predictions == expected).all()


def test_evaluation_keeps_what_is_given_for_it(tmp_path):
    """Also where training alone has a collator of its own."""
    collate = PaddingCollate()
    for options, expected in (
        ({"data_collator": collate, "odb": {"collate_fn": collate_pairs}}, collate),
        ({"odb": {"collate_fn": collate_pairs}}, default_data_collator),
    ):
        trainer = t.make_trainer(
            tmp_path, remove_unused_columns=False, eval_dataset=t.Texts(10), **options
        )
        assert trainer.get_eval_dataloader().collate_fn is expected
        assert trainer.get_test_dataloader(t.Texts(10)).collate_fn is expected


def test_other_callbacks_see_the_epoch_and_whole_checkpoints(tmp_path):
    seen = []

    class Other(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.epoch)

        def on_save(self, args, state, control, **kwargs):
            folder = tmp_path / f"checkpoint-{state.global_step}"
            seen.append(len(list(folder.glob("odb_nodes-rank*"))))

    ODBTrainer(
        lm.Normalizing(),
        t.arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2),
        train_dataset=t.Texts(SIZE),
        odb=t.config(),
        callbacks=[Other()],
    ).train()
    first, second, files = seen
    assert 1 / SIZE <= first < second <= 1
    assert files == 1


def test_the_length_of_a_dict_of_datasets_is_not_that_of_their_samples(tmp_path):
    def run(**odb):
        model = lm.Normalizing()
        halves = {"even": lm.Texts(SIZE)[::2], "odd": lm.Texts(SIZE)[1::2]}
        args = t.arguments(tmp_path, num_train_epochs=1)
        trainer = ODBTrainer(model, args, train_dataset=halves, odb=t.config(**odb))
        trainer.train()
        return trainer, sorted(index for ids in model.seen for index in ids)

    for steps in (3, 100):
        trainer, ids = run(steps_per_epoch=steps)
        assert ids == list(range(SIZE))
        assert trainer.state.epoch == 1
    with pytest.raises(TypeError, match=r"it is `dict`. Give `steps_per_epoch`"):
        run()
    with pytest.raises(ValueError, match="as `dict` does not"):
        run(steps_per_epoch=3, schedule="samples")


class Stream(IterableDataset):
    """Texts in their order, without a length; each rank reads all, and takes its own."""

    def __iter__(self):
        return iter(map(lm.sample_of, range(SIZE)))


def test_epochs_of_a_stream_need_their_steps(tmp_path):
    def make(name, **odb):
        args = t.arguments(tmp_path, save_strategy="steps", save_steps=5)
        options = {"train_dataset": Stream(), "odb": t.config(**odb)}
        trainer = ODBTrainer(lm.Normalizing(), args, **options)
        trainer.add_callback(t.Recorder(trainer, tmp_path / f"{name}-0.jsonl"))
        return trainer

    whole = make("whole", steps_per_epoch=10)
    assert whole.args.max_steps == -1
    with pytest.warns(UserWarning, match="goes on after"):
        whole.train()
    entries = t.entries_of(tmp_path, "whole")
    assert whole.state.epoch == 2
    ids = [index for entry in entries for group in entry["ids"] for index in group]
    assert sorted(ids) == sorted([*range(SIZE)] * 2)
    epochs = [entry["epoch"] for entry in entries]
    assert epochs[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert epochs == sorted(epochs)
    assert 1 not in epochs  # The end of an epoch is seen after its last step.
    resumed = make("resumed", steps_per_epoch=10)
    with pytest.warns(UserWarning, match="goes on after"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert t.entries_of(tmp_path, "resumed") == entries[15:]
    assert torch.equal(lm.weights_of(resumed.model), lm.weights_of(whole.model))
    with pytest.raises(ValueError, match=r"`max_steps`, or `steps_per_epoch` .* as `Stream`"):
        make("refused")


def test_a_trainer_with_arguments_of_its_own_keeps_the_epochs_of_a_stream(tmp_path):
    class Copying(Trainer):
        def __init__(self, model, args, **options):
            super().__init__(model, copy.copy(args), **options)

    class Mine(ODBTrainerMixin, Copying):
        pass

    args = t.arguments(tmp_path, num_train_epochs=1)
    odb = t.config(steps_per_epoch=13)
    trainer = Mine(lm.Normalizing(), args, train_dataset=Stream(), odb=odb)
    assert trainer.args is not args
    assert trainer.args.max_steps == args.max_steps == -1


def test_a_trainer_of_any_class_is_configured(tmp_path):
    class Mine(Trainer):
        pass

    trainer = Mine(lm.Normalizing(), t.arguments(tmp_path), train_dataset=t.Texts(SIZE))
    given = configure_trainer(trainer, token_budget=64, window=12)
    trainer.add_callback(t.Recorder(trainer, tmp_path / "train-0.jsonl"))
    trainer.train()
    assert given is trainer
    assert isinstance(trainer, Mine)
    assert lm.check_steps([t.entries_of(tmp_path, "train")], SIZE, 1)[0] < 1e-12
    with pytest.raises(ValueError, match="has dynamic batches already"):
        configure_trainer(trainer, token_budget=64)


def test_a_run_that_leaves_out_samples_ends_with_a_checkpoint(tmp_path):
    odb = {"token_budget": TokenBudget(20, oversize="drop"), "window": 12}
    options = {"num_train_epochs": 1, "save_strategy": "steps", "odb": odb}
    options |= {"eval_strategy": "steps", "eval_steps": 1000, "eval_dataset": t.Texts(4)}
    options |= {"per_device_eval_batch_size": 1, "data_collator": PaddingCollate()}
    with pytest.warns(UserWarning, match="It is dropped"):
        trainer = t.make_trainer(tmp_path, **options)
        trainer.train()
    assert trainer.state.epoch == 1
    assert trainer.state.max_steps == trainer.state.global_step
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [trainer.state.global_step] * (not t.BEFORE_5)  # as in any run's last step
    place = tmp_path / f"checkpoint-{trainer.state.global_step}"
    assert place.is_dir()
    resumed = t.make_trainer(tmp_path, "resumed", **options)
    resumed.train(resume_from_checkpoint=str(place))
    assert resumed.state.global_step == trainer.state.global_step


def test_the_learning_rate_follows_the_samples_of_a_step(tmp_path):
    scaling = LrScaling(reference_samples=4, rule="linear")
    options = {"lr_scheduler_type": "constant", "odb": {"lr_scaling": scaling}}
    t.make_trainer(tmp_path, **options).train()
    entries = t.entries_of(tmp_path, "train")
    for entry, after in itertools.pairwise(entries):
        before, gradient = torch.tensor(entry["before"]), torch.tensor(entry["gradient"])
        samples = sum(map(len, entry["ids"]))
        expected = before - t.LR * samples / 4 * gradient
        assert torch.allclose(expected, torch.tensor(after["before"]))


def test_the_log_tells_of_the_batches(tmp_path):
    options = {"num_train_epochs": 1, "logging_steps": 1, "gradient_accumulation_steps": 3}
    trainer = t.make_trainer(tmp_path, **options)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(entry["odb/samples_per_step"] for entry in log) == SIZE
    tokens = sum(len(lm.sample_of(index)["input_ids"]) for index in range(SIZE))
    assert sum(entry["odb/real_tokens_per_step"] for entry in log) == tokens
    assert all(0 <= entry["odb/padding_share"] < 0.6 for entry in log[:-1])
    assert [entry["odb/filler_share"] for entry in log[:-1]] == [0.0] * (len(log) - 1)
    assert log[-1]["odb/filler_share"] == pytest.approx(2 / 3)  # of 13 batches, 1 is left


def test_metrics_go_to_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    options = {"logging_dir": str(tmp_path / "events")} if t.BEFORE_5 else {}
    t.make_trainer(tmp_path, num_train_epochs=1, report_to=["tensorboard"], **options).train()
    (path,) = (tmp_path / "events").rglob("events*")
    names = EventAccumulator(str(path)).Reload().Tags()["scalars"]
    scalars = {name.removeprefix("train/") for name in names}
    assert {"loss", "odb/padding_share", "odb/real_tokens_per_s", "odb/rank_balance"} <= scalars


def test_workers_change_nothing(tmp_path):
    options = {"num_train_epochs": 1, "gradient_accumulation_steps": 2}
    t.make_trainer(tmp_path, "alone", **options).train()
    entries = t.resume_everywhere(
        tmp_path, lambda steps: [steps // 2], dataloader_num_workers=1, **options
    )
    assert entries == t.entries_of(tmp_path, "alone")


def test_nothing_is_kept_for_a_log_that_nobody_wants(tmp_path):
    kept = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            kept.append(len(trainer.odb_run.meter))

    trainer = t.make_trainer(tmp_path, odb={"log_metrics": False}, max_steps=3)
    trainer.add_callback(Look())
    trainer.train()
    assert kept == [0, 0, 0]


@pytest.mark.parametrize(
    "name, value", [("num_train_epochs", 5), ("gradient_accumulation_steps", 2)]
)
def test_a_search_over_what_the_batches_are_made_of_is_refused(tmp_path, name, value):
    trainer = t.make_trainer(tmp_path)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: {"learning_rate": 0.1, name: value}
    with pytest.raises(ValueError, match=f"`{name}` must stay as it was"):
        trainer.train(trial=SimpleNamespace(params={}))


def test_a_schedule_of_deepspeed_that_would_be_told_a_bound_is_refused(tmp_path, monkeypatch):
    by_epochs, by_steps = t.make_trainer(tmp_path), t.make_trainer(tmp_path, max_steps=1)
    plugin = SimpleNamespace(deepspeed_config={"scheduler": {"type": "WarmupDecayLR"}})
    monkeypatch.setattr(type(by_steps.accelerator.state), "deepspeed_plugin", plugin)
    check_trainer(by_steps, by_steps.odb)
    with pytest.raises(ValueError, match="DeepSpeed config has a `scheduler`"):
        by_epochs.train()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"auto_find_batch_size": True}, "`auto_find_batch_size` must be False"),
        (
            {"group_by_length": True}
            if t.BEFORE_5
            else {"train_sampling_strategy": "group_by_length"},
            "`train_sampling_strategy` must be",
        ),
        ({"max_steps": 3, "odb": {"schedule": "samples"}}, "`schedule` must be"),
        ({"odb": {"uneven": "join"}}, "`uneven` must be"),
        ({"odb": {"token_budget": 0}}, "`token_budget` must be"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        t.make_trainer(tmp_path, **options)


def test_a_checkpoint_without_a_state_is_refused(tmp_path):
    trainer = t.make_trainer(tmp_path, save_strategy="steps", save_steps=3, num_train_epochs=1)
    trainer.train()
    (tmp_path / "checkpoint-3" / "odb_nodes-rank00000-of-00001.pt").unlink()
    with pytest.raises(FileNotFoundError, match="has no state of a loader: .* `save_only_model`"):
        t.make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    with pytest.raises(FileNotFoundError, match="is no folder"):
        t.make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    changed = "`accumulate` was 1 when saved.* is `gradient_accumulation_steps`.* `from_pretrained`"
    with pytest.raises(StateError, match=changed):
        t.make_trainer(tmp_path, gradient_accumulation_steps=2).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-6")
        )


def test_a_run_resumes_with_a_smaller_budget_where_the_config_allows_it(tmp_path):
    whole = t.make_trainer(
        tmp_path, "whole", save_strategy="steps", save_steps=3, num_train_epochs=1
    )
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(StateError, match="`change_budget` is a field of the `ODBConfig`"):
        t.make_trainer(tmp_path, odb={"token_budget": 20}).train(resume_from_checkpoint=checkpoint)
    smaller = {"token_budget": 20, "change_budget": True}
    options = {"num_train_epochs": 1, "odb": smaller}
    resumed = t.make_trainer(tmp_path, "resumed", **options)
    resumed.train(resume_from_checkpoint=checkpoint)
    before, after = t.entries_of(tmp_path, "whole"), t.entries_of(tmp_path, "resumed")
    found = [one for entry in (*before[:3], *after) for batch in entry["ids"] for one in batch]
    assert sorted(found) == [*range(40)]
    assert resumed.state.global_step > whole.state.global_step
    assert resumed.state.epoch == 1


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    t.make_trainer(tmp_path, save_strategy="steps", save_steps=3, num_train_epochs=1).train()
    early, late = (tmp_path / f"checkpoint-{step}" for step in (3, 6))
    shutil.copy(early / "odb_nodes-rank00000-of-00001.pt", late)
    with pytest.raises(StateError, match="resumes at optimizer step 6, but .* saved at step 3"):
        t.make_trainer(tmp_path).train(resume_from_checkpoint=str(late))


def test_a_trainer_that_makes_its_own_batches_is_refused(tmp_path):
    class Stock(Trainer):
        def get_train_dataloader(self):
            return [lm.sample_of(0)]

    class Derived(Stock):
        pass

    class Above(ODBTrainer):
        def get_train_dataloader(self):
            return [lm.sample_of(0)]

    class Below(ODBTrainerMixin, Stock):
        pass

    class Asking(ODBTrainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    stock = Stock(lm.Normalizing(), t.arguments(tmp_path), train_dataset=t.Texts(SIZE))
    with pytest.raises(ValueError, match="`Stock` must not override `get_train_dataloader`"):
        configure_trainer(stock, token_budget=64)
    assert type(stock) is Stock
    with pytest.raises(ValueError, match="`Stock` must not override `get_train_dataloader`"):
        t.make_trainer(tmp_path, kind=Below)
    derived = Derived(lm.Normalizing(), t.arguments(tmp_path), train_dataset=t.Texts(SIZE))
    message = "`Derived` must not .* base class `Stock` does.*`ODBDataLoader`: see docs/pytorch.md"
    with pytest.raises(ValueError, match=message):
        configure_trainer(derived, token_budget=64)
    with pytest.raises(ValueError, match="`get_train_dataloader` of `Above` must return"):
        t.make_trainer(tmp_path, kind=Above).train()
    t.make_trainer(tmp_path, kind=Asking, max_steps=1).train()


def test_an_encoder_decoder_needs_a_collator(tmp_path):
    def make(**options):
        odb = t.config(**options.pop("odb", {}))
        args = t.arguments(tmp_path, seq2seq=True)
        ODBSeq2SeqTrainer(encoder_decoder(), args, train_dataset=t.Texts(4), odb=odb, **options)

    with pytest.raises(ValueError, match=r"`DataCollatorForSeq2Seq\(tokenizer, model=model\)`"):
        make()
    make(data_collator=collate_pairs)
    make(odb={"collate_fn": collate_pairs})


def test_a_length_that_nobody_knows_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(TypeError, match="Measure progress in samples"):
        len(t.make_trainer(tmp_path).get_train_dataloader())


def test_the_config_is_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        ODBConfig(64)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        ODBConfig(token_budget=64).window = 3
    assert issubclass(ODBTrainer, ODBTrainerMixin)


INVALID = [
    ("token_budget", 0, ValueError),
    ("window", 0, ValueError),
    ("window", -1, ValueError),
    ("window", 1.5, TypeError),
    ("window", True, TypeError),
    ("window", "Auto", ValueError),
    ("round_size", 0, ValueError),
    ("uneven", "join", ValueError),
    ("collate_fn", 3, TypeError),
    ("process_fn", 3, TypeError),
    ("observe", "len", TypeError),
    ("prefetch", -1, ValueError),
    ("state", "x", ValueError),
    ("workers", 4, TypeError),
    ("collate_in", "threads", ValueError),
    ("timeout_s", 0, ValueError),
    ("shift_labels", "x", TypeError),
    ("loss_is", "x", ValueError),
    ("steps_per_epoch", 0, ValueError),
    ("estimate_samples", 0, ValueError),
    ("schedule", "x", ValueError),
    ("lr_scaling", "sqrt", TypeError),
    ("log_metrics", 1, TypeError),
    ("ledger", 3, TypeError),
    ("monitor", 3, TypeError),
    ("exclude", 3, TypeError),
    ("dearest_first", -1, ValueError),
    ("tasks", "chat", TypeError),
    ("diversity", 1.5, ValueError),
    ("on_oom", "x", ValueError),
    ("guard_above", 2, ValueError),
    ("shrink", 2.0, ValueError),
    ("change_budget", 1, TypeError),
    ("empty_cache", "x", ValueError),
    ("memory_share", 1.1, ValueError),
    ("memory_meter", 3, TypeError),
]


@pytest.mark.parametrize(("field", "value", "error"), INVALID)
def test_a_field_of_the_config_that_is_not_valid_is_named(field, value, error):
    with pytest.raises(error, match=rf"^`{field}` must .*but is {value!r}"):
        ODBConfig(**{"token_budget": 64, field: value})


def test_each_field_of_the_config_is_checked():
    assert {field for field, *_ in INVALID} == {one.name for one in fields(ODBConfig)}


# --- two ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_resume_exactly_with_the_gradient_of_one(tmp_path, accumulate, exhaustive):
    body = """
        folder, accumulate, exhaustive = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
        places = None if exhaustive else lambda steps: [1, steps // 2 - 1, steps // 2, steps]
        found = []
        for model, size, budget in (("Normalizing", 37, 64), ("Averaging", 5, 4)):
            options = dict(model=model, size=size, gradient_accumulation_steps=accumulate)
            options["odb"] = dict(token_budget=budget)
            entries = t.resume_everywhere(f"{folder}/{model}", places, **options)
            found.append(t.language_models.check_steps(r.gathered(entries), size, accumulate))
        r.finish(found)
    """
    (first, second) = run_ranks(
        tmp_path,
        program(body),
        2,
        str(tmp_path),
        str(accumulate),
        str(exhaustive),
        timeout_s=250,
        warm=WARM,
    )
    assert first == second
    assert all(error < 1e-12 for error, _, _ in first)
    _, (_, _, fillers) = first
    assert fillers


def test_two_ranks_probe_the_same_micro_step(tmp_path):
    body = """
        from odb_nodes.integrations.huggingface import weighing as w
        found, steps, find, probe = [], [], w.LossWeigher._find_normalizer, w.find_normalizer

        def find_noting(self, batches, of_ranks):
            steps.append(batches)
            find(self, batches, of_ranks)

        def probe_noting(loss_of, batch, **options):
            found.append([one is batch for one in steps[-1]].index(True))
            return probe(loss_of, batch, **options)

        w.LossWeigher._find_normalizer, w.find_normalizer = find_noting, probe_noting
        options = dict(gradient_accumulation_steps=4, max_steps=1, size=24)
        for seed in range(5):  # Batches of one sample: some have no targets.
            odb = dict(token_budget=4)
            t.make_trainer(f"{sys.argv[1]}/{seed}", seed=seed, odb=odb, **options).train()
        r.finish(found)
    """
    first, second = run_ranks(tmp_path, program(body), 2, str(tmp_path), warm=WARM)
    assert len(first) == 5
    assert first == second


def test_two_killed_ranks_go_on_from_their_last_checkpoint(tmp_path):
    body = "t.main()"

    def job(name, **options):
        given = {"folder": str(tmp_path / "run"), "name": name, "num_train_epochs": 1, **options}
        given |= {"gradient_accumulation_steps": 2, "odb": {"ledger": str(tmp_path / "ledger")}}
        return RankJob(tmp_path, program(body), 2, json.dumps(given), init=False, warm=WARM)

    with job("killed", save_strategy="steps", save_steps=2, kill_at=3) as killed:
        assert [code for code, *_ in killed.results(200)] == [-signal.SIGKILL] * 2
    with job("resumed", resume=True) as resumed:
        outputs = resumed.finish(200)
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith('{"')]
        found, expected = map(json.loads, lines)
        assert found == expected
        entries = lm.read(tmp_path / "run" / f"whole-{rank}.jsonl")
        assert lm.read(tmp_path / "run" / f"resumed-{rank}.jsonl") == entries[2:]
    check_ledger(tmp_path / "ledger", SIZE, attempts=2, epochs=1)


def program(body):
    """A program of ranks, with the names of `trainer_jobs` as `t`."""
    from textwrap import dedent

    return IMPORTS + dedent(body)
