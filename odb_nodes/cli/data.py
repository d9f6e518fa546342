"""What a command line names: lengths, a loader and its options, functions, files to write."""

from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_nodes._core.checks import import_extra
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.options import JobOptions

if TYPE_CHECKING:
    from odb_nodes.tools.lengths import LengthTable

BUDGET_TOKENS = 16_384
_FIELDS = ("messages", "text")
_DATASETS_FILES = ("dataset_info.json", "dataset_dict.json")
_OF_BUDGET = [field.name for field in fields(TokenBudget) if field.name != "tokens"]
_OF_JOB = [field.name for field in fields(JobOptions)]


class UsageError(ValueError):
    """What is wrong with the options of a command."""


# --- the files that are written -------------------------------------------------------------------


def check_outputs(
    args: Namespace, options: Sequence[str], inputs: Sequence[str | Path | None]
) -> None:
    """Check the files that options name to be written, before any work is done for them."""
    taken: list[str | Path] = []
    for one in inputs:
        if one is not None:
            taken += [one] if Path(one).exists() else glob.glob(str(one), recursive=True)
    for option in options:
        if (path := vars(args)[option]) is not None:
            try:
                check_is_writable(path, taken, force=args.force)
            except OSError as error:
                raise UsageError(f"'--{option.replace('_', '-')}': {error}") from error
            taken.append(path)


def check_is_writable(path: str | Path, inputs: Iterable[str | Path] = (), *, force: bool) -> None:
    """Raise an `OSError` unless writing `path` loses nothing: no file without `force`, no input.

    What is in a folder of `inputs` counts as an input, by whatever name.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder `{path.parent}`: make that folder first.")
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder: name a file in it.")
    for one in map(Path, inputs):
        folders = [path.parent.resolve(), *path.parent.resolve().parents]
        same = [other for other in (one, *one.glob("*")) if other.exists() and path.exists()]
        if (
            path.resolve() == one.resolve()
            or (path.exists() and one.is_dir() and one.resolve() in folders)
            or any(path.samefile(other) for other in same)  # a link to it, too
        ):
            raise FileExistsError(
                f"`{path}` is also read, or written twice: name another file, outside the folders "
                "that are read."
            )
    if path.is_file() and not force:
        raise FileExistsError(f"`{path}` exists: name another file, or pass --force to replace it.")


# --- the data that are read -----------------------------------------------------------------------


class Data:
    """The data that a command line names and, where they are a loader's, its options.

    What the command line gives itself comes before an option of the loader.
    """

    def __init__(
        self, args: Namespace, outputs: Sequence[str] = (), inputs: Sequence[Path | None] = ()
    ) -> None:
        self._args = args
        in_place = [name for name in ("lengths", "cv") if name in args]
        given = [f"--{name}" for name in in_place if vars(args)[name] is not None]
        if len(given) + (args.data is not None) != 1:
            raise ValueError(
                "pass either the data (a file, a folder or module:function), or one option in "
                f"place of them: --{', --'.join(in_place)}."
            )
        reads = (args.tokenizer, args.field, args.workers, args.lengths and args.samples)
        if given and any(reads):
            raise ValueError(
                f"{given[0]} is in place of data: leave out --tokenizer, --field and --workers, "
                "and --samples of a file."
            )
        found: Any = None if args.data is None else _dataset_of(args.data)
        from odb_nodes.loader import ODBDataLoader
        from odb_nodes.tools.lengths import files_read
        from odb_nodes.tools.simulate import budget_code

        is_loader = isinstance(found, ODBDataLoader)
        read = [args.data, args.lengths, args.tokenizer, *inputs]
        if args.data is not None:
            read += [*files_read(found.dataset if is_loader else found), file_of(args.data)]
        check_outputs(args, ["save_lengths", *outputs], read)
        self._found, self._options = found, found.options if is_loader else None
        self.loader_budget: TokenBudget | None = None
        if is_loader:
            if args.tokenizer is not None or args.field is not None:
                raise ValueError(
                    f"`{args.data}` returns a loader, which processes its samples itself: leave "
                    "out --tokenizer and --field."
                )
            self.loader_budget = found.options.budget
            taken = {"weights": found.options.weights} | self.job()
            default = {"weights": None} | vars(JobOptions())
            shown = [f"{key}={one}" for key, one in taken.items() if one != default[key]]
            print(
                f"from the loader, where not given here: "
                f"{', '.join([f'token_budget={budget_code(self.loader_budget)}', *shown])}",
                file=sys.stderr,
            )

    @property
    def ranks(self) -> int:
        """Number of ranks, where none is given: the loader's virtual ranks, or 1."""
        return (self._options and self._options.virtual_ranks) or 1

    @property
    def shuffles(self) -> bool:
        """Whether an epoch is shuffled."""
        loader = self._options
        return loader is None or (loader.shuffle is not False and loader.sampler is None)

    def budget(self, tokens: int | None) -> TokenBudget:
        """Return the budget, of so many tokens where they are given."""
        given = {"tokens": tokens} | {name: vars(self._args).get(name) for name in _OF_BUDGET}
        known = {name: value for name, value in given.items() if value is not None}
        return replace(self.loader_budget or TokenBudget(BUDGET_TOKENS), **known)

    def job(self) -> dict[str, Any]:
        """Return the fields of `JobOptions`; of several windows, that of the loader."""
        given = vars(self._args) | {"window": None}
        options = vars(self._options or JobOptions())
        return {name: options[name] if given.get(name) is None else given[name] for name in _OF_JOB}

    def weights(self) -> Any:
        """Return the weights of the sources that are given, or else those of the loader."""
        return dict(self._args.weight or ()) or (self._options and self._options.weights)

    def table(self) -> LengthTable:
        """Return the lengths of the data, and save them where that is asked for."""
        table = self._table()
        if self._args.save_lengths is not None:
            table.save(self._args.save_lengths)
        return table

    def _table(self) -> LengthTable:
        from odb_nodes.processing import WorkerOptions
        from odb_nodes.tools.estimate import table_of_loader
        from odb_nodes.tools.lengths import LengthTable, observe_lengths
        from odb_nodes.tools.simulate import lognormal_lengths

        args, workers = self._args, WorkerOptions(num_workers=self._args.workers)
        if args.lengths is not None:
            return LengthTable.load(args.lengths)
        if args.data is None:
            lengths = lognormal_lengths(args.samples or 40_000, cv=args.cv, seed=args.seed or 0)
            return LengthTable.of(lengths, distribution=f"lognormal, CV {args.cv}")
        if self._options is not None:
            return table_of_loader(self._found, args.samples, workers)
        tokenize = None if args.tokenizer is None else _tokenize_by(args.tokenizer)
        return observe_lengths(
            self._found,
            process_fn=_Tokenization(tokenize, args.field),
            samples=args.samples,
            seed=args.seed or 0,
            workers=workers,
        )


