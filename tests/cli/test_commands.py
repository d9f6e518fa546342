"""What each command does; its figures are tested with the functions of `tools`."""

import gzip
import itertools
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
from ledgers import SIZE, info_of, pieces_of, record, write_run
from monitors import loader_of, train

from odb_nodes import ODBDataLoader, TokenBudget, audit, save_rank_state, save_state
from odb_nodes.cli import main
from odb_nodes.tools.estimate import table_of_loader
from odb_nodes.tools.inspection import read_inspections
from odb_nodes.tools.lengths import LengthTable, observe_lengths
from odb_nodes.tools.profile import profile
from odb_nodes.tools.simulate import lognormal_lengths, simulate
from odb_nodes.training.monitor import Monitor, report

LENGTHS = lognormal_lengths(300, cv=1.0, mean_tokens=90, longest_tokens=700).tolist()
DATASET = [{"input_ids": [1] * length} for length in LENGTHS]


def run(*arguments):
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return exit.value.code or 0


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "lengths.npz"
    LengthTable.of(LENGTHS).save(path)
    return path


def cells(text):
    """The rows of the last table in markdown, by their titles."""
    *_, last = (part for part in text.split("\n\n") if "\n|" in f"\n{part}")
    lines = [line for line in last.splitlines() if line.startswith("|")]
    titles, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_simulate_prints_what_simulate_returns(capsys, table):
    lengths, job = LengthTable.load(table), {"budget": TokenBudget(1500, shapes=6), "seed": 3}
    plans = "--ranks 2 --ranks 3 --window auto 16 --budget 1500 --seed 3 --shapes 6".split()
    options = ["--lengths", table, *plans]
    assert run("simulate", *options) == 0
    out = capsys.readouterr().out
    rows = cells(out)
    auto = rows[0]["window"]
    assert re.fullmatch(r"auto \(\d+\)", auto)
    assert rows == [
        {"ranks": str(ranks), "window": auto if window == "auto" else str(window)}
        | simulate(lengths, world_size=ranks, window=window, **job).as_row()
        for ranks, window in itertools.product((2, 3), ("auto", 16))
    ]
    assert lengths.digest in out
    assert run("simulate", *options, "--window", "Auto") == 2
    assert '`window` must be "auto" or a number' in capsys.readouterr().err


