"""Public traces: their addresses and digests, and a download that checks the bytes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import IO, Any

try:
    import fcntl
except ImportError:  # without such locks, every download begins anew
    fcntl = None  # type: ignore[assignment]

from optsched.files.outputs import make_folder
from optsched.problem.errors import InputError

BASE_URL_VARIABLE = "OPTSCHED_DATA_URL"
"""Environment variable with the address of a mirror, a folder with the files of all datasets."""

_STALE_S = 3600.0
_STAGE, _PART = ".optsched-fetch-", ".optsched-part-"
_PARTIAL, _NO_SUCH_RANGE = 206, 416
_RANGE = re.compile(r"bytes (\d{1,15})-\d+/(?:\d+|\*)")
_SIZE = re.compile(r"\d{1,15}", re.ASCII)
_CHUNK = 1 << 14
_MAX_BYTES = 1 << 31
"""Maximum size of a file; no dataset is as large."""


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


_GITHUB = "https://raw.githubusercontent.com"
_AZURE = f"{_GITHUB}/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_"
_MOONCAKE = f"{_GITHUB}/kvcache-ai/Mooncake/main/FAST25-release/traces/"
_VIDUR = f"{_GITHUB}/microsoft/vidur/main/data/processed_traces/"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0/BurstGPT_without_fails_1.csv"
_ORIGINS = {  # licence and citation, by format
    "azure": ("CC-BY-4.0", "Patel et al., Splitwise, ISCA 2024"),
    "burstgpt": ("CC-BY-4.0", "Wang et al., BurstGPT, 2024"),
    "mooncake": ("Apache-2.0", "Qin et al., Mooncake, FAST 2025"),
    "vidur": ("MIT", "Agrawal et al., Vidur, MLSys 2024"),
}
_TABLE = (  # name, summary, address, digest; the name begins with the format
    ("azure-2023-conv", "Azure LLM inference 2023, conversation: 19,366 requests in an hour",
     _AZURE + "conv.csv", "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8"),
    ("azure-2023-code", "Azure LLM inference 2023, code",
     _AZURE + "code.csv", "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6"),
    ("burstgpt-1", "BurstGPT 2.0, first two months without failures",
     _BURSTGPT, "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4"),
    ("mooncake-conversation", "Mooncake (Kimi), conversation",
     _MOONCAKE + "conversation_trace.jsonl",
     "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"),
    ("mooncake-synthetic", "Mooncake (Kimi), synthetic",
     _MOONCAKE + "synthetic_trace.jsonl",
     "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131"),
    ("vidur-splitwise-conv", "Azure 2023, conversation, as Vidur processed it",
     _VIDUR + "splitwise_conv.csv",
     "439e4138b7e384f316de614c071f7162be05b8af0cef866f82faacd1b0472249"),
    ("vidur-splitwise-code", "Azure 2023, code, as Vidur processed it",
     _VIDUR + "splitwise_code.csv",
     "f266b907d109d471c61283ab69771c17ad79a18b33ff6e96aa546346f52767a6"),
)  # fmt: skip
_REPORTED = ("burstgpt-1",)
_DATASETS = tuple(
    Dataset(name, summary, url, sha256, form, *_ORIGINS[form], reported=name in _REPORTED)
    for name, summary, url, sha256 in _TABLE
    for form in [name.partition("-")[0]]
)


def datasets() -> dict[str, Dataset]:
    """Return every public trace that can be downloaded.

    Returns
    -------
    dict of str to Dataset
        By name.
    """
    return {dataset.name: dataset for dataset in _DATASETS}


def cached(name: str) -> Path | None:
    """Return the file of a dataset in the user's cache.

    Parameters
    ----------
    name : str
        One of `datasets`.

    Returns
    -------
    Path or None
        None if the file has not been downloaded.

    Raises
    ------
    InputError
        The name is unknown.
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

    Returns
    -------
    Path

    Raises
    ------
    InputError
        The name is unknown, the package pooch is missing, the download fails or gives other
        bytes, or the folder cannot be written or holds another file of this name.
    """
    dataset = _dataset(name)
    folder = _cache() if to is None else Path(to)
    file = folder / dataset.file_name

    if file.is_file():
        found = _sha256(file)
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
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(prefix=_STAGE, dir=folder) as stage:
            part = _Part(
                folder / f"{_PART}{dataset.file_name}", dataset.sha256, timeout_s, progress
            )
            _download(dataset, url, Path(stage), part, retries)
            os.replace(Path(stage) / dataset.file_name, file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None

    return file


def _download(dataset: Dataset, url: str, folder: Path, part: _Part, retries: int) -> None:
    """Put the file into a folder, or raise an `InputError`."""
    try:
        import pooch
    except ImportError:
        raise InputError(
            f"dataset {dataset.name!r}: needs the package pooch; install it (pip install "
            f"'optsched[data]'), or download {url} yourself"
        ) from None

    from requests import exceptions

    source = pooch.create(
        path=folder,
        base_url="",
        registry={dataset.file_name: f"sha256:{dataset.sha256}"},
        urls={dataset.file_name: url},
        retry_if_failed=retries,
    )
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # otherwise it reports every attempt on standard error

    try:
        source.fetch(dataset.file_name, downloader=part)
    except exceptions.HTTPError as error:
        status = "no answer" if error.response is None else error.response.status_code
        raise _failed(dataset, url, part, f"the server answers {status}") from None
    except exceptions.Timeout:
        raise _failed(
            dataset, url, part, f"the server is silent for {part.timeout_s:g} s"
        ) from None
    except (exceptions.ChunkedEncodingError, exceptions.ContentDecodingError):
        raise _failed(dataset, url, part, "the transfer broke off") from None
    except exceptions.ConnectionError as error:  # also raised for a silence within the body
        why = "the server cannot be reached (no network?)"
        if "timed out" in str(error):
            why = f"the server is silent for {part.timeout_s:g} s"

        raise _failed(dataset, url, part, why) from None
    except exceptions.RequestException as error:
        raise _failed(dataset, url, part, str(error)) from None
    except ValueError:  # pooch raises it when the digest differs
        reported = (
            "; that sum is as others report it, so the publisher's page decides"
            if dataset.reported
            else ""
        )
        raise _failed(
            dataset, url, part, f"its sha256 is not {dataset.sha256}: changed or damaged{reported}"
        ) from None
    finally:
        logger.setLevel(level)


def _failed(dataset: Dataset, url: str, part: _Part, why: str) -> InputError:
    size = part.size
    kept = f"{size:,} bytes are kept, and the next fetch goes on from there"
    return InputError(
        f"dataset {dataset.name!r}: {url}: {why}; {kept if size else 'nothing was kept'}"
    )


class _Part:
    """The downloader for pooch, which keeps the bytes received so far and fetches the rest.

    The bytes of a download that ended early wait in a file of their own. The process that holds
    the file's lock goes on with it. The system releases the lock even if that process is killed.
    If another process holds the lock, or the system has no such locks, the download begins anew
    and leaves nothing behind.

    Parameters
    ----------
    path : Path
        File in which the bytes wait, in the folder of the finished file.
    sha256 : str
        Digest of the complete file.
    timeout_s : float
        Maximum silence of the server, in seconds.
    report : callable or None
        See ``progress`` of `fetch_dataset`.
    """

    def __init__(
        self, path: Path, sha256: str, timeout_s: float, report: Callable[[int, int], None] | None
    ) -> None:
        self.path, self.sha256, self.timeout_s = path, sha256, timeout_s
        self._report = report or (lambda done, total: None)

    @property
    def size(self) -> int:
        """Number of bytes that wait for the next download."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def __call__(self, url: str, output_file: str, _pooch: object) -> None:
        """Download the file to the path that pooch names, where pooch checks the digest."""
        with self._claimed() as stream:
            if stream is None:
                with open(output_file, "wb") as own:
                    self._transfer(url, own)

                return

            went_on = self._transfer(url, stream, stream.seek(0, os.SEEK_END))
            stream.flush()
            if went_on and _sha256(self.path) != self.sha256:  # another version, or damaged
                self._transfer(url, stream)
                stream.flush()

            os.replace(self.path, output_file)

    def _transfer(self, url: str, stream: IO[bytes], have: int = 0) -> bool:
        """Append the rest of the file or write all of it; return whether the rest was appended."""
        from requests.exceptions import RequestException

        wanted = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else None
        with closing(_received(url, wanted, self.timeout_s)) as parts:
            response: Any = next(parts)
            if have and response.status_code == _NO_SUCH_RANGE:
                return self._transfer(url, stream)

            response.raise_for_status()
            size = _SIZE.fullmatch(response.headers.get("Content-Length", ""))
            encoded = response.headers.get("Content-Encoding", "identity") != "identity"
            part = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            went_on = part is not None and int(part[1]) == have > 0 and not encoded
            if have and response.status_code == _PARTIAL and not went_on:
                return self._transfer(url, stream)  # not the part that was asked for

            done = have if went_on else 0
            stream.seek(done)
            stream.truncate()
            total = 0 if encoded or not size else done + int(size[0])

            for chunk in parts:
                done += len(chunk)
                if done > _MAX_BYTES:
                    stream.truncate(0)
                    raise RequestException(
                        f"found more than {_MAX_BYTES} bytes; expected a smaller file"
                    )

                stream.write(chunk)
                self._report(done, total)

        return went_on

    @contextmanager
    def _claimed(self) -> Iterator[IO[bytes] | None]:
        """Yield the file of waiting bytes, locked against others; None if it cannot be locked."""
        if fcntl is None:
            yield None
            return

        with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have finished it and moved it away since it was opened.
                mine = os.path.samestat(os.stat(self.path), os.fstat(stream.fileno()))
            except OSError:
                mine = False

            try:
                yield stream if mine else None
            finally:
                if mine:
                    stream.flush()
                    if not os.fstat(stream.fileno()).st_size:
                        self.path.unlink(missing_ok=True)


