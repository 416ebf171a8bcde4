"""Tables of other publishers: hub data sets and raw files on the web, each read once."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from flashdraft.errors import CheckpointError
from flashdraft.train.hub import Loader, load_dataset, stream_rows

Row = Mapping[str, Any]
Fetch = Callable[[str], Iterable[bytes]]  # the lines of the file at an address
TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class Table:
    """The rows of a hub data set, or of a file at an address: JSONL, a JSON list, or one JSON object, which is one row.

    columns: those that are kept, as some tables hold gigabytes of others; none given: all.
    """

    name: str
    columns: tuple[str, ...] = ()
    configuration: str | None = None
    revision: str | None = None

    @property
    def is_file(self) -> bool:
        return "://" in self.name

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.configuration})' if self.configuration else ''}"


class Sources:
    """Opens tables, and remembers them, also those that cannot be opened.

    load, fetch: stand for datasets.load_dataset and fetch_lines. report: told the name of each source before it is read.
    """

    def __init__(
        self, load: Loader | None = None, fetch: Fetch | None = None, report: Callable[[str], None] = lambda name: None
    ) -> None:
        self._load, self._fetch, self._report = load, fetch or fetch_lines, report
        self._found: dict[Table, list[Row] | CheckpointError] = {}
        self._texts: dict[str, str] = {}

    def rows(self, table: Table) -> list[Row]:
        """All rows, in order. Raises CheckpointError where the table cannot be read, ConfigError without `datasets`."""
        if table not in self._found:
            self._report(str(table))
            try:
                self._found[table] = [_narrow(row, table.columns) for row in self._read(table)]
            except CheckpointError as error:
                self._found[table] = error
        found = self._found[table]
        if isinstance(found, CheckpointError):
            raise found
        return found

    def text(self, address: str) -> str:
        """The text at an address. Raises CheckpointError."""
        if address not in self._texts:
            self._report(address)
            self._texts[address] = b"".join(self._lines(address)).decode(errors="replace")
        return self._texts[address]

    def _read(self, table: Table) -> Iterable[Any]:
        if table.is_file:
            return self._rows_of_file(table.name)
        load = self._load or load_dataset("eval")
        return stream_rows(_of_columns(load, table.columns), table.name, table.configuration, "test", table.revision)

    def _rows_of_file(self, address: str) -> Iterable[Any]:
        if not address.endswith(".jsonl"):
            whole = b"".join(self._lines(address))
            try:
                found = json.loads(whole)
                return found if isinstance(found, list) else [found]
            except ValueError:  # JSON lines under the name of JSON
                return _json_lines(address, whole.split(b"\n"))
        return _json_lines(address, self._lines(address))

    def _lines(self, address: str) -> Iterator[bytes]:
        try:
            yield from self._fetch(address)
        except Exception as error:  # of the network, in many kinds, while the answer is read, too
            why = shorten(str(error) or type(error).__name__, 200)
            raise CheckpointError(f"{address} cannot be read ({why}): check the network") from error


def fetch_lines(address: str) -> Iterator[bytes]:
    """The lines of the file at a web address, as they arrive."""
    if not address.startswith(("https://", "http://")):  # the address is data: it must not name a file of this machine
        raise ValueError("not a web address")
    request = urllib.request.Request(address, headers={"User-Agent": "flashdraft"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        yield from answer


def file_address(address: str) -> str:
    """Where the hub gives the file itself, of the address of a page about it; `raw` would give a pointer for large files."""
    if address.startswith("https://huggingface.co/"):
        for page in ("/tree/", "/blob/", "/raw/"):
            address = address.replace(page, "/resolve/", 1)
    return address


def _json_lines(address: str, lines: Iterable[bytes]) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise CheckpointError(f"{address}, line {number}: not a JSON object in UTF-8") from error


def _narrow(row: Any, columns: tuple[str, ...]) -> Row:
    if not isinstance(row, Mapping):
        raise CheckpointError(f"a row is not an object, but {type(row).__name__}: its publisher has changed the file")
    return {name: row[name] for name in columns if name in row} if columns else dict(row)


def _of_columns(load: Loader, columns: tuple[str, ...]) -> Loader:
    """Reads nothing but these columns, where the loader can: pictures would need another package."""

    def narrowed(*names: Any, **how: Any) -> Iterable[Any]:
        rows = load(*names, **how)
        return rows.select_columns(list(columns)) if columns and hasattr(rows, "select_columns") else rows

    return narrowed
