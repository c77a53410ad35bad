"""A disk whose power can be cut: a SQLite VFS that records every write, truncation and sync, and what may be left.

The recording VFS inherits from SQLite's own `unix` VFS and passes everything on, shared memory and locks included, so
the database under test works as ever, in WAL mode and with several connections. From the record `Disk.after_cut` makes
the files that a machine could find after losing power at any moment:

- what was synced is there;
- of what was not, every 512-byte sector independently shows any of the contents it has had since the last sync, and
  the file has any of its sizes since then; a sector that never reached the disk may hold garbage;
- a name is in its folder for certain only after a sync of the folder (SQLite does one with the first sync of a journal
  or WAL that it has made); later changes of the folder happened up to some point.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import apsw

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that the disk was told. `inode` is the number of a file's content, `name` its place in the folder."""

    kind: str  # create, delete, write, truncate, sync, sync_folder
    inode: int = 0
    name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class _Content:
    """A file as the program sees it, and what of it is certain."""

    durable: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=list)
    sectors: dict[int, list[bytes]] = field(default_factory=dict)

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if len(self.now) < end:
            self.now.extend(bytes(end - len(self.now)))
        self.now[offset:end] = data
        self.sizes.append(len(self.now))
        for number in range(offset // SECTOR, (end + SECTOR - 1) // SECTOR):
            self.sectors.setdefault(number, []).append(bytes(self.now[number * SECTOR : (number + 1) * SECTOR]))

    def truncate(self, size: int) -> None:
        del self.now[size:]
        self.now.extend(bytes(size - len(self.now)))
        self.sizes.append(size)

    def sync(self) -> None:
        self.durable = bytes(self.now)
        self.sizes.clear()
        self.sectors.clear()

    def survive(self, chance: random.Random, manner: str) -> bytes:
        """What is found after the cut."""
        if manner == "lost":
            return self.durable
        if manner == "kept":
            return bytes(self.now)
        size = chance.choice([len(self.durable), *self.sizes])
        found = bytearray(self.durable[:size])
        found.extend(bytes(size - len(found)))
        for number, versions in self.sectors.items():
            start = number * SECTOR
            if start >= size:
                continue
            before = bytes(found[start : start + SECTOR])
            choices = [before, *versions]
            if start >= len(self.durable) and chance.random() < 0.1:
                choices = [chance.randbytes(SECTOR)]
            picked = chance.choice(choices).ljust(SECTOR, b"\0")
            found[start : min(size, start + SECTOR)] = picked[: min(size, start + SECTOR) - start]
        return bytes(found)


class Disk:
    """The record. `path` is the database; only files beside it with its name are recorded.

    `on_sync(name)` may raise; `on_write(name, data)` may tell how many bytes fit before the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: list[Happening] = []
        self.on_sync: Callable[[str], None] | None = None
        self.on_write: Callable[[str, bytes], int | None] | None = None
        self._names: dict[str, int] = {}
        self._synced_once: set[int] = set()
        self._next = 0

    def opened(self, name: str) -> int:
        """SQLite opens a file; the number of its content."""
        if name not in self._names:
            self._next += 1
            self._names[name] = self._next
            self.record.append(Happening("create", self._next, name))
        return self._names[name]

    def deleted(self, name: str, sync_folder: bool) -> None:
        if self._names.pop(name, None) is not None:
            self.record.append(Happening("delete", 0, name))
        if sync_folder:
            self.record.append(Happening("sync_folder"))

    def synced(self, inode: int, name: str) -> None:
        """SQLite syncs a file itself."""
        self.record.append(Happening("sync", inode))
        if inode not in self._synced_once and name.endswith(("-wal", "-journal")):
            self._synced_once.add(inode)
            self.record.append(Happening("sync_folder"))

    def fdatasync_of_wal(self) -> None:
        """The store syncs SQLite's WAL descriptor: the content, not the folder."""
        inode = self._names.get(str(self.path) + "-wal")
        if inode is not None:
            self.record.append(Happening("sync", inode))

    def after_cut(self, moment: int, chance: random.Random) -> dict[str, bytes]:
        """Files by name that are found when the power fails after the first `moment` happenings."""
        contents: dict[int, _Content] = {}
        certain: dict[str, int] = {}
        folder: list[dict[str, int]] = [{}]
        for event in self.record[:moment]:
            if event.kind == "write":
                contents[event.inode].write(event.offset, event.data)
            elif event.kind == "truncate":
                contents[event.inode].truncate(event.offset)
            elif event.kind == "sync":
                contents[event.inode].sync()
            elif event.kind == "create":
                contents[event.inode] = _Content()
                folder.append({**folder[-1], event.name: event.inode})
            elif event.kind == "delete":
                folder.append({name: inode for name, inode in folder[-1].items() if name != event.name})
            else:
                certain = folder[-1]
                folder = [certain]
        manner = chance.choice(["lost", "kept", "mixed", "mixed", "mixed"])
        names = folder[0] if manner == "lost" else folder[-1] if manner == "kept" else chance.choice(folder)
        return {name: contents[inode].survive(chance, manner) for name, inode in names.items()}


class RecordedFile(apsw.VFSFile):
    """A file of SQLite that tells the disk what happens to it."""

    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        self._inode = disk.opened(self._name) if self._name.startswith(str(disk.path)) else None
        super().__init__("unix", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        taken = None if self._disk.on_write is None else self._disk.on_write(self._name, data)
        if taken is not None:
            super().xWrite(bytes(data)[:taken], offset)
            raise apsw.FullError("no space left")
        super().xWrite(data, offset)
        if self._inode is not None:
            self._disk.record.append(Happening("write", self._inode, offset=offset, data=bytes(data)))

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        if self._inode is not None:
            self._disk.record.append(Happening("truncate", self._inode, offset=size))

    def xSync(self, flags: int) -> None:
        if self._disk.on_sync is not None:
            self._disk.on_sync(self._name)
        super().xSync(flags)
        if self._inode is not None:
            self._disk.synced(self._inode, self._name)


class RecordingVFS(apsw.VFS):
    """SQLite's `unix` VFS with a record. Unregister it at the end."""

    def __init__(self, name: str, disk: Disk) -> None:
        self._disk = disk
        super().__init__(name, base="unix")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> RecordedFile:
        return RecordedFile(self._disk, name, flags)

    def xDelete(self, name: str, sync_folder: bool) -> None:
        super().xDelete(name, sync_folder)
        self._disk.deleted(name, sync_folder)
