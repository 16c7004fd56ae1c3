"""Ranges of bytes of files on the hub: fetched with patience, and kept.

They are kept where the hub client keeps what libraries cache (``HF_ASSETS_CACHE``), in a folder for each repository
and commit: ``file/start-bytes`` for each range, ``.part`` while it is incomplete. A range that stands within one that
is kept is not fetched again, and an incomplete one is gone on with.
"""

from __future__ import annotations

import contextlib
import email.utils
import importlib
import logging
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mla_convert import disk
from mla_convert.errors import CheckpointError

_T = TypeVar("_T")
_LOGGER = logging.getLogger(__name__)
_TRIES = 6
#: Seconds before the second attempt; twice as many before each further one, up to the second number.
WAIT, LONGEST_WAIT = 1.0, 8.0
#: Seconds that a server may ask to wait; the hub counts requests in windows of 300.
MOST_PATIENCE = 600.0
_BUSY = (408, 429, 500, 502, 503, 504)


def folder(repo_id: str, commit: str = "") -> pathlib.Path:
    """Where ranges of a repository are kept, made if it is not there."""
    from huggingface_hub import cached_assets_path, constants

    name = repo_id.replace("/", "--")
    where = cached_assets_path("mla_convert", name, commit or "refs", assets_dir=constants.HF_ASSETS_CACHE)
    return pathlib.Path(where)


def span(repo_id: str, commit: str, name: str, start: int, nbytes: int, size: int) -> bytes:
    """``nbytes`` bytes of a file of ``size``, from ``start`` on; from what is kept, or fetched and then kept."""
    kept = folder(repo_id, commit) / name
    kept.mkdir(parents=True, exist_ok=True)
    found, pieces = start, []
    while found < start + nbytes:
        held = _holding(kept, found)
        if held is None:
            break
        file, first, last = held
        upto = min(last, start + nbytes)
        with file.open("rb") as stream:
            stream.seek(found - first)
            pieces.append(stream.read(upto - found))
        found = upto
    if found < start + nbytes:
        file = kept / f"{found}-{start + nbytes - found}"
        _fetch(repo_id, commit, name, file, found, start + nbytes - found, size)
        pieces.append(file.read_bytes())
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def missing(repo_id: str, commit: str, name: str, start: int, nbytes: int) -> int:
    """How many of ``nbytes`` bytes of a file, from ``start`` on, are not kept yet."""
    kept = folder(repo_id, commit) / name
    place, end, count = start, start + nbytes, 0
    for first, last in sorted(found[1:] for found in _ranges(kept)) if kept.is_dir() else ():
        if place < last and first < end:
            count += max(0, first - place)
            place = last
    return count + max(0, end - place)


def _ranges(kept: pathlib.Path) -> Iterator[tuple[pathlib.Path, int, int]]:
    """Kept ranges: the file of each, its first byte, and the first one after it."""
    for file in kept.iterdir():
        first, _, count = file.name.partition("-")
        if first.isdigit() and count.isdigit() and _whole(file, int(count)):
            yield file, int(first), int(first) + int(count)


def _whole(file: pathlib.Path, nbytes: int) -> bool:
    """Whether a range is there with all of its bytes; one of another length is fetched again."""
    return file.is_file() and file.stat().st_size == nbytes


def _holding(kept: pathlib.Path, place: int) -> tuple[pathlib.Path, int, int] | None:
    """A kept range that has the byte at ``place``."""
    return next((found for found in _ranges(kept) if found[1] <= place < found[2]), None)


def _fetch(repo_id: str, commit: str, name: str, file: pathlib.Path, start: int, nbytes: int, size: int) -> None:
    part = file.with_name(file.name + ".part")
    with _client().WeakFileLock(file.with_name(file.name + ".lock")):
        if _whole(file, nbytes):  # another process was faster
            return
        attempt = done = 0
        while True:
            try:
                _go_on(repo_id, commit, name, part, start, nbytes, size)
                break
            except connection_errors() as error:
                # Only attempts that bring nothing are counted.
                attempt, done = (0, here) if (here := part.stat().st_size) > done else (attempt + 1, done)
                if attempt == _TRIES or not passes(error):
                    raise
                _wait(attempt, error)
        disk.sync(part)  # the name says from then on that all of it is there
        os.replace(part, file)


