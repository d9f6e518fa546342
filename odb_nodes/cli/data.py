"""The data, functions and output files that a command line names."""

from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence, Sized
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_nodes._support.checks import import_extra
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.options import JobOptions
from odb_nodes.core.sample import Skipped

if TYPE_CHECKING:
    from odb_nodes.tools.lengths import LengthTable

BUDGET_TOKENS = 16_384
_FIELDS = ("messages", "text")
_TO_TOKENIZE = "pass --tokenizer, or module:function that returns a loader with your `process_fn`"
_INPUTS = ("data", "folders", "lengths", "log", "state", "tokenizer")  # arguments that are read
_MARK_BYTES = 1024  # of the beginning of a file that a command has written
_DATASETS_FILES = ("dataset_info.json", "dataset_dict.json")
_OF_BUDGET = [field.name for field in fields(TokenBudget) if field.name != "tokens"]
_OF_JOB = [field.name for field in fields(JobOptions)]


class UsageError(ValueError):
    """An error in the options of a command."""


def check_outputs(
    args: Namespace,
    options: Sequence[str],
    marks: Mapping[str, str] | None = None,
    files_read: Sequence[str | Path] = (),
) -> None:
    """Check the files that a command writes: only `--force` replaces a file, and never an input.

    marks: option -> text with which an earlier output begins, which is replaced without `--force`.
    files_read: inputs that no argument names.
    """
    from odb_nodes.core.sources.data_files import listed, matches

    named = [vars(args)[name] for name in _INPUTS if vars(args).get(name)]
    paths = [
        str(path) for value in named for path in (value if isinstance(value, list) else [value])
    ]
    matching = [match for path in paths for name in listed(path) for match in matches(name)]
    inputs = [Path(path).resolve() for path in (*paths, *matching, *files_read)]
    outputs = set[Path]()
    for option in options:
        if vars(args)[option] is None:
            continue
        path, name = Path(vars(args)[option]), f"'--{option.replace('_', '-')}'"
        if not path.parent.is_dir():
            raise UsageError(f"{name}: there is no folder `{path.parent}`: make that folder first.")
        if path.is_dir():
            raise UsageError(f"{name}: `{path}` is a folder: name a file in it.")
        resolved = path.resolve()
        mark = (marks or {}).get(option)
        # The report of a folder may stand in the folder.
        is_earlier_output = path.exists() and bool(mark) and _has_mark(path, str(mark))
        is_input = (
            path.exists()
            and not is_earlier_output
            and any(resolved.is_relative_to(folder) for folder in inputs)
        )
        if resolved in outputs or is_input:
            raise UsageError(
                f"{name}: `{path}` is also read, or written twice: name another file, outside the "
                "folders that are read."
            )
        if path.exists() and not (args.force or is_earlier_output):
            raise UsageError(
                f"{name}: `{path}` exists: name another file, or pass --force to replace it."
            )
        outputs.add(resolved)


def _has_mark(path: Path, mark: str) -> bool:
    with path.open("rb") as file:
        return mark.encode() in file.read(_MARK_BYTES)


def files_read(name: str | None, dataset: Any = None) -> list[str | Path]:
    """Return the module of `module:function`, and the files of the sources that it returned."""
    module = sys.modules.get(str(name).partition(":")[0])
    sources = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    files = [path for source in sources for path in getattr(source, "paths", ())]
    return [file for file in (getattr(module, "__file__", None), *files) if file]


