"""Knows the contents and the packs that all manifests of a store name.

Most of this comes from the catalogue; only manifests that it does not know, or whose files have
changed, are read. The catalogue is trusted only where a wrong entry can do no harm. Before anything
is removed, `confirm` reads the manifests that stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from packhorse.disk.snapshots.catalog import Catalog, Listing
from packhorse.disk.snapshots.manifest import Manifest, find_packs
from packhorse.disk.snapshots.names import CATALOG, ManifestFile, is_page, new_page
from packhorse.disk.snapshots.records import (
    MAX_PAGE_NBYTES,
    MAX_RECORDS,
    MAX_ROWS,
    Contents,
    Page,
    Record,
    decode_page,
    encode_page,
    fits,
    make_record,
)
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.storage.documents import read_checksum
from packhorse.storage.interface import Stamp, Storage

__all__ = ["Index"]

_MAX_TRIES = 3
_MAX_READ = 4  # pages; snapshots that follow one another are mostly in the same page
_PACK_NBYTES = 16


class _Place(NamedTuple):
    """The place of a record: its page, and its number there."""

    page: Page
    i: int


class Index:
    """The contents and the packs that the manifests of a listing name.

    Attributes:
        damaged: the error of each manifest that cannot be read, by path.
    """

    def __init__(self, storage: Storage, catalog: Catalog) -> None:
        self._storage = storage
        self._catalog = catalog
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing in memory; the next use reads the catalogue again."""
        self._pages: dict[str, Page] = {}  # by path
        self._bad: list[str] = []  # paths of pages that cannot be read
        # By path of the manifest, like all dicts below.
        self._places: dict[str, _Place] = {}
        self._loose: dict[str, Record] = {}  # not in any page yet
        self._stamps: dict[str, Stamp] = {}  # newer ones than in the pages
        self._confirmed: dict[str, tuple[Stamp | None, bytes]] = {}  # with the packs' names
        self.damaged: dict[str, PackhorseError] = {}

    def _known(self) -> tuple[dict[str, Any], ...]:
        return self._places, self._loose, self._stamps, self._confirmed, self.damaged

    def refresh(self, listing: Listing) -> None:
        """Read manifests that are new, and forget those that are gone."""
        self._load_pages()
        files = {file.path: file for files in listing.values() for file in files}
        self.damaged = {}
        for known in self._known():
            for path in known.keys() - files.keys():
                del known[path]
        for path, file in files.items():
            stamp = self._stamp(path)
            if stamp is None or stamp != file.stamp:
                self._admit(file)

    def _load_pages(self) -> None:
        """Read the pages that are new. If one has vanished, a writer has replaced it, and the pages
        are listed again."""
        found: list[tuple[str, Page | None]] = []
        for _ in range(_MAX_TRIES):
            self._bad = []
            try:
                names = filter(is_page, self._storage.names(CATALOG))
                found = [(path, self._load(path)) for path in (f"{CATALOG}/{n}" for n in names)]
                break
            except FileNotFoundError:
                continue
            except OSError:  # the catalogue is only a cache
                break
        self._set_pages({path: page for path, page in found if page is not None})

    def _load(self, path: str) -> Page | None:
        """A page; None if it is bad."""
        if path in self._pages:
            return self._pages[path]
        try:
            return decode_page(self._storage.read(path, MAX_PAGE_NBYTES))
        except CorruptionError:
            self._bad.append(path)
            return None

    def _set_pages(self, pages: dict[str, Page]) -> None:
        self._pages = pages
        self._places = {
            path: _Place(page, i) for page in pages.values() for i, path in enumerate(page.paths)
        }
        for path in self._stamps.keys() - self._places.keys():
            del self._stamps[path]
        for path in self._loose.keys() & self._places.keys():
            place = self._places[path]
            if place.page.crc(place.i) == self._loose[path].crc:
                del self._loose[path]

    def _stamp(self, path: str) -> Stamp | None:
        """The stamp that a manifest's file had when it was read; None if it was not read."""
        if path in self._loose:
            return self._loose[path].stamp
        place = self._places.get(path)
        return self._stamps.get(path) or (place and place.page.stamp(place.i))

    def _admit(self, file: ManifestFile) -> None:
        """Read a manifest. It is parsed only if it differs from the recorded one."""
        path = file.path
        try:
            text = self._catalog.read(file)
            crc = read_checksum(text, self._catalog.label(file))
            place, stamp = self._places.get(path), file.stamp or self._storage.stamp(path)
            if place is not None and place.page.crc(place.i) == crc:
                self._stamps[path] = stamp
            else:
                self.forget([path])
                self._loose[path] = make_record(self._catalog.parse(file, text), crc, stamp)
        except FileNotFoundError:  # removed since it was listed
            self.forget([path])
        except PackhorseError as error:
            self.forget([path])
            self.damaged[path] = error

    def add(self, manifest: Manifest, text: bytes) -> None:
        """Add a manifest that was just written."""
        path = manifest.file.path
        with suppress(OSError):  # without a record, it is read when it is needed
            stamp = self._storage.stamp(path)
            self._loose[path] = make_record(manifest, read_checksum(text, path), stamp)

    def forget(self, paths: Iterable[str]) -> None:
        """Drop the manifests at some paths."""
        for path in paths:
            for known in self._known():
                known.pop(path, None)

    def records(self, paths: Iterable[str]) -> Iterator[Record]:
        """The records of some manifests, in their order. Few pages are in memory at a time."""
        read: OrderedDict[Page, list[Record]] = OrderedDict()
        for path in paths:
            if path in self._loose:
                yield self._loose[path]
                continue
            page, i = self._places[path]
            if page not in read:
                read[page] = page.records()
            if len(read) > _MAX_READ:
                read.popitem(last=False)
            yield read[page][i]

    def contents(self) -> Iterator[tuple[str, Contents]]:
        """The contents that each manifest names, with its path. One page is in memory at a time."""
        for page in self._pages.values():
            if any(self._is_here(path, page) for path in page.paths):
                pairs = zip(page.paths, page.contents(), strict=True)
                yield from (pair for pair in pairs if self._is_here(pair[0], page))
        yield from ((record.path, record.contents) for record in self._loose.values())

    def _is_here(self, path: str, page: Page) -> bool:
        place = self._places.get(path)
        return place is not None and place.page is page and path not in self._loose

    def has(self, path: str) -> bool:
        """Whether the manifest at a path has a record, in the catalogue or because it was read."""
        return path in self._places or path in self._loose

    def packs(self) -> set[str]:
        """The names of all packs that any manifest needs."""
        joined = []
        for page in self._pages.values():
            live = [i for i, path in enumerate(page.paths) if self._is_here(path, page)]
            if len(live) == len(page.paths):
                joined.append(page.all_packs())
            else:
                joined += [page.packs(i) for i in live]
        joined += [record.packs for record in self._loose.values()]
        return set(chain.from_iterable(_digits(packs) for packs in joined))

    def confirm(self, files: Iterable[ManifestFile]) -> set[str]:
        """Read manifests again, and mark the bad ones as damaged.

        In a folder, every manifest is read. Elsewhere each read would be a request, so a manifest
        that this object has confirmed before is not read again while its stamp is the same.

        Returns:
            All packs that the good manifests need, according to the manifests themselves.

        Raises:
            OSError: the system failed to read a manifest.
        """
        needed: set[str] = set()
        for file in files:
            try:
                needed.update(_digits(self._confirm(file)))
            except PackhorseError as error:
                self.damaged[file.path] = error
        return needed

    def _confirm(self, file: ManifestFile) -> bytes:
        path, crc = file.path, self._expected(file.path)
        stamp, known = self._stamp(path), self._confirmed.get(path)
        if not self._storage.is_local and stamp and known and known[0] == stamp:
            return known[1]
        text = self._catalog.read(file)
        is_known = read_checksum(text, self._catalog.label(file)) == crc
        digits = find_packs(text) if is_known else None
        if digits is None:  # changed since it was read, or not in the form that we write
            names = dict.fromkeys(frame.pack for frame in self._catalog.parse(file, text).frames())
            return bytes.fromhex("".join(names))
        packs = bytes.fromhex(digits.decode())
        self._confirmed[path] = stamp, packs
        return packs

    def _expected(self, path: str) -> int | None:
        """The recorded checksum of a manifest; None if it has no record."""
        if path in self._loose:
            return self._loose[path].crc
        if path in self._places:
            page, i = self._places[path]
            return page.crc(i)
        return None

    def save(self) -> None:
        """Write new records to the catalogue, and rewrite pages that are not full or out of date.

        Pages are never changed: new pages are written, then old ones are removed. If that is
        interrupted, manifests are in two pages or in none, and neither does any harm.
        """
        open_ones = [path for path, page in self._pages.items() if not self._is_settled(page)]
        is_whole = len(open_ones) <= 1 and all(map(self._is_exact, open_ones))
        if is_whole and not self._loose and not self._bad:
            return
        pages = {path: b for path, b in self._pages.items() if path not in open_ones}
        pool = [self._restamped(r) for path in open_ones for r in self._live(self._pages[path])]
        pool = sorted(filter(fits, [*pool, *self._loose.values()]), key=lambda record: record.time)
        for run in _runs(pool):
            data = encode_page(run)
            if data is not None:
                path = new_page()
                self._storage.put_cache(path, data)
                pages[path] = decode_page(data)
        for path in [*open_ones, *self._bad]:
            self._storage.remove(path)
        if not pages:
            self._storage.remove_folder(CATALOG)
        self._loose, self._stamps, self._bad = {}, {}, []
        self._set_pages(pages)

    def _is_settled(self, page: Page) -> bool:
        """Whether a page is full, and most of its records are still valid."""
        n_live = sum(self._is_here(path, page) for path in page.paths)
        is_dated = any(path in self._stamps for path in page.paths)
        return page.is_full and 2 * n_live > len(page.paths) and not is_dated

    def _is_exact(self, path: str) -> bool:
        """Whether all records of a page are valid, with their stamps."""
        page = self._pages[path]
        return all(self._is_here(p, page) and p not in self._stamps for p in page.paths)

    def _live(self, page: Page) -> list[Record]:
        return [record for record in page.records() if self._is_here(record.path, page)]

    def _restamped(self, record: Record) -> Record:
        return replace(record, stamp=self._stamps.get(record.path, record.stamp))


def _digits(packs: bytes) -> list[str]:
    """The names of packs in hex, given 16 bytes for each."""
    digits = packs.hex()
    return [digits[at : at + 2 * _PACK_NBYTES] for at in range(0, len(digits), 2 * _PACK_NBYTES)]


def _runs(records: list[Record]) -> Iterator[list[Record]]:
    """Divide records into runs, one for each page."""
    run: list[Record] = []
    n_rows = 0
    for record in records:
        run.append(record)
        n_rows += record.n_rows
        if len(run) >= MAX_RECORDS or n_rows >= MAX_ROWS:
            yield run
            run, n_rows = [], 0
    if run:
        yield run
