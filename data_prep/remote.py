"""Token files on object storage: s3://, gs://, https:// and whatever else fsspec reads, through a cache on this node.

fsspec's filecache downloads whole files, and again when the remote one has changed. Added here: one download a node
however many ranks ask, checksums, a limit on the space, and reading ahead of use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from pathlib import Path

import xxhash

from data_prep.errors import InputError
from data_prep.files import make_directory, read_json, write_text
from data_prep.order_cache import locked
from data_prep.token_file import Tokens, file_of

logger = logging.getLogger("recipes")


class RemoteFiles:
    """Files of URLs, as local paths.

    Args:
        directory: where they are kept; shared by the ranks of a node, and by nodes where the file system is.
        limit_gib: most that the directory may hold; None: as much as there is room for.

    Credentials and endpoints come from the environment or fsspec's configuration, as for any other user of fsspec.
    """

    def __init__(self, directory: str | Path, limit_gib: float | None = None):
        self.directory = Path(directory)
        self.limit = None if limit_gib is None else int(limit_gib * 2**30)
        self._fetched: dict[str, Path] = {}

    def _system(self, url: str, storage: Path | None = None):
        """The file system of a URL; with `storage`, behind a filecache there."""
        import fsspec

        protocol = url.partition("://")[0]
        try:
            if storage is None:
                return fsspec.filesystem(protocol)
            # A fresh instance each time: it reads what other processes have fetched meanwhile.
            return fsspec.filesystem(
                "filecache",
                target_protocol=protocol,
                cache_storage=str(storage),
                check_files=True,
                skip_instance_cache=True,
            )
        except (ImportError, ValueError) as error:
            raise InputError(f"{url} can't be read: {error}") from None

    @contextlib.contextmanager
    def _told(self, url: str):
        try:
            yield
        except FileNotFoundError:
            raise InputError(f"{url} does not exist; python -m data_prep.tokenize_files makes token files") from None
        except InputError:
            raise
        except Exception as error:  # each storage library raises its own
            raise InputError(f"{url} can't be read: {type(error).__name__}: {' '.join(str(error).split())}") from None

    def exists(self, url: str) -> bool:
        with self._told(url):
            return self._system(url).exists(url)

    def size(self, url: str) -> int:
        """Bytes."""
        with self._told(url):
            return self._system(url).size(url)

    def glob(self, pattern: str) -> list[str]:
        """URLs, sorted."""
        with self._told(pattern):
            system = self._system(pattern)
            return sorted(system.unstrip_protocol(path) for path in system.glob(pattern))

    def fetch(self, url: str) -> Path:
        """The local copy of a file, downloaded if need be and compared with the checksum in the record beside it.

        Raises InputError for a file that is not there, does not fit, or twice comes with another checksum.
        """
        if url in self._fetched:
            return self._fetched[url]
        # A folder for each URL: filecache's list of what it holds can't be written by two processes at once.
        storage = make_directory(self.directory, "data.cache_dir") / xxhash.xxh3_64_hexdigest(url.encode())
        verified = storage / "verified"
        with self._told(url), locked(storage.with_suffix(".lock")):
            for attempt in (1, 2):
                system = self._system(url, storage)
                if system._check_file(system._strip_protocol(url)) is False:
                    # Removed, not written over: another run may have the old content mapped.
                    shutil.rmtree(storage, ignore_errors=True)
                    self._make_room(system.fs.size(url), url)
                    logger.info("fetching %s", url)
                    system = self._system(url, storage)
                with system.open(url) as file:
                    path = Path(file.name)
                if verified.exists():
                    os.utime(verified)  # used now: the last to be removed
                    break
                expected = self._recorded_checksum(url)
                if expected is None or checksum(path) == expected:
                    write_text(verified, expected or "no checksum is recorded")
                    break
                shutil.rmtree(storage)
                if attempt == 2:
                    raise InputError(
                        f"{url} does not have the checksum in the record beside it, {expected}: it is damaged or of "
                        "another job; upload the file and its .json again"
                    )
        self._fetched[url] = path
        return path

    def _recorded_checksum(self, url: str) -> str | None:
        prefix, dot, suffix = url.rpartition(".")
        if suffix not in ("bin", "idx") or not self.exists(record := file_of(prefix, ".json")):
            return None
        return read_json(self.fetch(record)).get("checksums", {}).get(dot + suffix)

    def _make_room(self, needed: int, url: str) -> None:
        """Remove the longest unused files of other runs until `needed` bytes fit under the limit and on the disk."""
        kept = {path.parent: path.stat().st_mtime for path in self.directory.glob("*/verified")}
        sizes = {folder: sum(f.stat().st_size for f in folder.iterdir()) for folder in kept}
        free = shutil.disk_usage(self.directory).free
        if self.limit is not None:
            free = min(free, self.limit - sum(sizes.values()))
        mine = {path.parent for path in self._fetched.values()}
        for folder in sorted(kept.keys() - mine, key=kept.get):
            if free >= needed:
                return
            shutil.rmtree(folder)  # a process that maps a file keeps its content until it ends
            free += sizes[folder]
        if free < needed:
            raise InputError(
                f"{url} takes {needed / 2**30:.3g} GiB, {self.directory} has room for {max(free, 0) / 2**30:.3g} GiB: "
                "raise data.cache_limit_gib or choose another data.cache_dir"
            )

    def check_room(self, files: list[Tokens]) -> None:
        """Raises InputError when the data of one run can't all be on this node at once.

        Every epoch visits all documents in random order, so that a smaller cache would fetch each file for each sample.
        """
        if self.limit is None:
            return
        needed = sum(pair.total_tokens * pair.dtype.itemsize + 20 * len(pair) for file in files for pair in file.pairs)
        if needed > self.limit:
            raise InputError(
                f"the remote data take {needed / 2**30:.3g} GiB, more than data.cache_limit_gib {self.limit / 2**30:.3g}: raise "
                "it, or copy the files to a file system that the nodes share"
            )

    def prefetch(self, files: list[Tokens]) -> threading.Thread:
        """Bring the files here, first to last, while training goes on; a reader that comes earlier fetches for itself."""

        def run() -> None:
            try:
                for file in files:
                    file.fetch()
            except InputError as error:  # whoever needs the file will raise it again
                logger.warning("reading ahead stopped: %s", error)

        thread = threading.Thread(target=run, name="prefetch", daemon=True)
        thread.start()
        return thread


def checksum(path: Path) -> str:
    """As the record of a token file gives it: xxh3_128:HEX."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"xxh3_128:{digest.hexdigest()}"