def test_simulate_shows_what_known_lengths_come_to_beside_the_windows(capsys, table):
    lengths, job = LengthTable.load(table), {"budget": 1500, "world_size": 2}
    options = ["--lengths", table, "--ranks", 2, "--window", 16, "--budget", 1500]
    assert run("simulate", *options, "--lengths-known") == 0
    together = -(-len(LENGTHS) // 2)
    assert cells(capsys.readouterr().out) == [
        {"ranks": "2", "window": "16", "lengths": "as they come"}
        | simulate(lengths, window=16, **job).as_row(),
        {"ranks": "2", "window": f"auto ({together:,})", "lengths": "known"}
        | simulate(lengths, lengths_known=True, **job).as_row(),
    ]


def test_lengths_may_be_drawn(capsys):
    assert run("simulate", "--cv", 0.5, "--samples", 300, "--seed", 2) == 0
    drawn = LengthTable.of(lognormal_lengths(300, cv=0.5, seed=2))
    expected = simulate(drawn, world_size=1, budget=16_384, seed=2)
    out = capsys.readouterr().out
    assert cells(out)[0]["steps"] == str(expected.steps) and "\ntoken_budget=16384\n" in out


CHAT = "\n".join(
    json.dumps({"messages": [{"role": "user", "content": "word " * n}], "text": "word"})
    for n in (1, 2)
)
TEMPLATE = "{% for one in messages %}{{ one.content }} word {% endfor %}"
BAD = """null
[]
{}
{"messages": []}
{"messages": null}
{"text": null, "messages": null}
{"input_ids": []}
{"input_ids": null}
{"words": "other"}
"""
TEXT = '{"text": "word word"}\n{"text": "word", "title": ""}\n'


def test_text_and_messages_are_tokenized(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    plain.save_pretrained(tmp_path / "plain")
    plain.chat_template = TEMPLATE
    plain.save_pretrained(tmp_path / "chat")
    saved = tmp_path / "lengths.npz"
    for text, tokenizer, options, code, expected in (
        (CHAT, "chat", [], 0, [2, 3]),
        (CHAT, "chat/tokenizer.json", [], 2, "has no chat template: pass a folder with"),
        (CHAT, "plain", [], 2, "plain` has no chat template: pass a folder with"),
        (CHAT, "chat/tokenizer.json", ["--field", "text"], 0, [1, 1]),
        (TEXT, "plain/tokenizer.json", [], 0, [2, 1]),
        (TEXT, "plain", ["--field", "title"], 2, "skipped (empty): its text or messages are empt"),
        (TEXT, "plain", ["--field", "name"], 2, "has no 'name', but ['text', 'title']: see --fiel"),
        ('{"text": "word"}\n{"text": ""}\n', "plain", [], 0, [1, 0]),
        ('{"text": 5}\n', "plain", ["--field", "text"], 2, "'text' must be text, or a list of mes"),
        ('{"messages": ["word"]}\n', "chat", [], 2, "or a list of messages, but is ['word'] inste"),
    ):
        (tmp_path / "data.jsonl").write_text(text)
        arguments = ["--tokenizer", tmp_path / tokenizer, *options, "--save-lengths", saved]
        assert run("simulate", tmp_path / "data.jsonl", *arguments, "--force") == code
        if code:
            assert expected in capsys.readouterr().err
        else:
            assert LengthTable.load(saved).tokens.tolist() == expected
    (tmp_path / "data.jsonl").write_text(f"{CHAT}\n{BAD}")
    with pytest.warns(
        UserWarning, match=r"9 of 11 samples are skipped: .* it has no 'messages' or"
    ):
        arguments = ["--tokenizer", tmp_path / "chat", "--save-lengths", saved, "--force"]
        assert run("simulate", tmp_path / "data.jsonl", *arguments) == 0
    assert LengthTable.load(saved).tokens.tolist() == [2, 3, *[0] * BAD.count("\n")]


def test_a_record_without_tokens_among_others_is_skipped_and_counted(capsys, tmp_path):
    lines = ['{"input_ids": [1]}', '{"words": 1}', '{"input_ids": null}', '{"input_ids": [2]}']
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    assert run("simulate", tmp_path / "data.jsonl") == 0
    assert "4 samples (2 skipped)" in capsys.readouterr().out


def test_compressed_lines_are_read_in_their_order(tmp_path):
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(b'{"input_ids": [1, 2]}\n'))
    saved = tmp_path / "lengths.npz"
    assert run("simulate", tmp_path / "data.jsonl.gz", "--save-lengths", saved) == 0
    assert LengthTable.load(saved).streams == ("",)


def make_dataset():
    return DATASET


def make_loader():
    return ODBDataLoader(DATASET, token_budget=1500, process_fn=halved)


def halved(sample):
    return {"input_ids": sample["input_ids"][::2]}


@pytest.mark.parametrize("function", [make_dataset, make_loader])
def test_lengths_come_from_a_function_that_is_named(capsys, tmp_path, monkeypatch, function):
    monkeypatch.setitem(sys.modules, "jobs", sys.modules[__name__])
    saved = tmp_path / "lengths.npz"
    assert run("simulate", f"jobs:{function.__name__}", "--save-lengths", saved) == 0
    expected = [-(-length // 2) for length in LENGTHS] if function is make_loader else LENGTHS
    assert LengthTable.load(saved).tokens.tolist() == expected


MIXED = {
    "token_budget": TokenBudget(800, layout="packed", max_samples=30, oversize="drop"),
    "window": 48,
    "accumulate": 2,
    "seed": 7,
    "largest_first": 1,
    "weights": {"a": 1, "b": 2},
}


def make_mixed(process_group=None):
    halves = {"a": DATASET[:200], "b": DATASET[200:]}
    return ODBDataLoader(halves, process_group=process_group, **MIXED)


def test_the_options_of_a_loader_are_the_defaults(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jobs", sys.modules[__name__])
    of_job = {
        name: value for name, value in MIXED.items() if name not in ("token_budget", "weights")
    }
    table = table_of_loader(make_mixed())
    budget, weights = MIXED["token_budget"], MIXED["weights"]
    for options, changed in (
        ([], {}),
        (["--window", 32, "--seed", 1], {"window": 32, "seed": 1}),
        (["--weight", "a=9", "--weight", "b=1"], {"weights": {"a": 9, "b": 1}}),
    ):
        job = {"budget": budget, "weights": weights} | of_job | changed
        assert run("simulate", "jobs:make_mixed", *options) == 0
        done = capsys.readouterr()
        assert "from the loader, unless given here: token_budget=TokenBudget(800" in done.err
        report = simulate(table, world_size=1, **job)
        shown = {"ranks": "1", "window": str(job["window"])}
        assert cells(done.out) == [shown | report.as_row()]


@pytest.fixture
def tune_calls(monkeypatch):
    """The digest of the lengths and the options of each call of `tune`, which proposes nothing."""
    calls = []

    def tune(table, **options):
        calls.append((table.digest, options))
        return "a proposal\n"

    monkeypatch.setattr("odb_nodes.tools.tune.tune", tune)
    return calls


def test_tune_gets_the_options_of_a_loader(capsys, monkeypatch, tune_calls):
    monkeypatch.setitem(sys.modules, "jobs", sys.modules[__name__])
    assert run("tune", "jobs:make_mixed", "--ranks", 2) == 0
    assert run("tune", "jobs:make_mixed", "--ranks", 2, "--limit", 1600) == 0
    (digest, options), (_, larger) = tune_calls
    assert digest == table_of_loader(make_mixed()).digest
    budget = MIXED["token_budget"]
    names = ("window", "seed", "largest_first", "weights")
    expected = {name: MIXED[name] for name in names} | {"world_size": 2, "limit": budget}
    assert options.items() >= expected.items()
    assert options["tokens_per_step"] == 2 * 2 * 800  # the tokens of the loader's steps
    assert (larger["limit"], larger["tokens_per_step"]) == (replace(budget, tokens=1600), None)


def test_tune_gets_the_options_of_the_command_and_prints_the_proposal(
    capsys, table, tmp_path, tune_calls
):
    (log := tmp_path / "steps.jsonl").touch()
    options = ["--limit", 1500, "--tokens-per-step", 6000, "--log", log]
    assert run("tune", "--lengths", table, "--ranks", 2, *options) == 0
    assert capsys.readouterr().out == "a proposal\n"
    ((digest, options),) = tune_calls
    assert digest == LengthTable.load(table).digest
    expected = {"world_size": 2, "limit": TokenBudget(1500), "tokens_per_step": 6000, "log": log}
    assert options.items() >= expected.items()


def test_lengths_come_from_a_saved_dataset(capsys, tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(DATASET[:20])
    data.save_to_disk(tmp_path / "data")
    saved = tmp_path / "lengths.npz"
    assert run("simulate", tmp_path / "data", "--samples", 9, "--save-lengths", saved) == 0
    expected = observe_lengths(DATASET[:20], samples=9).tokens.tolist()
    assert LengthTable.load(saved).tokens.tolist() == expected
    datasets.DatasetDict(train=data).save_to_disk(tmp_path / "splits")
    assert run("simulate", tmp_path / "splits") == 2
    assert "splits: pass the folder of one, of ['train']" in capsys.readouterr().err
    (tmp_path / "data" / "state.json").write_text("{}")
    assert run("simulate", tmp_path / "data") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data` could not be read by `datasets.load_from_disk` (KeyError" in line


def test_inspect_makes_a_step_after_a_checkpoint_again(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jobs", sys.modules[__name__])
    loader = make_loader_of_group(None)
    steps = iter(loader)
    next(steps), next(steps)
    save_rank_state(loader.state_dict(), tmp_path / "checkpoint")
    batch = [next(steps) for _ in range(2)][-1]
    out = tmp_path / "step.pt"
    arguments = ["inspect", tmp_path / "checkpoint", "--loader", "jobs:make_loader_of_group"]
    assert run(*arguments, "--step", 3, "--out", out) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 0, epoch 0, step 3:")
    assert f"{batch['odb_step_info'].local_samples} samples" in shown
    assert out.exists()
    assert run(*arguments, "--step", 1) == 2
    assert "--step must be at least 2" in capsys.readouterr().err
    assert run(*arguments[:-1], "jobs:nothing", "--step", 3) == 2
    assert "`make_loader(process_group)` must be an `ODBDataLoader`" in capsys.readouterr().err


def nothing(process_group):
    return None


def make_loader_of_group(process_group):
    return ODBDataLoader(DATASET, token_budget=1500, window=32, process_group=process_group)


def test_profile_writes_its_files(capsys, table, tmp_path):
    files = ["--json", tmp_path / "p.json", "--html", tmp_path / "p.html"]
    options = ["--ranks", 1, 2, "--budget", 1500]  # and the default window, "auto"
    assert run("profile", "--lengths", table, *options, *files) == 0
    out = capsys.readouterr().out
    expected = profile(LengthTable.load(table), budget=1500, world_sizes=(1, 2))
    assert (tmp_path / "p.json").read_text() == expected.to_json()
    assert (tmp_path / "p.html").read_text() == expected.to_html()
    assert out == f"{expected}\n" and cells(out) == expected.rows()


def make_planned():
    return ODBDataLoader(make_dataset(), token_budget=800, lengths=LENGTHS)


def test_profile_shows_no_window_of_a_loader_that_knows_its_lengths(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jobs", sys.modules[__name__])
    assert run("profile", "jobs:make_planned") == 0
    rows = cells(capsys.readouterr().out)
    (row,) = (row for row in rows if row.get("batches") == "odb_nodes")
    known = simulate(LENGTHS, world_size=1, budget=800, lengths_known=True)
    assert row["window"] == "" and row["steps"] == f"{known.steps:,}"


def test_inspect_prints_what_a_state_says_what_differs_and_whether_ranks_fit(capsys, tmp_path):
    loader, saved = make_loader_of_group(None), []
    for rank, _ in zip(range(2), loader, strict=False):  # of which the second is a step ahead
        saved.append(tmp_path / f"rank{rank:05d}-of-00002.pt")
        save_state(loader.state_dict(), saved[-1])
    _, (inspection,) = read_inspections(saved[0])
    for arguments, code, text in (
        ([saved[0]], 0, f"{saved[0]}\n{inspection}\n"),
        ([saved[0], "--diff", saved[1]], 1, "GroupCollator.step: 1 -> 2\n"),
        ([saved[0], "--diff", saved[0]], 0, "are the same"),
        ([tmp_path], 1, "rank 1: step 2, but 1 on rank 0"),
    ):
        assert run("inspect", *arguments) == code
        assert text in capsys.readouterr().out
    assert run("inspect", tmp_path, "--rank", 2) == 2
    assert "--rank must be below 2" in capsys.readouterr().err


def test_its_exit_code_tells_a_hole_and_an_open_run_from_what_is_whole(tmp_path, capsys):
    write_run(tmp_path, 2, kills=(5,))
    arguments = [str(tmp_path), "--size", str(SIZE)]
    assert run("audit", *arguments) == 0
    assert capsys.readouterr().out == f"{audit(tmp_path, SIZE)}\n"
    path = tmp_path / "rank-00001.ledger"
    pieces = pieces_of(path)
    path.write_bytes(b"".join(pieces[:-2] + pieces[-1:]))
    assert run("audit", *arguments) == 1
    text = "PROBLEM: rank 1: attempt 2, after epoch 1 step 5: the record of epoch 1 step 7"
    assert text in capsys.readouterr().out
    record(tmp_path / "open", info_of(0, [0]), ended=False)
    assert run("audit", str(tmp_path / "open"), "--size", "2") == 3
    assert "OPEN, no problem so far" in capsys.readouterr().out
    record(tmp_path / "open", info_of(1, [1], ends=True), ended=False)
    assert run("audit", str(tmp_path / "open"), "--size", "2") == 0  # each sample has a fate
    assert "OK so far; no end is recorded" in capsys.readouterr().out


def test_report_and_audit_take_the_only_such_folder_of_a_run(tmp_path, capsys):
    job, ledger, monitor = (tmp_path / name for name in ("job", "job/ledger", "job/monitor"))
    write_run(ledger, 2)
    with Monitor(monitor, every=1) as writer:
        train(writer, loader_of(), steps=2)
    assert run("audit", str(job)) == 0
    assert capsys.readouterr().out == f"{audit(ledger)}\n"
    run("report", str(job))
    assert capsys.readouterr().out.startswith(f"{report(monitor)}\n")
    assert "| monitor |" in str(report(monitor))
    shutil.copytree(ledger, job / "old")
    shutil.copytree(monitor, job / "other")
    for command, folders in ("audit", "`ledger`, `old`"), ("report", "`monitor`, `other`"):
        assert run(command, str(job)) == 2
        assert "2 of its folders have a `" in (said := capsys.readouterr().err) and folders in said
    shutil.copy(ledger / "rank-00000.ledger", job)
    assert str(audit(job)).startswith(f"{job}: ")  # its own come first


def test_a_report_takes_the_place_of_an_older_one_and_of_nothing_else(tmp_path, capsys):
    for steps in (1, 3):  # as of a run that goes on
        with Monitor(tmp_path / f"run{steps}", every=1) as writer:
            train(writer, loader_of(), steps=steps)
    files = {name: tmp_path / f"report.{name}" for name in ("html", "csv", "json")}
    options = [text for name, path in files.items() for text in (f"--{name}", path)]
    assert run("report", tmp_path / "run1", *options) == 0
    before = {name: path.read_text() for name, path in files.items()}
    assert run("report", tmp_path / "run3", *options) == 0
    assert all(path.read_text() != before[name] for name, path in files.items())
    page = profile(LengthTable.of(LENGTHS), budget=1500)
    for name, text in {"html": page.to_html(), "csv": "run,kind\n", "json": page.to_json()}.items():
        files[name].write_text(text)
        assert run("report", tmp_path / "run3", f"--{name}", files[name]) == 2
        assert "exists: name another file, or pass --force" in capsys.readouterr().err
        assert files[name].read_text() == text


def test_sources_have_sizes_and_digests_are_of_the_first_steps(tmp_path, capsys):
    record(tmp_path / "mixed", info_of(0, [0, 1, 0], sources=["a", "a", "b=c"], ends=True))
    assert run("audit", str(tmp_path / "mixed"), "--size", "a=2", "--size", "b=c=1") == 0
    assert run("audit", str(tmp_path / "mixed"), "--size", "a=3", "--size", "b=c=1") == 1
    assert "1 of 3 samples of source 'a' have no fate: key 2." in capsys.readouterr().out
    write_run(tmp_path / "one", epochs=1)
    (epoch,) = audit(tmp_path / "one").epochs
    capsys.readouterr()
    for steps, text in (
        (3, f"epoch 0, first 3 steps: digest {epoch.digest_of_first(3)}"),
        (9, f"epoch 0, all 8 steps, of 9 asked for: digest {epoch.digest}"),
    ):
        assert run("audit", str(tmp_path / "one"), "--steps", str(steps)) == 0
        assert capsys.readouterr().out.endswith(f"\n{text}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["--steps", steps], f"of at least 1, but is '{steps}'") for steps in "0x"),
        *((["--size", size], "--size") for size in ("x", "a=", "-3")),
        ([], "has no ledger"),
    ],
)
def test_what_is_wrong_has_an_exit_code_of_its_own(tmp_path, capsys, arguments, words):
    assert run("audit", str(tmp_path), *arguments) == 2
    assert words in capsys.readouterr().err


def test_parquet_is_read_from_folders_patterns_and_stores(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, lengths in zip("ab", (LENGTHS[:150], LENGTHS[150:]), strict=True):
        ids = {"input_ids": [[1] * length for length in lengths]}
        parquet.write_table(pytest.importorskip("pyarrow").table(ids), tmp_path / f"{name}.parquet")
        with pytest.importorskip("fsspec").open(f"memory://cli/{name}.parquet", "wb") as file:
            file.write((tmp_path / f"{name}.parquet").read_bytes())
    options = ["--budget", 4096, "--shapes", 4, "--oversize", "drop"]
    tables = []
    for data in (tmp_path, f"{tmp_path}/{{a,b}}.parquet", "memory://cli/*.parquet"):
        assert run("simulate", data, *options) == 0
        tables.append(cells(capsys.readouterr().out))
    budget = TokenBudget(4096, shapes=4, oversize="drop")
    (tmp_path / "c.jsonl").write_text("{}")
    assert run("simulate", tmp_path, *options) == 2
    assert "has both Parquet and JSON Lines" in capsys.readouterr().err
    (tmp_path / "part=b").mkdir()
    (tmp_path / "part=a").mkdir()
    (tmp_path / "a.parquet").rename(tmp_path / "part=a" / "a.PQ")
    (tmp_path / "b.parquet").rename(tmp_path / "part=b" / "b.parquet")
    (tmp_path / "c.jsonl").unlink()
    assert run("simulate", tmp_path, *options) == 0
    tables.append(cells(capsys.readouterr().out))
    figures = simulate(LengthTable.of(LENGTHS), world_size=1, budget=budget).as_row()
    assert (
        tables[0] == tables[1] == tables[2] == tables[3] and tables[0][0].items() >= figures.items()
    )


def test_samples_that_exceed_the_budget_are_counted(capsys, table):
    over = sum(length > 300 for length in LENGTHS)
    for command, becomes in (("simulate", "dropped"), ("profile", "have a batch each")):
        options = ["--oversize", "drop"] if command == "simulate" else []
        assert run(command, "--lengths", table, "--budget", 300, "--window", 64, *options) == 0
        out = capsys.readouterr().out
        assert f"{over} of 300 samples exceed the budget" in out and becomes in out
