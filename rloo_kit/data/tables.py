"""Rows that only the stack can read: Parquet, folders of `save_to_disk`, the hub; and columns as a `Dataset`."""

from pathlib import Path
from typing import Any

from rloo_kit import _stack
from rloo_kit.data.chat import parse_conversation
from rloo_kit.data.columns import Columns, DataSource, exact_array, plain, require_columns, taken_columns
from rloo_kit.errors import DataError


def is_saved_folder(folder: Path) -> bool:
    """Whether `save_to_disk` of a `datasets.Dataset` or `DatasetDict` wrote the folder."""
    is_dataset = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return is_dataset or (folder / "dataset_dict.json").is_file()


def read_arrow(source: Any, columns: Columns) -> DataSource:
    """The rows of a Parquet file or a `pyarrow.Table`; raises DataError if the file is not one, or lacks a column."""
    datasets = _stack.load_stack().datasets
    import pyarrow

    name = str(source) if (is_file := isinstance(source, Path)) else "the dataset"
    table = open_parquet(source) if is_file else pyarrow.table(source)
    if len(set(table.column_names)) < table.num_columns:
        raise DataError(f"{name} has two columns of one name: {', '.join(table.column_names)}")
    for number, field in enumerate(table.schema):
        try:
            datasets.features.features.generate_from_arrow_type(field.type)
        except ValueError:
            values = table.column(number).to_pylist(maps_as_pydicts="lossy")  # of a type that `datasets` has not
            table = table.set_column(number, field.name, to_arrow(list(map(plain, values))))
    return from_dataset(datasets.Dataset(table), name, columns)


def open_parquet(path: Path, schema_only: bool = False) -> Any:
    """The table of a Parquet file, or its schema alone; raises DataError if it is none."""
    _stack.load_stack()  # before pyarrow, since these libraries ship their own
    import pyarrow
    import pyarrow.parquet

    try:
        return (pyarrow.parquet.read_schema if schema_only else pyarrow.parquet.read_table)(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {str(error).splitlines()[0]}") from error


def read_folder(folder: Path, split: str | None, split_key: str, columns: Columns) -> DataSource:
    """The rows of a folder of `save_to_disk`: of the split that the key `split_key` names (None: test), if it has
    splits. Raises DataError for a split that is not there, or a damaged folder."""
    datasets = _stack.load_stack().datasets
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # the libraries that read it share no base class of errors
        raise DataError(
            f"{folder} is a folder of save_to_disk that cannot be read: {type(error).__name__}: {error}. Save it again"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        if split_key == "data.test_split" and split is not None:
            raise DataError(f"{split_key} is {split!r}, but {folder} was saved without splits; remove {split_key}")
        return from_dataset(found, str(folder), columns)
    split = split or "test"
    if split not in found:
        raise DataError(f"{folder} has no split {split!r}; set {split_key} to one of {', '.join(found) or 'none'}")
    return from_dataset(found[split], f"{folder} ({split})", columns)


def read_hub(
    source: str, subset: str | None, split: str | None, columns: Columns, key: str, split_key: str
) -> DataSource:
    """One split of a dataset on the hub or in the local cache of `datasets`; `key` and `split_key` name it
    (split None: test). Raises DataError if it is unreachable, or dataset, subset, split or column does not exist."""
    datasets = _stack.load_stack().datasets
    split = split or "test"
    try:
        table = datasets.load_dataset(source, name=subset, split=split)
    except Exception as error:  # the hub's libraries share no base class of errors
        found = f"{key}: '{source}' (subset {subset}, split {split}) could not be loaded"
        raise DataError(_hub_message(found, error, key, f"{columns.prefix}subset", split_key)) from error
    return from_dataset(table, f"{source} ({split})", columns)


def from_dataset(table: Any, name: str, columns: Columns) -> DataSource:
    """A `DataSource` from a `datasets.Dataset`; its other columns keep their types."""
    if not len(table):
        raise DataError(f"{name} has no rows")
    table = table.with_format(None)
    places = [f"row {number}" for number in range(1, len(table) + 1)]
    require_columns(name, places[0], table.column_names, columns)
    has_answer = columns.answer in table.column_names
    images = tuple(column for column, feature in table.features.items() if _holds_images(feature))
    taken, notes = taken_columns(name, table.column_names, columns, images)
    kept = [column for column in table.column_names if column not in taken]
    answers = list(table[columns.answer]) if has_answer else None
    if answers and getattr(table.features[columns.answer], "dtype", "") == "float32":  # 0.1, as written
        answers = table.with_format("arrow")[:][columns.answer].cast("string").cast("double").to_pylist()
    return DataSource(
        name=name,
        prompts=[parse_conversation(prompt) for prompt in table[columns.prompt]],
        answers=answers,
        others=table.select_columns(kept) if kept else None,
        places=places,
        notes=notes,
    )


def _holds_images(feature: Any) -> bool:
    """Whether values of this type are or contain images, or other media."""
    if isinstance(feature, dict):
        return any(_holds_images(inner) for inner in feature.values())
    inner = getattr(feature, "feature", None)  # of a list
    return type(feature).__name__ in ("Image", "Audio", "Video", "Pdf") or (inner is not None and _holds_images(inner))


def to_dataset(others: Any, name: str) -> Any:
    """Columns of a `DataSource` called `name` as a `datasets.Dataset`; None, and what is one already, stay."""
    if not isinstance(others, dict):
        return others
    import pyarrow

    try:
        arrays = {key: to_arrow(values) for key, values in others.items()}
        return _stack.load_stack().datasets.Dataset(pyarrow.table(arrays))
    except Exception as error:  # pyarrow's, json's, of datasets
        raise DataError(f"{name}: Arrow cannot store the columns {', '.join(others)}: {error}") from error


def to_arrow(values: list[Any]) -> Any:
    """Values as one Arrow array, the exact one if there is one; raises pyarrow's errors for what it cannot store."""
    import pyarrow

    exact = exact_array(values)
    return pyarrow.array(values) if exact is None else exact


def _hub_message(found: str, error: Exception, key: str, subset_key: str, split_key: str) -> str:
    text = " ".join(str(error).split())
    found = f"{found}: {type(error).__name__}: {text}"
    lowered = text.lower()
    if "config name is missing" in lowered or "builderconfig" in lowered:
        return f"{found} Set {subset_key} to one of those named."
    if "split" in lowered and not isinstance(error, OSError):
        return f"{found} Set {split_key} to one of those named."
    return (
        f"{found} If the id is right, the hub cannot be reached from here (or asks for a token: HF_TOKEN in .env). "
        "Load it once on a connected machine and copy the cache folder (HF_HOME), or save the split as a file "
        f"(dataset.to_parquet('data.parquet')) and set {key} to it."
    )
