"""From what a command line names to a table of lengths, and the options of a loader."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_nodes._core.checks import import_extra
from odb_nodes.cli import options as cli
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.options import JobOptions
from odb_nodes.tools.code import budget_code
from odb_nodes.tools.command_line import file_of, is_function_name, load_function

if TYPE_CHECKING:
    from odb_nodes.tools.length_table import LengthTable

__all__ = ["Data", "DataOptions", "with_data"]

_REPLY_S = 10.0
_FIELDS = ("messages", "text")
_DATASETS_FILES = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What a command line says of the data.

    Attributes:
        data: a JSON Lines file, or a folder or pattern of those; a folder of `datasets`; or
            `module:function` that returns a dataset or an `ODBDataLoader`.
        lengths: a file of a `LengthTable`, in place of `data`.
        tokenizer: a `tokenizer.json`, or what `AutoTokenizer.from_pretrained` takes.
        field: the field of an item that is tokenized; default: `messages` or `text`.
        samples: number of samples to draw; `None` for all.
        workers: number of worker processes.
        save_lengths: the file that the table is written to; `None` for none.
        seed: seed of the order, and of what is drawn; `None` for that of the loader, or 0.
        force: whether files that exist are replaced.
    """

    data: cli.Data = None
    lengths: cli.Lengths = None
    tokenizer: cli.Tokenizer = None
    field: cli.Field = None
    samples: cli.Samples = None
    workers: cli.Workers = 0
    save_lengths: cli.SaveLengths = None
    seed: cli.Seed = None
    force: cli.Force = False

    def check_outputs(self, *inputs: Path | None, **outputs: str | Path | None) -> None:
        """Check the files that a command writes: these by their options, and `save_lengths`."""
        outputs = {"save-lengths": self.save_lengths, **outputs}
        cli.check_outputs(
            {f"--{option}": path for option, path in outputs.items()},
            [self.data, self.lengths, self.tokenizer, *inputs],
            force=self.force,
        )


def with_data(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the data, made into its first argument."""
    given = inspect.signature(DataOptions, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(DataOptions(**{name: options.pop(name) for name in given}), **options)

    all_options = [*given.values(), *(one.replace(kind=one.KEYWORD_ONLY) for one in own)]
    run.__signature__ = inspect.Signature(all_options)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in all_options}
    del run.__wrapped__
    return run


class Data:
    """The data that a command line names and, where they are a loader's, its options.

    What the command line gives itself comes before an option of the loader.
    """

    def __init__(self, what: DataOptions, table: LengthTable | None = None) -> None:
        self._what, self._table = what, table
        self._dataset: Any = None
        if table is None:
            self._check()
        if what.data is not None:
            self._dataset = _dataset_of(what.data)
        from odb_nodes.loader import ODBDataLoader

        is_loader = isinstance(self._dataset, ODBDataLoader)
        self._options = self._dataset.options if is_loader else None
        if is_loader:
            if what.tokenizer is not None or what.field is not None:
                raise ValueError(
                    f"`{what.data}` returns a loader, which processes its samples itself: leave "
                    "out --tokenizer and --field."
                )
            default = {"token_budget": None, "weights": None} | vars(JobOptions())
            taken = {"token_budget": budget_code(self.budget()), "weights": self.weights(None)}
            shown = [
                f"{name}={value}"
                for name, value in (taken | self.job()).items()
                if value != default[name]
            ]
            print(f"from the loader, where not given here: {', '.join(shown)}", file=sys.stderr)

    def _check(self) -> None:
        what = self._what
        if (what.data is None) == (what.lengths is None):
            both = " They were both given." if what.data is not None else ""
            raise ValueError(
                "pass either the data (a file, a folder or module:function), or --lengths "
                f"FILE.{both}"
            )
        without = DataOptions(lengths=what.lengths, seed=what.seed, force=what.force)
        if what.lengths is not None and what != without:
            raise ValueError(
                "--lengths has the lengths already: leave out --tokenizer, --field, --samples, "
                "--workers and --save-lengths."
            )

    @property
    def files(self) -> list[Path | None]:
        """The files behind `module:function`, which are known once it was called."""
        if self._dataset is None:
            return []
        from odb_nodes.tools.lengths import files_read

        dataset = self._dataset if self._options is None else self._dataset.dataset
        return [*files_read(dataset), file_of(self._what.data or "")]

    @property
    def ranks(self) -> int:
        """Number of ranks, where none is given: the loader's virtual ranks, or 1."""
        return (self._options and self._options.virtual_ranks) or 1

    @property
    def shuffles(self) -> bool:
        """Whether an epoch is shuffled."""
        loader = self._options
        return loader is None or (loader.shuffle is not False and loader.sampler is None)

    @property
    def loader_budget(self) -> TokenBudget | None:
        """The budget of the loader."""
        return None if self._options is None else self._options.budget

    def budget(self, **given: Any) -> TokenBudget:
        """Return the budget with the fields that are given, and not `None`."""
        known = {name: value for name, value in given.items() if value is not None}
        return replace(self.loader_budget or TokenBudget(cli.BUDGET_TOKENS), **known)

    def job(self, **given: Any) -> dict[str, Any]:
        """Return the fields of `JobOptions`, with those that are given, and not `None`."""
        known = {name: value for name, value in given.items() if value is not None}
        options = self._options or JobOptions()
        own = {"seed": self._what.seed} if self._what.seed is not None else {}
        return {one.name: getattr(options, one.name) for one in fields(JobOptions)} | own | known

    def weights(self, given: list[str] | None) -> Any:
        """Return the weights of the sources that are given, or else those of the loader."""
        return cli.weights_of(given) or (self._options and self._options.weights)

    def table(self) -> LengthTable:
        """Return the lengths of the data, and save them where that is asked for."""
        what = self._what
        if self._table is None:
            self._table = self._observed() if what.lengths is None else _loaded(what.lengths)
        if what.save_lengths is not None:
            self._table.save(what.save_lengths)
        return self._table

    def _observed(self) -> LengthTable:
        from odb_nodes.processing import WorkerOptions
        from odb_nodes.tools.estimate import table_of_loader
        from odb_nodes.tools.lengths import observe_lengths

        what, workers = self._what, WorkerOptions(num_workers=self._what.workers)
        if self._options is not None:
            return table_of_loader(self._dataset, what.samples, workers)
        tokenize = None if what.tokenizer is None else _tokenize_by(what.tokenizer)
        return observe_lengths(
            self._dataset,
            process_fn=_Tokenization(tokenize, what.field),
            samples=what.samples,
            seed=what.seed or 0,
            workers=workers,
        )


def _loaded(path: Path) -> LengthTable:
    from odb_nodes.tools.length_table import LengthTable

    return LengthTable.load(path)


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