class Data:
    """The data of a command line, and the options of a loader that the command line leaves out."""

    def __init__(self, args: Namespace, outputs: Sequence[str] = ()) -> None:
        self._args = args
        in_place = [name for name in ("lengths", "cv") if name in args]
        in_place_given = [f"--{name}" for name in in_place if vars(args)[name] is not None]
        if len(in_place_given) + (args.data is not None) != 1:
            options = ", ".join(f"--{name}" for name in in_place)
            raise UsageError(
                "pass either the data (a file, a folder or module:function), or "
                f"{'one of ' * (len(in_place) > 1)}{options} in place of them"
            )
        if in_place_given and any(
            (args.tokenizer, args.field, args.workers, args.lengths and args.samples)
        ):
            raise UsageError(
                f"{in_place_given[0]} is in place of data: leave out --tokenizer, --field and "
                "--workers, and --samples of a file"
            )
        dataset: Any = None if args.data is None else _dataset_of(args.data)
        from odb_nodes.core.loader import ODBDataLoader
        from odb_nodes.tools.simulate import budget_code

        loader = dataset if isinstance(dataset, ODBDataLoader) else None
        source = dataset if loader is None else loader.dataset
        check_outputs(args, ["save_lengths", *outputs], files_read=files_read(args.data, source))
        self._dataset, self._options = dataset, loader and loader.options
        self.loader_budget = None if loader is None else loader.options.budget
        if loader is not None:
            if args.tokenizer is not None or args.field is not None:
                raise UsageError(
                    f"`{args.data}` returns a loader, which processes its samples itself: leave "
                    "out --tokenizer and --field"
                )
            default = {"weights": None} | vars(JobOptions())
            from_loader = {key: getattr(loader.options, key) for key in default}
            shown = [
                f"{key}={value}" for key, value in from_loader.items() if value != default[key]
            ]
            shown = [f"token_budget={budget_code(loader.options.budget)}", *shown]
            print(f"from the loader, unless given here: {', '.join(shown)}", file=sys.stderr)

    @property
    def options(self) -> Any:
        """The options of the loader, or the default options."""
        from odb_nodes.core.loader.options import LoaderOptions

        return self._options or LoaderOptions(token_budget=BUDGET_TOKENS)

    @property
    def shuffles(self) -> bool:
        """Whether an epoch is shuffled."""
        return self.options.shuffle is not False and self.options.sampler is None

    @property
    def lengths_known(self) -> bool:
        """Whether the data is a loader that plans its epochs by known lengths."""
        from odb_nodes.tools.estimate import knows_lengths

        return self._options is not None and knows_lengths(self._dataset)

    def budget(self, tokens: int | None) -> TokenBudget:
        """Return the budget; the tokens and options of the command line replace the loader's."""
        options = {"tokens": tokens} | {name: vars(self._args).get(name) for name in _OF_BUDGET}
        fields = {name: value for name, value in options.items() if value is not None}
        return replace(self.loader_budget or TokenBudget(BUDGET_TOKENS), **fields)

    def job(self) -> dict[str, Any]:
        """Return the fields of `JobOptions`; the window is the loader's."""
        arguments = vars(self._args) | {"window": None}
        options = vars(self._options or JobOptions())
        return {
            name: options[name] if arguments.get(name) is None else arguments[name]
            for name in _OF_JOB
        }

    def weights(self) -> Any:
        """Return the weights of the sources: from the command line, or else from the loader."""
        return dict(self._args.weight or ()) or self.options.weights

    def table(self) -> LengthTable:
        """Return the lengths of the data; `--save-lengths` saves them, too."""
        from odb_nodes.core.processing import WorkerOptions
        from odb_nodes.tools.estimate import table_of_loader
        from odb_nodes.tools.lengths import LengthTable, observe_lengths
        from odb_nodes.tools.simulate import lognormal_lengths

        args, workers = self._args, WorkerOptions(num_workers=self._args.workers)
        seed = args.seed or 0
        if args.lengths is not None:
            table = LengthTable.load(args.lengths)
        elif args.data is None:
            lengths = lognormal_lengths(args.samples or 40_000, cv=args.cv, seed=seed)
            table = LengthTable.of(lengths, distribution=f"lognormal, CV {args.cv}")
        elif self._options is not None:
            table = table_of_loader(self._dataset, args.samples, workers)
        else:
            process_fn = _Tokenization(args.tokenizer, args.field)
            table = observe_lengths(
                self._dataset,
                process_fn=process_fn,
                samples=args.samples,
                seed=seed,
                workers=workers,
            )
        if args.save_lengths is not None:
            table.save(args.save_lengths)
        return table


