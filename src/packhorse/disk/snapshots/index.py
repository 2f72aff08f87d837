"""What all manifests of a store name: by the catalogue, and by those that it does not know.

The catalogue is believed where nothing can be lost by it, and a manifest that changed since is read
again. Before anything is removed, `confirm` reads what is kept.
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
_MAX_READ = 4  # pages, of which each mostly has snapshots that follow one another
_PACK_NBYTES = 16


class _Place(NamedTuple):
    """A record in a page."""

    page: Page
    i: int


class Index:
    """What the manifests of a listing name.

    Attributes:
        damaged: what is wrong with those that cannot be read, by path.
    """

    def __init__(self, storage: Storage, catalog: Catalog) -> None:
        self._storage = storage
        self._catalog = catalog
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing in memory; the next use reads the catalogue again."""
        self._pages: dict[str, Page] = {}  # by path
        self._bad: list[str] = []  # paths of pages that cannot be read
        # By path of the manifest, as all below.
        self._places: dict[str, _Place] = {}
        self._loose: dict[str, Record] = {}
        self._stamps: dict[str, Stamp] = {}  # younger ones than pages have
        self._confirmed: dict[str, tuple[Stamp | None, bytes]] = {}  # and the packs it names
        self.damaged: dict[str, PackhorseError] = {}

    def _known(self) -> tuple[dict[str, Any], ...]:
        return self._places, self._loose, self._stamps, self._confirmed, self.damaged

    def refresh(self, listing: Listing) -> None:
        """Read what is new, and forget what is gone."""
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
        """Read the pages that are new; one may vanish for another that is there already."""
        found: list[tuple[str, Page | None]] = []
        for _ in range(_MAX_TRIES):
            self._bad = []
            try:
                names = filter(is_page, self._storage.names(CATALOG))
                found = [(path, self._load(path)) for path in (f"{CATALOG}/{n}" for n in names)]
                break
            except FileNotFoundError:
                continue
            except OSError:  # it does well without
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
        """The stamp of a manifest when it was read."""
        if path in self._loose:
            return self._loose[path].stamp
        place = self._places.get(path)
        return self._stamps.get(path) or (place and place.page.stamp(place.i))

    def _admit(self, file: ManifestFile) -> None:
        """Read a manifest; one that is what it was when it was read before is not parsed."""
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
        """Take in a manifest that was just written."""
        path = manifest.file.path
        with suppress(OSError):  # else it is read when it is needed
            stamp = self._storage.stamp(path)
            self._loose[path] = make_record(manifest, read_checksum(text, path), stamp)

    def forget(self, paths: Iterable[str]) -> None:
        """Drop the manifests at some paths."""
        for path in paths:
            for known in self._known():
                known.pop(path, None)

    def records(self, paths: Iterable[str]) -> Iterator[Record]:
        """What is known of some manifests, in their order; few pages are in memory at a time."""
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
        """The contents that each manifest names, by its path; one page is in memory at a time."""
        for page in self._pages.values():
            if any(self._is_here(path, page) for path in page.paths):
                pairs = zip(page.paths, page.contents(), strict=True)
                yield from (pair for pair in pairs if self._is_here(pair[0], page))
        yield from ((record.path, record.contents) for record in self._loose.values())

    def _is_here(self, path: str, page: Page) -> bool:
        place = self._places.get(path)
        return place is not None and place.page is page and path not in self._loose

    def has(self, path: str) -> bool:
        """Whether the manifest at a path was read, or is in the catalogue."""
        return path in self._places or path in self._loose

    def packs(self) -> set[str]:
        """All packs that some manifest needs."""
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
        """Read manifests anew, and mark as damaged what is.

        In a folder each is read now. Elsewhere, where that is a request for each, what this object
        has confirmed before is good as long as its stamp is the same.

        Returns:
            All packs that the good ones need, by their own words.

        Raises:
            OSError: one cannot be read, for reasons of the system.
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
        if digits is None:  # not what was read before, or not written by us
            names = dict.fromkeys(frame.pack for frame in self._catalog.parse(file, text).frames())
            return bytes.fromhex("".join(names))
        packs = bytes.fromhex(digits.decode())
        self._confirmed[path] = stamp, packs
        return packs

    def _expected(self, path: str) -> int | None:
        """The checksum of a manifest, by what is known of it."""
        if path in self._loose:
            return self._loose[path].crc
        if path in self._places:
            page, i = self._places[path]
            return page.crc(i)
        return None

    def save(self) -> None:
        """Write to the catalogue what is not in it, and remove from it what is of no use any more.

        Pages are never changed: new ones are put, and then old ones go. Should that end in
        between, manifests are in two pages or in none, and both does no harm.
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
        """Whether a page is full, and most of it of use."""
        n_live = sum(self._is_here(path, page) for path in page.paths)
        is_dated = any(path in self._stamps for path in page.paths)
        return page.is_full and 2 * n_live > len(page.paths) and not is_dated

    def _is_exact(self, path: str) -> bool:
        """Whether all that a page says is so."""
        page = self._pages[path]
        return all(self._is_here(p, page) and p not in self._stamps for p in page.paths)

    def _live(self, page: Page) -> list[Record]:
        return [record for record in page.records() if self._is_here(record.path, page)]

    def _restamped(self, record: Record) -> Record:
        return replace(record, stamp=self._stamps.get(record.path, record.stamp))


def _digits(packs: bytes) -> list[str]:
    """The names of packs, of 16 bytes each."""
    digits = packs.hex()
    return [digits[at : at + 2 * _PACK_NBYTES] for at in range(0, len(digits), 2 * _PACK_NBYTES)]


def _runs(records: list[Record]) -> Iterator[list[Record]]:
    """Records in runs that make a page each."""
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