def _go_on(repo_id: str, commit: str, name: str, part: pathlib.Path, start: int, nbytes: int, size: int) -> None:
    """One attempt at what is missing of a range; ConnectionError where it ends early."""
    from huggingface_hub import constants, hf_hub_url

    client = _client()
    with part.open("ab") as stream:
        done = stream.tell()
        if done > nbytes:
            stream.truncate(0)
            done = 0
        if done == nbytes:
            return
        headers = client.build_hf_headers() | {
            "Range": f"bytes={start + done}-{start + nbytes - 1}",
            "Accept-Encoding": "identity",
        }
        url = hf_hub_url(repo_id, name, revision=commit)
        request = client.http_stream_backoff(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, max_retries=0
        )
        with request as response:
            client.hf_raise_for_status(response)
            _check_answer(response, f"{repo_id}/{name}", start + done, size)
            for chunk in response.iter_bytes():  # as it comes, so that nothing is lost where it breaks off
                stream.write(chunk[: nbytes - done])
                done += len(chunk)
    if done < nbytes:
        raise ConnectionError(f"{repo_id}/{name} came {nbytes - done} bytes short")


def _client() -> Any:
    """The hub client's own tools for requests, which other libraries use too."""
    return importlib.import_module("huggingface_hub.utils")


def _check_answer(response: Any, file: str, start: int, size: int) -> None:
    said = response.headers.get("Content-Range", "")
    if response.status_code != 206 or not said.startswith(f"bytes {start}-"):
        raise CheckpointError(
            f"the server answered a request for a part of {file} with something else (status {response.status_code}, "
            f"Content-Range {said!r}), so that it would have to be read whole; download it: hf download"
        )
    total = said.rpartition("/")[2]
    if total.isdigit() and int(total) != size:
        raise CheckpointError(f"{file} has {total} bytes on the server, and {size} in the repository's list; try again")


def connection_errors() -> tuple[type[BaseException], ...]:
    """What the hub client raises where the server or the way to it is at fault."""
    from huggingface_hub import errors

    # The base class of the client's HTTP library, whichever that is in this version.
    return errors.HfHubHTTPError, errors.HfHubHTTPError.__mro__[1], ConnectionError, TimeoutError


def passes(error: BaseException) -> bool:
    """Whether trying again may help: everything but a definite answer of the server, and the offline mode."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    answer = status(error)
    return answer is None or answer in _BUSY


def status(error: BaseException) -> int | None:
    """The HTTP status that the server answered with, where it did."""
    return getattr(getattr(error, "response", None), "status_code", None)


def patiently(ask: Callable[[], _T]) -> _T:
    """What ``ask`` gives, tried again while the server is busy or drops the connection."""
    for attempt in range(_TRIES - 1):
        try:
            return ask()
        except connection_errors() as error:
            if not passes(error):
                raise
            _wait(attempt, error)
    return ask()


def _wait(attempt: int, error: BaseException) -> None:
    """Wait before another try: longer each time, and as long as the server asked to."""
    asked = asked_wait(error)
    if asked > MOST_PATIENCE:
        raise error
    if asked > LONGEST_WAIT:
        _LOGGER.warning("the hub asks to wait %.0f s (%s)", asked, reason(error))
    time.sleep(max(min(WAIT * 2**attempt, LONGEST_WAIT), asked))


def asked_wait(error: BaseException) -> float:
    """Seconds that a busy server asks to wait; 0 where it does not say.

    In ``Retry-After``, seconds or a date (RFC 9110, 10.2.3), or as the hub does in ``RateLimit``, whose ``t`` are the
    seconds until its count begins anew.
    """
    headers = getattr(getattr(error, "response", None), "headers", {})
    asked = str(headers.get("Retry-After", "")).strip()
    if asked.isdigit():
        return float(asked)
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    window = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", str(headers.get("RateLimit", "")))
    return float(window[1]) if window else 0.0


def reason(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