class _Tokenization:
    """Makes a sample of an item: tokenizes a field of the item, unless it has `input_ids`."""

    def __init__(self, name: str | None, field: str | None) -> None:
        self._name, self._tokenizer = name, None if name is None else _tokenizer(name)
        self._fields, self._takes_ids = _FIELDS if field is None else (field,), field is None
        from odb_nodes.core.collate import PaddingCollate

        self._check = PaddingCollate().prepare  # as a loader does by default

    def __call__(self, item: Any) -> Any:
        is_record = isinstance(item, Mapping)
        if not is_record or ("input_ids" in item and self._takes_ids):
            ids = item["input_ids"] if is_record else item
            is_empty = ids is None or (isinstance(ids, Sized) and not len(ids))
            return Skipped("empty", "it has no token.") if is_empty else self._check(item)
        values = {name: item[name] for name in self._fields if name in item}
        if not values:
            names = " or ".join(map(repr, [*self._fields, *["input_ids"] * self._takes_ids]))
            remedy = "see --field" if self._tokenizer else _TO_TOKENIZE
            return Skipped("no field", f"it has no {names}, but {sorted(item)}: {remedy}.")
        if self._tokenizer is None:
            raise ValueError(f"it has no `input_ids`, but {[*values]}: {_TO_TOKENIZE}.")
        name = next((name for name, value in values.items() if value not in (None, "", [])), None)
        if name is None:
            return Skipped("empty", "its text or messages are empty.")
        content = values[name]
        is_list = isinstance(content, (list, tuple))
        is_list = is_list and all(isinstance(part, Mapping) for part in content)
        if not (isinstance(content, str) or is_list):
            raise ValueError(
                f"its {name!r} must be text, or a list of messages, but is {content!r:.80} "
                "instead. Correct the record, or leave it out."
            )
        if isinstance(content, str):
            tokens = self._tokenizer(content)["input_ids"]
        elif self._tokenizer.chat_template:
            encoding = self._tokenizer.apply_chat_template(content, tokenize=True, return_dict=True)
            tokens = encoding["input_ids"]
        else:
            raise ValueError(
                f"it has messages, and the tokenizer `{self._name}` has no chat template: pass a "
                "folder with a `chat_template.jinja`, or --field for a field of text."
            )
        return {"input_ids": tokens} if tokens else Skipped("empty", "its text has no token.")


def _tokenizer(name: str) -> Any:
    transformers = import_extra("transformers", "hf")
    try:
        if Path(name).is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=name)
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # `tokenizers` raises nothing more precise
        raise ValueError(
            f"--tokenizer `{name}` cannot be loaded: pass the path of a `tokenizer.json`, the "
            "folder of a tokenizer, or a name on the hub that this machine can reach."
        ) from error


def _dataset_of(data: str) -> Any:
    _check_no_script(data)
    path = Path(data)
    if not path.exists() and _is_function_name(data):
        function = load_function(data)
        try:
            returned = function()
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:  # raised within the function
                raise
            raise ValueError(
                f"`{data}` must take no argument and return a dataset or a loader: {error}."
            ) from None
        if returned is None:
            raise ValueError(f"`{data}` must return a dataset or a loader, but returned None.")
        return returned
    if any((path / name).exists() for name in _DATASETS_FILES):
        try:
            saved = importlib.import_module("datasets").load_from_disk(path)
        except Exception as error:  # for a damaged folder, `datasets` raises nothing more precise
            raise ValueError(
                f"`{path}` could not be read by `datasets.load_from_disk` ({type(error).__name__}: "
                f"{error}): put the folder back whole, or save it again."
            ) from error
        if isinstance(saved, dict):
            raise ValueError(f"`{path}` has splits: pass the folder of one, of {sorted(saved)}.")
        return saved
    if not (glob.has_magic(data) or "{" in data or path.exists() or "://" in data):
        raise FileNotFoundError(f"there is no `{data}`: pass a file or folder that exists.")
    from odb_nodes.core.sources import JsonlSource, ParquetDataset
    from odb_nodes.core.sources.data_files import JSON_LINES, PARQUET, has_files

    folder = Path(data.removesuffix("**"))
    has_parquet = folder.is_dir() and has_files(folder, PARQUET)
    if has_parquet and has_files(folder, JSON_LINES):
        raise ValueError(
            f"`{folder}` has both Parquet and JSON Lines files: pass a pattern of those that "
            f"are meant, such as '{folder}/*.parquet'."
        )
    if has_parquet or (PARQUET.is_read(data) and not folder.is_dir()):
        return ParquetDataset(data)
    if path.suffix.lower() in (".arrow", ".feather", ".csv", ".tar", ".tgz"):
        raise ValueError(
            f"`{path}` is neither JSON Lines nor `.parquet`: pass module:function that returns a "
            "dataset of it."
        )
    source = JsonlSource(data, 0, 1, shuffle=False)
    return source.copy(shuffle=source.can_restore)  # a loader, too, cannot shuffle compressed files


def _is_function_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", text) is not None


def _check_no_script(name: str) -> None:
    path, _, function = name.partition(":")
    if path.endswith(".py"):
        module = ".".join(Path(path).with_suffix("").parts)
        raise ValueError(
            f"`{name}` must be a module and a function, and not a file: write "
            f"`{module}:{function or 'make_loader'}` (module:function)."
        )


def load_function(name: str) -> Any:
    """Import the function `module:function`, also from the current folder."""
    _check_no_script(name)
    if not _is_function_name(name):
        raise ValueError(f"`{name}` must be `module:function`, such as `train:make_loader`.")
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    value = getattr(importlib.import_module(module), function, None)
    if not callable(value):
        raise ValueError(f"module `{module}` has no function `{function}`.")
    return value
