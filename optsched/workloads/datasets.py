"""Public traces: their addresses and digests, and a download by pooch that checks the bytes."""

import hashlib
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optsched.files.outputs import make_folder
from optsched.problem.errors import InputError, named

BASE_URL_VARIABLE = "OPTSCHED_DATA_URL"
"""Environment variable with the address of a mirror, a folder with the files of all datasets."""

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

    The file appears under its name only when it is complete and its sha256 is correct. Of a
    download that breaks off nothing is kept.

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
        Maximum silence of the server, in seconds.
    progress : callable, optional
        Called with the number of bytes received so far, and with the size of the file, or 0 if the
        server does not say.

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
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest == dataset.sha256:
            return file
        if to is not None:  # in the cache it is ours, and is downloaded again
            raise InputError(
                f"{file}: found the sha256 {digest}; expected the dataset {name!r} with "
                f"{dataset.sha256}, or no file of this name"
            )

    base = base_url if base_url is not None else os.environ.get(BASE_URL_VARIABLE)
    base = base or dataset.url.rpartition("/")[0]
    url = f"{base.rstrip('/')}/{dataset.file_name}"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"base_url: found {base!r}; expected an address that begins with https://")

    make_folder(folder)
    _download(dataset, url, file, retries, timeout_s, progress)
    return file


def _download(
    dataset: Dataset,
    url: str,
    file: Path,
    retries: int,
    timeout_s: float,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Download a dataset's file by pooch, which checks its digest before it gets its name.

    `url`: where it is. The last three arguments are those of `fetch_dataset`.
    """
    try:
        import pooch
    except ImportError:
        raise InputError(
            f"dataset {dataset.name!r}: needs the package pooch; install it (pip install "
            f"'optsched[data]'), or download {url} yourself"
        ) from None

    def download(address: str, output: str, _: object) -> None:
        bar = _Bar(progress)  # a new one for each attempt
        pooch.HTTPDownloader(bar, _CHUNK, timeout=timeout_s)(address, output, None)

    pooch.get_logger().setLevel("ERROR")
    store = pooch.create(
        file.parent,
        url,
        registry={file.name: dataset.sha256},
        urls={file.name: url},
        retry_if_failed=retries,
    )
    try:
        store.fetch(file.name, downloader=download)
        file.chmod(0o644)  # pooch leaves it to its owner alone
    except (OSError, ValueError) as error:
        # An error of requests is an OSError too, and has a response, if only None.
        if isinstance(error, OSError) and not hasattr(error, "response"):
            raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None

        words = _failure_words(error, dataset, timeout_s)
        raise InputError(f"dataset {dataset.name!r}: {url}: {words}; nothing was kept") from None


class _Bar:
    """What pooch tells of a download, as calls of `fetch_dataset`'s ``progress``."""

    def __init__(self, report: Callable[[int, int], None] | None) -> None:
        self.report, self.total, self.done = report, 0, 0

    def update(self, size: int) -> None:
        self.done += size
        if self.done > _MAX_BYTES:
            raise ValueError(f"found more than {_MAX_BYTES} bytes; expected a smaller file")
        if self.report is not None:  # the last chunk is seldom whole
            self.report(min(self.done, self.total or self.done), self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        """Do nothing: pooch asks for it."""


def _failure_words(error: Exception, dataset: Dataset, timeout_s: float) -> str:
    """Return why a download failed: by the kind of error, or else by its words."""
    from requests import exceptions as kinds

    words = str(error)
    if isinstance(error, kinds.HTTPError) and error.response is not None:
        return f"the server answers {error.response.status_code}"
    if isinstance(error, kinds.ChunkedEncodingError | kinds.ContentDecodingError):
        return "the transfer broke off"
    if isinstance(error, kinds.Timeout) or "timed out" in words:  # also within the body
        return f"the server is silent for {timeout_s:g} s"
    if isinstance(error, kinds.ConnectionError):
        return "the server cannot be reached (no network?)"
    if "hash" not in words:  # pooch says so of another digest
        return words

    hint = "; that sum is as others report it, so the publisher's page decides"
    return f"its sha256 is not {dataset.sha256}: changed or damaged{hint * dataset.reported}"


def _dataset(name: str) -> Dataset:
    return named("dataset", name, datasets())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "optsched"