def _received(
    url: str, head: dict[str, str] | None, timeout_s: float
) -> Generator[Any, None, None]:
    """Yield the answer of a server, and then what it sends.

    The timeout of `requests` begins anew with each byte. Here another thread receives, and this
    one waits for whole parts, which have to come within twice the time.
    """
    import requests

    ready: Queue[Any] = Queue(maxsize=8)
    ended = Event()

    def receive() -> None:
        try:
            with requests.get(url, timeout=timeout_s, stream=True, headers=head) as response:
                ready.put(response)
                for chunk in response.iter_content(_CHUNK):
                    ready.put(chunk)
                    if ended.is_set():
                        return

            ready.put(None)
        except Exception as error:
            ready.put(error)

    Thread(target=receive, daemon=True).start()
    try:
        while (part := ready.get(timeout=2 * timeout_s)) is not None:
            if isinstance(part, Exception):
                raise part

            yield part
    except Empty:
        raise requests.exceptions.RequestException(
            f"the server sends fewer than {_CHUNK} bytes in {2 * timeout_s:g} s"
        ) from None
    finally:
        ended.set()
        with suppress(Empty):
            while True:  # who waits for room goes on, and sees that nobody listens
                ready.get_nowait()


def _dataset(name: str) -> Dataset:
    found = datasets()
    if name not in found:
        raise InputError(f"dataset {name!r} is unknown; known are {', '.join(found)}")

    return found[name]


def _cache() -> Path:
    try:
        import pooch
    except ImportError:
        home = os.environ.get("XDG_CACHE_HOME")
        return (Path(home) if home else Path.home() / ".cache") / "optsched"

    return Path(pooch.os_cache("optsched"))


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of killed downloads that have not changed for an hour."""
    for stage in folder.glob(_STAGE + "*"):
        with suppress(OSError):
            last = max(path.stat().st_mtime for path in (stage, *stage.iterdir()))
            if time.time() - last > _STALE_S:
                shutil.rmtree(stage, ignore_errors=True)