class _Tokenization:
    """Makes a sample of an item: tokenizes a field of it, unless it has `input_ids`."""

    def __init__(self, tokenize: Callable[[Any], Any] | None, field: str | None) -> None:
        self._tokenize, self._field = tokenize, field

    def __call__(self, item: Any) -> Any:
        """Return the sample of an item; `Skipped` where its text has no token."""
        if not isinstance(item, Mapping) or ("input_ids" in item and self._field is None):
            return item
        if self._tokenize is None:
            raise ValueError("it has no `input_ids`: pass --tokenizer.")
        names = _FIELDS if self._field is None else (self._field,)
        found = [item[name] for name in names if item.get(name) is not None]
        if not found:
            shown = {name: item[name] for name in names if name in item} or sorted(item)
            raise ValueError(f"it has no value for any of {names}, but {shown}: pass --field.")
        if not (tokens := self._tokenize(found[0])):
            from odb_nodes.sample import Skipped

            return Skipped("empty", "its text has no token.")
        return {"input_ids": tokens}


def _tokenize_by(name: str) -> Callable[[Any], Any]:
    """Return a function that maps text, or messages, to token ids."""
    transformers = import_extra("transformers", "hf")
    try:
        if Path(name).is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=name)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of a file, `tokenizers` raises nothing more precise
        raise ValueError(
            f"--tokenizer `{name}` cannot be loaded: pass the path of a `tokenizer.json`, the "
            "folder of a tokenizer, or a name on the hub that this machine can reach."
        ) from error

    def tokenize(content: Any) -> Any:
        if isinstance(content, str):
            return tokenizer(content)["input_ids"]
        if not tokenizer.chat_template:
            raise ValueError(
                f"it has messages, and the tokenizer `{name}` has no chat template: pass a folder "
                "with a `chat_template.jinja`, or --field for a field of text."
            )
        return tokenizer.apply_chat_template(content, tokenize=True, return_dict=True)["input_ids"]

    return tokenize


def _dataset_of(data: str) -> Any:
    path = Path(data)
    if not path.exists() and is_function_name(data):
        if (made := load_function(data)()) is None:
            raise ValueError(f"`{data}` must return a dataset or a loader, but returned None.")
        return made
    if any((path / name).exists() for name in _DATASETS_FILES):
        return _saved_dataset(path)
    if "*" not in data and not path.exists():
        raise FileNotFoundError(f"there is no `{data}`: pass a file or folder that exists.")
    from odb_nodes.sources import JsonlSource

    source = JsonlSource(data, 0, 1, shuffle=False)
    return source.copy(shuffle=source.can_restore)  # a loader, too, cannot shuffle compressed files


def _saved_dataset(path: Path) -> Any:
    import datasets

    try:
        saved = datasets.load_from_disk(path)
    except Exception as error:  # of a damaged folder it raises nothing more precise
        raise ValueError(
            f"`{path}` could not be read by `datasets.load_from_disk` ({type(error).__name__}: "
            f"{error}): put the folder back whole, or save it again."
        ) from error
    if isinstance(saved, dict):
        raise ValueError(f"`{path}` has splits: pass the folder of one, of {sorted(saved)}.")
    return saved


# --- functions of the user ------------------------------------------------------------------------


def is_function_name(text: str) -> bool:
    """Tell whether a text has the form `module:function`."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", text) is not None


def load_function(name: str) -> Any:
    """Return what `module:function` names, in the current folder too."""
    if not is_function_name(name):
        raise ValueError(f"`{name}` must be `module:function`, such as `train:make_loader`.")
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"module `{module}` has no function `{function}`.")
    return found


def file_of(name: str) -> Path | None:
    """Return the file of the module of a function that was loaded; `None` where it has none."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return None if file is None else Path(file)
