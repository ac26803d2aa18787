"""Public traces: their addresses and digests, and a download that checks the bytes."""

import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedRandom, BufferedReader
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import sleep
from typing import TypeVar

try:
    import fcntl
except ImportError:  # without such locks, every download begins anew
    fcntl = None  # type: ignore[assignment]

from optsched.files.outputs import make_folder
from optsched.problem.errors import InputError, named

T = TypeVar("T")

BASE_URL_VARIABLE = "OPTSCHED_DATA_URL"
"""Environment variable with the address of a mirror, a folder with the files of all datasets."""

_PART = ".optsched-part-"
_PARTIAL, _NO_SUCH_RANGE = 206, 416
_RANGE = re.compile(r"bytes (\d{1,15})-\d+/(?:\d+|\*)")
_SIZE = re.compile(r"\d{1,15}", re.ASCII)
_CHUNK = 1 << 14
# Maximum size of a file; no dataset is as large.
_MAX_BYTES = 1 << 31


@dataclass(frozen=True)
class Dataset:
    """A public trace.

    Parameters
    ----------
    name, summary : str
    url : str
        Address at the publisher. Its last part is the name of the file.
    sha256 : str
        Digest of the file's bytes.
    format : str
        Format for `optsched.read_trace`.
    licence, cite : str
        Licence, and the work to cite.
    reported : bool
        Whether the digest is only known from others and was never compared with the file here.
    """

    name: str
    summary: str
    url: str
    sha256: str
    format: str
    licence: str
    cite: str
    reported: bool = False

    @property
    def file_name(self) -> str:
        """Name of the file, without folder."""
        return self.url.rpartition("/")[2]


_TABLE = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
_DATASETS = tuple(Dataset(name, **row) for name, row in _TABLE.items())


def datasets() -> dict[str, Dataset]:
    """Return every public trace that can be downloaded, by name."""
    return {dataset.name: dataset for dataset in _DATASETS}


def cached(name: str) -> Path | None:
    """Return a dataset's file in the user's cache, or None if it has not been downloaded.

    Parameters
    ----------
    name : str
        One of `datasets`.
    """
    file = _cache() / _dataset(name).file_name
    return file if file.is_file() else None


