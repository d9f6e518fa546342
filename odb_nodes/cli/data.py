"""From what a command line names to a table of lengths, and the options of a loader."""

from __future__ import annotations

import glob
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_nodes._core.checks import import_extra
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.options import JobOptions
from odb_nodes.tools.command_line import check_is_writable, file_of, is_function_name, load_function

if TYPE_CHECKING:
    from odb_nodes.tools.lengths import LengthTable

__all__ = ["BUDGET_TOKENS", "Data", "UsageError", "check_outputs"]

BUDGET_TOKENS = 16_384
_REPLY_S = 10.0
_FIELDS = ("messages", "text")
_DATASETS_FILES = ("dataset_info.json", "dataset_dict.json")
_BUDGET_FIELDS = tuple(field.name for field in fields(TokenBudget) if field.name != "tokens")
_NO_DATA = {"tokenizer": None, "field": None, "workers": 0, "save_lengths": None}


class UsageError(ValueError):
    """What is wrong with the options of a command."""


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


class Data:
    """The data that a command line names and, where they are a loader's, its options.

    What the command line gives itself comes before an option of the loader.

    Args:
        args: the command line.
        outputs: options that name a file to write.
        inputs: files that are read, beside those of the data.
        table: lengths in place of data.
    """

    def __init__(
        self,
        args: Namespace,
        outputs: Sequence[str] = (),
        inputs: Sequence[Path | None] = (),
        table: LengthTable | None = None,
    ) -> None:
        self._args, self._table = args, table
        self._dataset: Any = None
        read = [args.data, args.lengths, args.tokenizer, *inputs]
        check_outputs(args, ["save_lengths", *outputs], read)
        if table is None:
            self._check()
        if args.data is not None:
            self._dataset = _dataset_of(args.data)
            check_outputs(args, ["save_lengths", *outputs], [*read, *self._files()])
        from odb_nodes.loader import ODBDataLoader

        is_loader = isinstance(self._dataset, ODBDataLoader)
        self._options = self._dataset.options if is_loader else None
        self.loader_budget: TokenBudget | None = None
        if is_loader:
            if args.tokenizer is not None or args.field is not None:
                raise ValueError(
                    f"`{args.data}` returns a loader, which processes its samples itself: leave "
                    "out --tokenizer and --field."
                )
            self.loader_budget = self._dataset.options.budget
            self._tell_options(self.loader_budget)

    def _check(self) -> None:
        args = self._args
        if (args.data is None) == (args.lengths is None):
            both = " They were both given." if args.data is not None else ""
            raise ValueError(
                "pass either the data (a file, a folder or module:function), or --lengths "
                f"FILE.{both}"
            )
        if args.lengths is not None and (self.reads_data(args) or args.samples is not None):
            raise ValueError(
                "--lengths has the lengths already: leave out --tokenizer, --field, --samples, "
                "--workers and --save-lengths."
            )

    @staticmethod
    def reads_data(args: Namespace) -> bool:
        """Tell whether an option is given that needs data."""
        return any(vars(args)[name] != value for name, value in _NO_DATA.items())

    def _tell_options(self, budget: TokenBudget) -> None:
        from odb_nodes.tools.simulate import budget_code

        default = {"token_budget": None, "weights": None} | vars(JobOptions())
        weights = self._options and self._options.weights
        taken = {"token_budget": budget_code(budget), "weights": weights} | self.job()
        shown = [f"{name}={value}" for name, value in taken.items() if value != default[name]]
        print(f"from the loader, where not given here: {', '.join(shown)}", file=sys.stderr)

    def _files(self) -> list[Path | None]:
        """Return the files behind `module:function`, which are known once it was called."""
        from odb_nodes.loader import ODBDataLoader
        from odb_nodes.tools.lengths import files_read

        found = self._dataset
        dataset = found.dataset if isinstance(found, ODBDataLoader) else found
        return [*files_read(dataset), file_of(self._args.data)]

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
        names = (name for name in _BUDGET_FIELDS if vars(self._args).get(name) is not None)
        given = {name: vars(self._args)[name] for name in names}
        if tokens is not None:
            given["tokens"] = tokens
        return replace(self.loader_budget or TokenBudget(BUDGET_TOKENS), **given)

    def job(self) -> dict[str, Any]:
        """Return the fields of `JobOptions`; of several windows, that of the loader."""
        options, args = self._options or JobOptions(), vars(self._args)
        names = [field.name for field in fields(JobOptions)]
        given = {name: args[name] for name in names if args.get(name) is not None}
        given.pop("window", None)
        return {name: getattr(options, name) for name in names} | given

    def weights(self) -> Any:
        """Return the weights of the sources that are given, or else those of the loader."""
        weights = {}
        for text in self._args.weight or ():
            name, equals, weight = text.rpartition("=")
            try:
                weights[name] = float(weight)
            except ValueError:
                equals = ""
            if not equals:
                raise ValueError(f"--weight must be source=number, but is {text!r}.")
        return weights or (self._options and self._options.weights)

    def table(self) -> LengthTable:
        """Return the lengths of the data, and save them where that is asked for."""
        if self._table is None:
            self._table = self._observed()
        if self._args.save_lengths is not None:
            self._table.save(self._args.save_lengths)
        return self._table

    def _observed(self) -> LengthTable:
        from odb_nodes.processing import WorkerOptions
        from odb_nodes.tools.estimate import table_of_loader
        from odb_nodes.tools.lengths import LengthTable, observe_lengths

        args, workers = self._args, WorkerOptions(num_workers=self._args.workers)
        if args.lengths is not None:
            return LengthTable.load(args.lengths)
        if self._options is not None:
            return table_of_loader(self._dataset, args.samples, workers)
        tokenize = None if args.tokenizer is None else _tokenize_by(args.tokenizer)
        return observe_lengths(
            self._dataset,
            process_fn=_Tokenization(tokenize, args.field),
            samples=args.samples,
            seed=args.seed or 0,
            workers=workers,
        )


