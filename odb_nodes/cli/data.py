"""From what a command line names to a table of lengths."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_nodes._core.extras import import_extra
from odb_nodes._core.named_function import is_function_name, load_function
from odb_nodes.cli import options as cli
from odb_nodes.loader import ODBDataLoader
from odb_nodes.processing import WorkerOptions
from odb_nodes.sources import JsonlSource
from odb_nodes.tools.estimate import table_of_loader
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.lengths import observe_lengths

__all__ = ["DataOptions", "read_table", "with_data"]

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
        seed: seed of the order, and of what is drawn.
    """

    data: cli.Data = None
    lengths: cli.Lengths = None
    tokenizer: cli.Tokenizer = None
    field: cli.Field = None
    samples: cli.Samples = None
    workers: cli.Workers = 0
    save_lengths: cli.SaveLengths = None
    seed: cli.Seed = 0


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


def read_table(options: DataOptions) -> LengthTable:
    """Return the lengths of the data that a command line names.

    Raises:
        OSError, TypeError, ValueError: the data cannot be read; the message says what to do.
        ImportError: they need a package that is not installed.
    """
    if (options.data is None) == (options.lengths is None):
        both = " They were both given." if options.data is not None else ""
        raise ValueError(
            f"pass either the data (a file, a folder or module:function), or --lengths FILE.{both}"
        )
    if options.lengths is not None:
        without = DataOptions(lengths=options.lengths, seed=options.seed)
        if options != without:
            raise ValueError(
                "--lengths has the lengths already: leave out --tokenizer, --field, --samples, "
                "--workers and --save-lengths."
            )
        return LengthTable.load(options.lengths)
    assert options.data is not None
    dataset = _dataset_of(options.data)
    workers = WorkerOptions(num_workers=options.workers)
    if isinstance(dataset, ODBDataLoader):
        print(
            "the data of the loader is taken, but none of its options: pass --budget, --window, "
            "--weight and others as it has them.",
            file=sys.stderr,
        )
        table = table_of_loader(dataset, options.samples, workers)
    else:
        tokenize = None if options.tokenizer is None else _tokenize_by(options.tokenizer)
        table = observe_lengths(
            dataset,
            process_fn=_Tokenization(tokenize, options.field),
            samples=options.samples,
            seed=options.seed,
            workers=workers,
        )
    if options.save_lengths is not None:
        table.save(options.save_lengths)
    return table


class _Tokenization:
    """Makes a sample of an item: tokenizes a field of it, unless it has `input_ids`.

    Args:
        tokenize: text or messages -> token ids; `None` where there is no tokenizer.
        field: the field; `None` for the first of `messages` and `text` that an item has.
    """

    def __init__(self, tokenize: Any, field: str | None) -> None:
        self._tokenize, self._field = tokenize, field

    def __call__(self, item: Any) -> Any:
        """Return the sample of an item.

        Raises:
            ValueError: there is no tokenizer, or the item lacks the field.
        """
        if not isinstance(item, Mapping) or ("input_ids" in item and self._field is None):
            return item
        fields = _FIELDS if self._field is None else (self._field,)
        found = [item[name] for name in fields if item.get(name) is not None]
        if self._tokenize is None:
            raise ValueError("it has no `input_ids`: pass --tokenizer.")
        if not found:
            raise ValueError(
                f"it has none of the fields {fields}, but {sorted(item)}: pass --field."
            )
        return {"input_ids": self._tokenize(found[0])}


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
        return lambda text: tokenizer.encode(text).ids
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
        return load_function(data)()
    if any((path / name).exists() for name in _DATASETS_FILES):
        return _saved_dataset(path)
    source = JsonlSource(_existing(data) if "*" not in data else data, 0, 1, shuffle=False)
    return source.copy(shuffle=source.recalls)  # a loader, too, cannot shuffle compressed files


def _saved_dataset(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"`{path}` needs `datasets`: pip install datasets") from error
    saved = datasets.load_from_disk(path)
    if isinstance(saved, dict):
        raise ValueError(f"`{path}` has splits: pass the folder of one, of {sorted(saved)}.")
    return saved


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no `{path}`: pass a file or folder that exists.")
    return path