def fetch_dataset(
    name: str,
    to: str | Path | None = None,
    *,
    base_url: str | None = None,
    retries: int = 2,
    timeout_s: float = 30.0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the file of a public trace, after downloading it if it is not there.

    The file appears under its name only when it is complete and its sha256 is correct. The bytes
    of a download that broke off or was killed are kept beside it in a hidden file. The next
    download goes on from there if the server can (HTTP Range). If it cannot, or if the complete
    file has another sha256, the download starts from the beginning.

    Parameters
    ----------
    name : str
        One of `datasets`.
    to : str or path, optional
        Folder for the file; None: the user's cache.
    base_url : str, optional
        Address of a mirror. None: the one in the environment variable OPTSCHED_DATA_URL, or else
        the publisher.
    retries : int
        How often a failed download is tried again, after 1 s, 2 s and so on.
    timeout_s : float
        Maximum silence of the server, in seconds. A server that sends bytes one by one is given up,
        too.
    progress : callable, optional
        Called with the number of bytes received so far, including those of an earlier download,
        and with the size of the file, or 0 if the server does not say.

    Raises
    ------
    InputError
        The name is unknown, the package requests is missing, the download fails or gives other
        bytes, or the folder cannot be written or holds another file of this name.
    """
    dataset = _dataset(name)
    folder = _cache() if to is None else Path(to)
    file = folder / dataset.file_name

    if file.is_file():
        with open(file, "rb") as stream:
            found = _sha256(stream)
        if found == dataset.sha256:
            return file
        if to is not None:
            raise InputError(
                f"{file}: found the sha256 {found}; expected the dataset {name!r} with "
                f"{dataset.sha256}, or no file of this name"
            )

    base = base_url if base_url is not None else os.environ.get(BASE_URL_VARIABLE)
    url = dataset.url if not base else f"{base.rstrip('/')}/{dataset.file_name}"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"base_url: found {base!r}; expected an address that begins with https://")

    make_folder(folder)
    try:
        import requests
    except ImportError:
        raise InputError(
            f"dataset {name!r}: needs the package requests; install it (pip install "
            f"'optsched[data]'), or download {url} yourself"
        ) from None

    try:
        for attempt in range(retries + 1):
            download = _Download(dataset, url, file, timeout_s, progress)
            try:
                download.run()
                break
            except requests.exceptions.RequestException as error:
                if attempt == retries:
                    raise InputError(f"dataset {name!r}: {url}: {download.why(error)}") from None

                sleep(min(attempt + 1, 10))
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None

    return file


@dataclass(frozen=True)
class _Download:
    """One attempt, whose bytes wait in a hidden file beside the file until they are complete."""

    dataset: Dataset
    url: str
    file: Path
    timeout_s: float
    report: Callable[[int, int], None] | None

    @property
    def part(self) -> Path:
        return self.file.with_name(_PART + self.file.name)

    def run(self) -> None:
        """Fetch what is missing, and give the file its name once its digest is right."""
        from requests.exceptions import RequestException

        with self._claimed() as stream:
            went_on = self._transfer(stream, stream.seek(0, os.SEEK_END))
            if went_on and _sha256(stream) != self.dataset.sha256:  # another version, or damaged
                self._transfer(stream)
            if _sha256(stream) == self.dataset.sha256:
                os.replace(stream.name, self.file)
                return

            stream.truncate(0)

        others = "; that sum is as others report it, so the publisher's page decides"
        raise RequestException(
            f"its sha256 is not {self.dataset.sha256}: changed or damaged"
            + (others if self.dataset.reported else "")
        )

    def why(self, error: Exception) -> str:
        """Return why the download failed, and what is kept of it."""
        from requests import exceptions as kinds

        words = str(error)
        if isinstance(error, kinds.HTTPError) and error.response is not None:
            words = f"the server answers {error.response.status_code}"
        elif isinstance(error, kinds.ChunkedEncodingError | kinds.ContentDecodingError):
            words = "the transfer broke off"
        elif isinstance(error, kinds.Timeout) or "timed out" in words:  # also within the body
            words = f"the server is silent for {self.timeout_s:g} s"
        elif isinstance(error, kinds.ConnectionError):
            words = "the server cannot be reached (no network?)"

        size = self.part.stat().st_size if self.part.is_file() else 0
        kept = f"{size:,} bytes are kept, and the next fetch goes on from there"
        return f"{words}; {kept if size else 'nothing was kept'}"

    def _transfer(self, stream: BufferedRandom, have: int = 0) -> bool:
        """Append the rest of the file or write all of it; return whether the rest was appended."""
        import requests

        head = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else None
        ask = partial(requests.get, self.url, timeout=self.timeout_s, stream=True, headers=head)
        response = self._soon(ask)  # closing it would wait for the thread that still receives
        if have and response.status_code == _NO_SUCH_RANGE:
            return self._transfer(stream)

        response.raise_for_status()
        encoded = response.headers.get("Content-Encoding", "identity") != "identity"
        size = _SIZE.fullmatch(response.headers.get("Content-Length", ""))
        part = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        went_on = part is not None and int(part[1]) == have > 0 and not encoded
        if have and response.status_code == _PARTIAL and not went_on:
            return self._transfer(stream)  # not the part that was asked for

        done = have if went_on else 0
        stream.truncate(done)
        total = done + int(size[0]) if size and not encoded else 0
        chunks = response.iter_content(_CHUNK)

        while chunk := self._soon(partial(next, chunks, b"")):
            done += len(chunk)
            if done > _MAX_BYTES:
                stream.truncate(0)
                raise requests.exceptions.RequestException(
                    f"found more than {_MAX_BYTES} bytes; expected a smaller file"
                )

            stream.write(chunk)
            if self.report is not None:
                self.report(done, total)

        stream.flush()
        return went_on

    def _soon(self, receive: Callable[[], T]) -> T:
        """Return what a call returns within twice the server's silence, by another thread.

        The timeout of `requests` begins anew with each byte.
        """
        from requests.exceptions import RequestException

        answer = Queue[T | Exception]()

        def run() -> None:
            try:
                answer.put(receive())
            except Exception as error:
                answer.put(error)

        Thread(target=run, daemon=True).start()
        try:
            found = answer.get(timeout=2 * self.timeout_s)
        except Empty:
            raise RequestException(
                f"the server sends fewer than {_CHUNK} bytes in {2 * self.timeout_s:g} s"
            ) from None

        if isinstance(found, Exception):
            raise found

        return found

    @contextmanager
    def _claimed(self) -> Iterator[BufferedRandom]:
        """Yield the file of waiting bytes, locked by the system until this process ends.

        If another has it, or there are no locks, it is one of this process that is removed at the
        end.
        """
        if fcntl is not None:
            with open(self.part, "a+b") as stream:
                if self._locks(stream):
                    try:
                        yield stream
                    finally:
                        stream.flush()
                        if not os.fstat(stream.fileno()).st_size:
                            self.part.unlink(missing_ok=True)

                    return

        own = Path(f"{self.part}~{os.getpid()}")
        try:
            with open(own, "a+b") as stream:
                yield stream
        finally:
            own.unlink(missing_ok=True)

    def _locks(self, stream: BufferedRandom) -> bool:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have finished it and moved it away since it was opened.
            return os.path.samestat(os.stat(self.part), os.fstat(stream.fileno()))
        except OSError:
            return False


def _dataset(name: str) -> Dataset:
    return named("dataset", name, datasets())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "optsched"


def _sha256(stream: BufferedRandom | BufferedReader) -> str:
    stream.seek(0)
    return hashlib.file_digest(stream, "sha256").hexdigest()