class _Tokenization:
    """Makes a sample of an item: tokenizes a field of it, unless it has `input_ids`."""

    def __init__(self, tokenize: Any, field: str | None) -> None:
        self._tokenize, self._field = tokenize, field

    def __call__(self, item: Any) -> Any:
        """Return the sample of an item; `Skipped` where its text has no token."""
        if not isinstance(item, Mapping) or ("input_ids" in item and self._field is None):
            return item
        fields = _FIELDS if self._field is None else (self._field,)
        found = [item[name] for name in fields if item.get(name) is not None]
        if self._tokenize is None:
            raise ValueError("it has no `input_ids`: pass --tokenizer.")
        if not found and (null := [name for name in fields if name in item]):
            raise ValueError(
                f"its field {null[0]!r} is None: leave the item out of the data, or pass --field."
            )
        if not found:
            raise ValueError(
                f"it has none of the fields {fields}, but {sorted(item)}: pass --field."
            )
        if not (tokens := self._tokenize(found[0])):
            from odb_nodes.sample import Skipped

            return Skipped("empty", "its text has no token.")
        return {"input_ids": tokens}


def _tokenize_by(name: str) -> Any:
    """Return a function that maps text, or messages, to token ids."""
    if Path(name).is_file():
        tokenizers = import_extra("tokenizers", "hf")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # it raises nothing more precise
            raise ValueError(
                f"--tokenizer `{name}` is no `tokenizer.json` ({error}): pass a file that "
                "`Tokenizer.save` wrote, or the folder or name of a tokenizer."
            ) from error

        def encode(content: Any) -> Any:
            if not isinstance(content, str):
                raise ValueError(
                    f"it has messages, and `{name}` has no chat template: pass the folder or the "
                    "name of the tokenizer, or --field for a field of text."
                )
            return tokenizer.encode(content).ids

        return encode
    is_folder = Path(name).is_dir()
    if not is_folder and (name.endswith(".json") or name.startswith((".", "/", "~"))):
        raise FileNotFoundError(
            f"there is no tokenizer `{name}`: pass a file or folder that exists."
        )
    transformers = import_extra("transformers", "hf")
    offline = is_folder or not _is_hub_in_reach(name)  # what the cache has is taken then
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(name, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer `{name}` cannot be loaded: pass the path of a `tokenizer.json`, the "
            "folder of a tokenizer, or a name on the hub that this machine can reach."
        ) from error

    def tokenize(content: Any) -> Any:
        if isinstance(content, str):
            return loaded(content)["input_ids"]
        if not loaded.chat_template:
            raise ValueError(
                f"it has messages, and the tokenizer `{name}` has no chat template: pass a folder "
                "with a `chat_template.jinja`, or --field for a field of text."
            )
        return loaded.apply_chat_template(content, tokenize=True, return_dict=True)["input_ids"]

    return tokenize


def _is_hub_in_reach(name: str) -> bool:
    """Tell whether the hub replies, where transformers would try again for most of a minute."""
    hub = import_extra("huggingface_hub", "hf")
    try:
        hub.HfApi().model_info(name, timeout=_REPLY_S)
    except hub.errors.HfHubHTTPError:  # a reply, if only that there is no such model
        return True
    except Exception:  # of the HTTP library that the hub's client happens to use
        return False
    return True


def _dataset_of(data: str) -> Any:
    path = Path(data)
    if not path.exists() and is_function_name(data):
        if (made := load_function(data)()) is None:
            raise ValueError(f"`{data}` must return a dataset or a loader, but returned None.")
        return made
    if any((path / name).exists() for name in _DATASETS_FILES):
        return _saved_dataset(path)
    paths = data if "*" in data else _existing(data)
    from odb_nodes.sources import JsonlSource

    source = JsonlSource(paths, 0, 1, shuffle=False)
    return source.copy(shuffle=source.can_restore)  # a loader, too, cannot shuffle compressed files


def _saved_dataset(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"`{path}` needs `datasets`: pip install datasets") from error
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


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no `{path}`: pass a file or folder that exists.")
    return path
