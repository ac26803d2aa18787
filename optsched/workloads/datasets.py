"""Public traces: where they are, what their bytes must be, and a download that checks them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError

BASE_URL_VARIABLE = "OPTSCHED_DATA_URL"
"""Environment variable: address of a mirror, a folder with the files of all datasets."""

_STALE_S = 3600.0
_STAGE = ".optsched-fetch-"


@dataclass(frozen=True)
class Dataset:
    """A public trace.

    Parameters
    ----------
    name, summary : str
    url : str
        Where its publisher keeps it; the last part is the file's name.
    sha256 : str
        Digest of the file's bytes.
    format : str
        For `optsched.read_trace`.
    licence, cite : str
    reported : bool
        Whether the digest is as others report it, and no one here has compared it with the file.
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
        """Name of the file."""
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
    """Return every public trace by name."""
    return {dataset.name: dataset for dataset in _DATASETS}


def cached(name: str) -> Path | None:
    """Return a dataset's file in the user's cache, None if it is not there."""
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
    """Return the file of a public trace, downloaded unless it is there already.

    The file appears under its name when all of it has come and its sha256 is right, and not
    before: a download that fails or is interrupted leaves nothing, and what a killed one left is
    removed by the next after an hour.

    Parameters
    ----------
    name : str
        One of `datasets`.
    to : path, optional
        Folder for the file; None: the user's cache.
    base_url : str, optional
        A mirror to take the file from; None: what the environment variable OPTSCHED_DATA_URL
        says, else the publisher.
    retries : int
        How often a download that fails is tried again, after 1 s, 2 s and so on.
    timeout_s : float
        Longest silence of the server.
    progress : callable, optional
        Called with the bytes that have come, and their number or 0 where the server does not say.

    Raises
    ------
    InputError
        An unknown name; no package pooch; no network, an answer that is no file, a transfer that
        broke off, other bytes than expected; a folder that cannot be written, or that holds
        another file of this name.
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
                f"{file}: is not the dataset {name!r}: its sha256 is {found}; another folder, or "
                "none of this name, is right"
            )
    base = base_url if base_url is not None else os.environ.get(BASE_URL_VARIABLE)
    url = dataset.url if not base else f"{base.rstrip('/')}/{dataset.file_name}"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"base_url: {base!r}; an address that begins with https:// is right")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(prefix=_STAGE, dir=folder) as stage:
            _download(dataset, url, Path(stage), retries, timeout_s, progress)
            os.replace(Path(stage) / dataset.file_name, file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None
    return file


def _download(
    dataset: Dataset,
    url: str,
    folder: Path,
    retries: int,
    timeout_s: float,
    progress: Callable[[int, int], None] | None,
) -> None:
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
    bar: Any = False if progress is None else _Progress(progress)
    downloader = pooch.HTTPDownloader(timeout=timeout_s, progressbar=bar)
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # it would tell of every attempt on standard error
    try:
        source.fetch(dataset.file_name, downloader=downloader)
    except exceptions.HTTPError as error:
        status = "no answer" if error.response is None else error.response.status_code
        raise _failed(dataset, url, f"the server answers {status}") from None
    except exceptions.Timeout:
        raise _failed(dataset, url, f"the server is silent for {timeout_s:g} s") from None
    except (exceptions.ChunkedEncodingError, exceptions.ContentDecodingError):
        raise _failed(dataset, url, "the transfer broke off") from None
    except exceptions.ConnectionError as error:  # a silence within the body is one too
        why = "the server cannot be reached (no network?)"
        if "timed out" in str(error):
            why = f"the server is silent for {timeout_s:g} s"
        raise _failed(dataset, url, why) from None
    except exceptions.RequestException as error:
        raise _failed(dataset, url, str(error)) from None
    except ValueError:  # pooch's for a digest that differs
        reported = (
            "; that sum is as others report it, so the publisher's page decides"
            if dataset.reported
            else ""
        )
        raise _failed(
            dataset, url, f"its sha256 is not {dataset.sha256}: changed or damaged{reported}"
        ) from None
    finally:
        logger.setLevel(level)


def _failed(dataset: Dataset, url: str, why: str) -> InputError:
    return InputError(f"dataset {dataset.name!r}: {url}: {why}; nothing was kept")


class _Progress:
    """What pooch takes for a progress bar."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.total = 0
        self._report, self._done = report, 0

    def update(self, size: int) -> None:
        self._done = self._done + size
        self._report(min(self._done, self.total) if self.total else self._done, self.total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass


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
    """Remove what killed downloads left, unless something came to it within the hour."""
    for stage in folder.glob(_STAGE + "*"):
        with suppress(OSError):
            last = max(path.stat().st_mtime for path in (stage, *stage.iterdir()))
            if time.time() - last > _STALE_S:
                shutil.rmtree(stage, ignore_errors=True)
