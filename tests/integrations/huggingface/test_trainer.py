"""The `Trainer` of transformers alone: its losses, schedules, evaluation and arguments."""

import copy
import itertools
import json
import signal
import warnings
from functools import partial

import datasets
import language_models as lm
import pytest
import torch
import trainers
from torch.utils.data import IterableDataset
from transformers import (
    BartConfig,
    BartForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from odb_nodes import JsonlSource, PaddingCollate, Skipped, TokenBudget
from odb_nodes.integrations.huggingface import (
    LrScaling,
    ODBSeq2SeqTrainer,
    ODBTrainer,
    ODBTrainerMixin,
)
from odb_nodes.training.monitor import Monitor, read_run

SIZE = 40


# --- the loss -------------------------------------------------------------------------------------


class Divided(ODBTrainer):
    loss_is_scaled_for_ga = False  # of later versions


class Telling(ODBTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch=torch.tensor(7))


ALONE = {"odb": {"token_budget": TokenBudget(64, max_samples=1)}, "num_train_epochs": 1}
LOSSES = [
    {"model": "Normalizing"},
    {"model": "Averaging"},
    {"model": "Ignoring"},
    {"model": "Plain", "compute_loss_func": lm.sum_over_items},
    {"model": "Plain", "compute_loss_func": lm.mean_over_batch},
    {"model": "Normalizing", "kind": Divided},
    {"model": "Averaging", "kind": Divided},
    {"model": "Normalizing", "kind": Telling},
    {"model": "Averaging", **ALONE},  # some batches have no targets
    {"model": "Ignoring", **ALONE},
]


@pytest.mark.parametrize("options", LOSSES)
def test_the_gradient_is_that_of_the_mean_over_all_tokens(tmp_path, options):
    trainers.make_trainer(tmp_path, gradient_accumulation_steps=3, **options).train()
    assert lm.check_steps([trainers.entries_of(tmp_path)], SIZE) < 1e-12


class Alone(ODBTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs)["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "Twice"}, "scaled twice, or not at all"),
        ({"model": "Undivided"}, "scaled twice, or not at all"),
        ({"model": "Averaging", "kind": Alone}, r"`Alone` overrides it"),
    ],
)
def test_a_loss_that_is_scaled_twice_or_not_at_all_is_refused(tmp_path, options, message):
    trainer = trainers.make_trainer(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def gpt2():
    """A causal model whose name is not in transformers' table of losses."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": lm.VOCABULARY}
    sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def collate_pairs(samples):
    """Texts whose labels have other lengths than their inputs."""
    rows = {
        key: [torch.as_tensor(sample[key]) for sample in samples] for key in ("input_ids", "labels")
    }
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in rows["input_ids"]], batch_first=True)
    labels = pad(rows["labels"], batch_first=True, padding_value=-100)
    ids = pad(rows["input_ids"], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def bart():
    """A decoder alone, whose loss does not shift the labels."""
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return BartForCausalLM(BartConfig(**sizes, vocab_size=lm.VOCABULARY, dropout=0.0))


@pytest.mark.parametrize("kind", ["decoder", "gpt2", "packed decoder", "encoder-decoder", "bart"])
def test_the_gradient_of_a_model_of_transformers(tmp_path, kind):
    shifts = kind not in ("encoder-decoder", "bart")
    layout = "packed" if kind == "packed decoder" else "padded"
    make = {"gpt2": gpt2, "bart": bart, "encoder-decoder": trainers.encoder_decoder}.get(
        kind, trainers.decoder
    )
    model = make().double()
    data = lm.Texts(SIZE)[:]
    if kind == "bart":
        data = [{**sample, "labels": sample["input_ids"]} for sample in data]
    elif not shifts:  # whose first label is a target
        data = [{**sample, "labels": sample["input_ids"][::2]} for sample in data]

    def expect(reference, batches):
        assert all(("position_ids" in batch) is (layout == "packed") for batch in batches)
        rows = [row for batch in batches for row in rows_of(batch)]
        labels = [row["labels"][:, 1:] if shifts else row["labels"] for row in rows]
        counts = [int((label != -100).sum()) for label in labels]
        for row, count in zip(rows, counts, strict=True):
            if count:  # The loss of one sample alone is its mean.
                (reference(**row).loss * count / sum(counts)).backward()

    has_pairs = kind == "encoder-decoder"
    trainer = (ODBSeq2SeqTrainer if has_pairs else ODBTrainer)(
        model,
        trainers.arguments(tmp_path, max_steps=5, gradient_accumulation_steps=3),
        train_dataset=data,
        data_collator=collate_pairs if has_pairs else None,
        odb=trainers.config(token_budget=TokenBudget(64, layout=layout)),
    )
    keys = ("input_ids", "labels", "attention_mask", "position_ids")
    check = trainers.GradientCheck(trainer, expect, *keys)
    trainer.train()
    assert len(check.errors) == 5
    assert max(check.errors) < 1e-6  # they compute losses in fp32


def rows_of(batch):
    """Each sample of a batch alone: of a padded one as wide as it was; padding of a packed one."""
    if "position_ids" in batch:
        starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
        parts = itertools.pairwise([*starts, batch["position_ids"].shape[1]])
        return [{key: batch[key][:, a:b] for key in batch} for a, b in parts]
    count = len(batch["input_ids"])
    return [{key: value[row : row + 1] for key, value in batch.items()} for row in range(count)]


# --- when a run ends, and goes on -----------------------------------------------------------------


def test_max_steps_ends_within_an_epoch(tmp_path):
    options = {"max_steps": 9, "gradient_accumulation_steps": 2, "size": 30}
    trainers.make_trainer(tmp_path, save_steps=4, **options).train()
    entries = trainers.entries_of(tmp_path)
    assert [entry["step"] for entry in entries] == list(range(1, 10))
    assert 1 < entries[-1]["progress"] < 2
    assert trainers.resume(tmp_path, "rest", 4, **options)[0] == entries[4:]


def test_a_run_of_so_many_steps_goes_on_by_epochs(tmp_path):
    trainers.make_trainer(tmp_path, "whole", num_train_epochs=1).train()
    trainers.make_trainer(tmp_path, "first", max_steps=4, save_steps=4).train()
    entries, resumed = trainers.resume(tmp_path, "rest", 4, num_train_epochs=1)
    assert trainers.trained_ids(entries) == trainers.trained_ids(
        trainers.entries_of(tmp_path, "whole")[4:]
    )
    assert resumed.state.epoch == 1


def test_a_part_of_an_epoch(tmp_path):
    trainers.make_trainer(tmp_path, num_train_epochs=0.5).train()
    progress = [entry["progress"] >= 0.5 for entry in trainers.entries_of(tmp_path)]
    assert progress == [False] * (len(progress) - 1) + [True]


@pytest.mark.filterwarnings("ignore:the run ends after 16 optimizer steps:UserWarning")
def test_another_callback_may_end_an_epoch(tmp_path):
    class EndAtThree(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 3

    options = {"callbacks": [EndAtThree()]}
    trainers.make_trainer(tmp_path, save_strategy="epoch", **options).train()
    entries = trainers.entries_of(tmp_path)
    assert sorted(trainers.trained_ids(entries[3:])) == list(range(SIZE))  # the second epoch
    assert trainers.resume(tmp_path, "resumed", 3, **options)[0] == entries[3:]


@pytest.mark.parametrize("steps_per_epoch", [3, 100])
def test_epochs_are_whole_whatever_the_estimate(tmp_path, steps_per_epoch):
    ends, totals = [], []

    class Epochs(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            totals.append(state.max_steps)

        def on_epoch_end(self, args, state, control, **kwargs):
            ends.append(state.epoch)

    trainer = trainers.make_trainer(
        tmp_path, odb={"steps_per_epoch": steps_per_epoch}, callbacks=[Epochs()]
    )
    with pytest.warns(UserWarning, match="optimizer steps"):
        trainer.train()
    assert totals == [2 * steps_per_epoch]
    entries = trainers.entries_of(tmp_path)
    lm.check_steps([entries], SIZE)
    assert trainer.state.global_step == trainer.state.max_steps == len(entries)
    assert trainer.args.max_steps == -1
    assert ends == [1.0, 2.0]
    assert trainer.args.ignore_data_skip is False


@pytest.mark.filterwarnings("ignore:(no token of|of the 40 samples|sample .* exceeds):UserWarning")
def test_a_run_that_leaves_out_samples_ends_with_a_checkpoint(tmp_path):
    odb = {"token_budget": TokenBudget(20, oversize="drop"), "window": 12}
    options = {"num_train_epochs": 1, "save_strategy": "steps", "odb": odb}
    options |= {"eval_strategy": "steps", "eval_steps": 1000, "eval_dataset": lm.Texts(4)}
    options |= {"per_device_eval_batch_size": 1, "data_collator": PaddingCollate()}
    trainer = trainers.make_trainer(tmp_path, **options)
    trainer.train()
    steps = trainer.state.global_step
    assert trainer.state.epoch == 1
    assert trainer.state.max_steps == steps
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [steps] * (not trainers.BEFORE_5)  # as in any run's last step
    _, resumed = trainers.resume(tmp_path, "resumed", steps, **options)
    assert resumed.state.global_step == steps


def test_epochs_of_a_stream_need_their_steps(tmp_path):
    options = {"train_dataset": trainers.Stream(), "odb": {"steps_per_epoch": 10}}
    with pytest.raises(ValueError, match=r"`max_steps`, or `steps_per_epoch` .* as `Stream`"):
        trainers.make_trainer(tmp_path, train_dataset=trainers.Stream())
    whole = trainers.make_trainer(tmp_path, save_steps=5, **options)
    assert whole.args.max_steps == -1
    with pytest.warns(UserWarning, match="continues after"):
        whole.train()
    entries = trainers.entries_of(tmp_path)
    assert whole.state.epoch == 2
    assert sorted(trainers.trained_ids(entries)) == sorted([*range(SIZE)] * 2)
    progress = [entry["progress"] for entry in entries]
    assert progress[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert progress == sorted(progress)
    assert 1 not in progress  # The end of an epoch is seen after its last step.
    with pytest.warns(UserWarning, match="continues after"):
        later, resumed = trainers.resume(tmp_path, "resumed", 15, **options)
    assert later == entries[15:]
    assert torch.equal(lm.weights_of(resumed.model), lm.weights_of(whole.model))


def test_epochs_of_json_lines_are_those_of_a_list_of_the_records(tmp_path):
    data = [{**record, "input_ids": record["input_ids"].tolist()} for record in lm.Texts(SIZE)[:]]
    data = [{**record, "labels": record["labels"].tolist()} for record in data]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in data))
    trainers.make_trainer(tmp_path, train_dataset=data).train()
    whole = trainers.make_trainer(tmp_path, "lines", train_dataset=JsonlSource(path), save_steps=5)
    whole.train()
    assert whole.state.epoch == 2
    assert trainers.entries_of(tmp_path, "lines") == trainers.entries_of(tmp_path)
    later, resumed = trainers.resume(tmp_path, "rest", 10, train_dataset=JsonlSource(path))
    assert later == trainers.entries_of(tmp_path)[10:]
    assert torch.equal(lm.weights_of(resumed.model), lm.weights_of(whole.model))
    samples = trainers.make_trainer(
        tmp_path, "samples", train_dataset=JsonlSource(path), odb={"schedule": "samples"}
    )
    samples.train()
    assert trainers.entries_of(tmp_path, "samples")[-1]["lr"] < 0.1 * lm.LR


def test_a_trainer_with_arguments_of_its_own_keeps_the_epochs_of_a_stream(tmp_path):
    class Copying(Trainer):
        def __init__(self, model, args, **options):
            super().__init__(model, copy.copy(args), **options)

    class Mine(ODBTrainerMixin, Copying):
        pass

    args, odb = (
        trainers.arguments(tmp_path, num_train_epochs=1),
        trainers.config(steps_per_epoch=13),
    )
    trainer = Mine(lm.Normalizing(), args, train_dataset=trainers.Stream(), odb=odb)
    assert trainer.args is not args
    assert trainer.args.max_steps == args.max_steps == -1


def test_the_length_of_a_dict_of_datasets_is_not_that_of_their_samples(tmp_path):
    def run(name, **odb):
        halves = {"even": lm.Texts(SIZE)[::2], "odd": lm.Texts(SIZE)[1::2]}
        options = {"num_train_epochs": 1, "train_dataset": halves, "odb": odb}
        trainers.make_trainer(tmp_path, name, **options).train()

    with pytest.warns(UserWarning, match="continues after"):
        run("run", steps_per_epoch=3)
    assert sorted(trainers.trained_ids(trainers.entries_of(tmp_path))) == list(range(SIZE))
    assert trainers.entries_of(tmp_path)[-1]["progress"] < 1.01
    with pytest.raises(TypeError, match=r"it is `dict`. Give `steps_per_epoch`"):
        run("none")
    with pytest.raises(ValueError, match="as of a `dict`"):
        run("samples", steps_per_epoch=3, schedule="samples")


# --- schedules ------------------------------------------------------------------------------------


def test_a_schedule_by_samples_ends_with_the_last_sample_and_resumes(tmp_path):
    odb = {"schedule": "samples", "steps_per_epoch": 5}  # there are more
    trainers.make_trainer(tmp_path, save_steps=4, odb=odb).train()
    entries = trainers.entries_of(tmp_path)
    done = [0.0, *(entry["progress"] for entry in entries)]
    assert len(entries) > 10
    assert [entry["lr"] for entry in entries] == pytest.approx(
        [trainers.LR * (1 - x / 2) for x in done[:-1]]
    )
    assert trainers.resume(tmp_path, "resumed", 8, odb=odb)[0] == entries[8:]


@pytest.mark.parametrize("steps_per_epoch, words", [(5, "continues after"), (100, "ends after")])
def test_a_schedule_that_does_not_end_with_the_run_is_warned_of_once(
    tmp_path, steps_per_epoch, words
):
    def warnings_of(**options):
        odb = {"steps_per_epoch": steps_per_epoch, **options.pop("odb", {})}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainers.make_trainer(tmp_path, odb=odb, **options).train()
        return [
            str(warning.message) for warning in caught if "optimizer steps" in str(warning.message)
        ]

    (message,) = warnings_of()
    assert words in message and 'give `schedule="samples"`' in message
    assert not warnings_of(odb={"schedule": "samples"})
    assert not warnings_of(max_steps=40)


def test_arguments_that_are_shares_of_the_whole(tmp_path):
    warmup = "warmup_ratio" if trainers.BEFORE_5 else "warmup_steps"
    trainer = trainers.make_trainer(tmp_path, logging_steps=0.2, **{warmup: 0.5})
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [6, 12, 18, 24]
    assert max(entries, key=lambda entry: entry["learning_rate"])["step"] == 12


def test_the_learning_rate_follows_the_samples_of_a_step(tmp_path):
    scaling = LrScaling(reference_samples=4, rule="linear")
    options = {"lr_scheduler_type": "constant", "odb": {"lr_scaling": scaling}}
    trainers.make_trainer(tmp_path, **options).train()
    for entry, after in itertools.pairwise(trainers.entries_of(tmp_path)):
        before, gradient = torch.tensor(entry["before"]), torch.tensor(entry["gradient"])
        samples = sum(map(len, entry["ids"]))
        expected = before - trainers.LR * samples / 4 * gradient
        assert torch.allclose(expected, torch.tensor(after["before"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run ends after:UserWarning")
def test_the_learning_rate_goes_on_from_where_it_was_at_the_pace_of_the_ranks(tmp_path):
    """A schedule by steps is made for 2 ranks; one rank takes twice as many steps."""
    options = {"folder": tmp_path / "run", "size": 60, "accumulate": 2, "epochs": 1}
    with trainers.jobs_on_ranks(
        "Transformers", 2, {**options, "name": "killed", "save_every": 2, "kill_at": 4}
    ) as job:
        assert -signal.SIGKILL in [code for code, *_ in job.results(200)]
    trainers.train("Transformers", name="on", resume=2, **options)
    before, after = (
        [entry["lr"] for entry in trainers.Job(name=name, **options).entries()]
        for name in ("killed", "on")
    )
    step = before[0] - before[1]  # it falls along a line
    expected = [before[0] - step * (2 + n / 2) for n in range(len(after))]
    assert len(after) > 3 and step > 0
    assert after == pytest.approx([max(lr, 0) for lr in expected], rel=1e-6, abs=1e-12)


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_evaluation_is_the_stock_trainer_s_and_pads_where_training_does(tmp_path, layout):
    def make(kind, **options):
        args = trainers.arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2)
        data = lm.Texts(SIZE)[:]
        return kind(model, args, train_dataset=data, eval_dataset=data[:10], **options)

    model = trainers.decoder()
    budget = TokenBudget(64, layout=layout, pad_to_multiple_of=8)
    trainer = make(ODBTrainer, odb=trainers.config(token_budget=budget))
    trainer.train()
    losses = trainers.logs_of(trainer, "eval_loss")
    assert len(losses) == 2
    stock = make(Trainer, data_collator=PaddingCollate(pad_to_multiple_of=8))
    assert stock.evaluate()["eval_loss"] == losses[-1]
    expected = stock.predict(stock.eval_dataset).predictions
    assert (trainer.predict(trainer.eval_dataset).predictions == expected).all()


def test_evaluation_keeps_what_is_given_for_it(tmp_path):
    """Even if only training has its own collator."""
    collate = PaddingCollate()
    for options, expected in (
        ({"data_collator": collate, "odb": {"collate_fn": collate_pairs}}, collate),
        ({"odb": {"collate_fn": collate_pairs}}, default_data_collator),
    ):
        options |= {"remove_unused_columns": False, "eval_dataset": lm.Texts(10)}
        trainer = trainers.make_trainer(tmp_path, **options)
        assert trainer.get_eval_dataloader().collate_fn is expected
        assert trainer.get_test_dataloader(lm.Texts(10)).collate_fn is expected


def tokenize(raw):
    return {"input_ids": raw["tokens"], "labels": raw["tokens"]}


RAW = [{"tokens": [1 + n % 5] * (n % 9 + 2), "label": n % 2} for n in range(SIZE)]


class RawStream(IterableDataset):
    def __iter__(self):
        return iter(RAW[:10])


EVALUATED = {
    "list": lambda: RAW[:10],
    "table": lambda: datasets.Dataset.from_list(RAW[:10]),
    "stream": RawStream,
    "processed": lambda: [tokenize(raw) for raw in RAW[:10]],
    "processed table": lambda: datasets.Dataset.from_list([tokenize(raw) for raw in RAW[:10]]),
}


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in EVALUATED), ("list", 2)])
def test_raw_samples_of_evaluation_are_processed_as_those_of_training(tmp_path, kind, workers):
    evaluated = EVALUATED[kind]()
    args = trainers.arguments(
        tmp_path,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        dataloader_num_workers=workers,
    )
    options = {"train_dataset": RAW, "eval_dataset": {"some": evaluated, "more": evaluated}}
    trainer = ODBTrainer(
        trainers.decoder(), args, odb=trainers.config(process_fn=tokenize), **options
    )
    trainer.train()
    processed = [tokenize(raw) for raw in RAW[:10]]
    stock = Trainer(trainer.model, args, eval_dataset=processed, data_collator=PaddingCollate())
    expected = stock.evaluate()["eval_loss"]
    assert (
        trainers.logs_of(trainer, "eval_some_loss")
        == trainers.logs_of(trainer, "eval_more_loss")
        == [expected]
    )
    predicted = trainer.predict(evaluated).predictions
    assert (predicted == stock.predict(processed).predictions).all()


@pytest.mark.parametrize(
    ("process_fn", "match"),
    [
        (lambda raw: Skipped("empty"), "must process all raw samples of evaluation, .*'empty'"),
        (
            {"a": tokenize, "b": tokenize},
            "returned None for .*'tokens': .*a dict with the same names",
        ),
    ],
)
def test_what_evaluation_cannot_process_is_refused_by_name(tmp_path, process_fn, match):
    args = trainers.arguments(tmp_path, max_steps=1)
    odb = trainers.config(process_fn=process_fn)
    trainer = ODBTrainer(trainers.decoder(), args, train_dataset=RAW, eval_dataset=RAW[:2], odb=odb)
    with pytest.raises(ValueError, match=match):
        trainer.evaluate()


# --- callbacks, logs, workers ---------------------------------------------------------------------


def test_other_callbacks_see_the_epoch_and_whole_checkpoints(tmp_path):
    seen = []

    class Other(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.epoch)

        def on_save(self, args, state, control, **kwargs):
            folder = tmp_path / f"checkpoint-{state.global_step}"
            seen.append(len(list(folder.glob("odb_nodes-rank*"))))

    trainers.make_trainer(tmp_path, max_steps=2, save_steps=2, callbacks=[Other()]).train()
    first, second, files = seen
    assert 1 / SIZE <= first < second <= 1
    assert files == 1


def test_a_monitor_has_the_norm_and_rate_of_the_log_and_leaves_nothing_behind(tmp_path):
    class Failing(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    monitor = Monitor(tmp_path / "run", every=1, progress=False)
    options = {"max_grad_norm": 1.0, "logging_steps": 1, "callbacks": [Failing()]}
    trainer = trainers.make_trainer(tmp_path, odb={"monitor": monitor}, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    steps = read_run(tmp_path / "run").steps
    norms = [entry["last"]["grad_norm"] for entry in steps]
    assert len(norms) == 4 and norms == pytest.approx(trainers.logs_of(trainer, "grad_norm"))
    assert [entry["last"]["lr"] for entry in steps] == [
        entry["lr"] for entry in trainers.entries_of(tmp_path)
    ]


@pytest.mark.parametrize("saving", [{}, {"save_steps": 1}])
def test_a_monitor_has_each_step_also_where_the_trainer_logs_few(tmp_path, saving):
    options = {"logging_steps": 2, "max_steps": 4, "odb": {"monitor": None}}

    def records(train, **more):
        monitor = Monitor(tmp_path / "run", every=1, progress=False)
        train(**options | {"odb": {"monitor": monitor}} | more)
        steps = read_run(tmp_path / "run").steps
        return [(record["step"], "grad_norm" in record["last"]) for record in steps]

    expected = [(1, False), (2, True), (3, False), (4, True)]
    make = partial(trainers.make_trainer, tmp_path)
    assert records(lambda **arguments: make(**arguments).train(), **saving) == expected
    if saving:
        resumed = records(lambda **arguments: trainers.resume(tmp_path, "rest", 1, **arguments))
        assert resumed == expected


def test_workers_change_nothing(tmp_path):
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    trainers.make_trainer(tmp_path, "alone", **options).train()
    trainers.make_trainer(tmp_path, "beside", dataloader_num_workers=1, **options).train()
    assert trainers.entries_of(tmp_path, "beside") == trainers.entries_of(tmp_path, "alone")


# --- two ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_check_a_loss_together_and_weigh_it(tmp_path):
    body = """
        options = dict(gradient_accumulation_steps=4, num_train_epochs=1)
        for number, (model, size, budget) in enumerate((
            ("Ignoring", 37, 64), ("Normalizing", 37, 64), *[("Normalizing", 24, 4)] * 2
        )):  # Batches of one sample: some have no targets.
            folder, odb = f"{sys.argv[1]}/{number}", dict(token_budget=budget)
            options |= dict(model=model, size=size, seed=number, odb=odb)
            trainers.make_trainer(folder, **options).train()
        r.finish(None)
    """
    with trainers.on_ranks(tmp_path, 2, body, str(tmp_path)) as job:
        job.finish(200)
    for number, size in enumerate((37, 37, 24, 24)):
        folder = tmp_path / f"{number}"
        entries = [lm.read(folder / f"run-{rank}.jsonl") for rank in range(2)]
        assert lm.check_steps(entries, size) < 1e-12
