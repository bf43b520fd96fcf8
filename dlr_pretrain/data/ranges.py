"""A range of bytes of a file on the hub, fetched in the background and with retries.

A try continues where the last one broke off. Time-outs, stalls, truncated answers, 408, 425, 429 and 5xx are retried.
So is any error status of a store to which the hub redirects, because each try makes the hub sign a new address.
"""

from __future__ import annotations

import logging
import re
import threading
from http.client import responses

from dlr_pretrain.data import hub
from dlr_pretrain.util.errors import UserError, first_line

REMARK_SECONDS = 30.0  # of waiting, after which a warning is logged
AGAIN = "The same command goes on from the last checkpoint"


class _Refused(Exception):
    """An answer that trying again would not change."""


class _Busy(Exception):
    """A failure that another try may cure, after at least ``seconds``."""

    def __init__(self, reason: str, seconds: float):
        super().__init__(reason)
        self.seconds = seconds


class Range:
    """The bytes first..end of a file of ``size`` bytes.

    A thread fetches them until all have arrived, or they are refused or abandoned. Only ``result`` has a time limit:
    an outage during which nobody needs these bytes is not a failure.
    """

    def __init__(self, name: str, url: str, size: int, first: int, end: int):
        self._name, self._url, self._size, self._first, self._end = name, url, size, first, end
        self._got = bytearray()
        self._tries, self._reason = 0, "no answer yet"
        self._error: Exception | None = None  # of the last try
        self._refused = False
        self._done, self._abandoned = threading.Event(), threading.Event()
        # Each range has a daemon thread, so that neither a stalled read nor a long wait delays the end of the process.
        threading.Thread(target=self._fetch, name=f"range {first} of {name}", daemon=True).start()

    def result(self) -> bytes:
        """The bytes. Raises UserError if they are refused or take longer than ``hub.PATIENCE_SECONDS``."""
        remark = min(REMARK_SECONDS, hub.PATIENCE_SECONDS)
        if not self._done.wait(remark):
            where = f"byte {self._first + len(self._got):,} of {self._size:,}"
            logging.getLogger(__name__).warning("%s: waiting for %s (%s)", self._name, where, self._reason)
            self._done.wait(hub.PATIENCE_SECONDS - remark)
        self.abandon()
        missing = self._end - self._first - len(self._got)
        if self._refused or missing:
            where = f"byte {self._first + len(self._got):,} of {self._size:,}"
            how = "is refused" if self._refused else f"did not come within {hub.PATIENCE_SECONDS:g} s"
            tries = "1 try" if self._tries == 1 else f"{self._tries} tries"
            tried = f"{tries} of {self._url}; {self._reason}"
            raise UserError(f"{self._name}: {where} {how} ({tried}). {AGAIN}") from self._error
        content, self._got = bytes(self._got), bytearray()
        return content

    def abandon(self) -> None:
        """Stop fetching."""
        self._abandoned.set()

    def _fetch(self) -> None:
        in_vain = 0
        while not self._abandoned.is_set():
            before, asked = len(self._got), 0.0
            try:
                self._try()
            except _Refused as refused:
                self._reason, self._error, self._refused = str(refused), refused, True
            except _Busy as busy:
                self._reason, self._error, asked = str(busy), busy, busy.seconds
            except Exception as error:  # the types differ between versions of the client
                self._reason, self._error = f"{type(error).__name__}: {first_line(error)}", error
            self._tries += 1
            if self._refused or len(self._got) == self._end - self._first:
                return self._done.set()
            in_vain = 0 if len(self._got) > before else in_vain + 1
            self._abandoned.wait(max(asked, hub.pause(in_vain)))

    def _try(self) -> None:
        """Fetch the missing bytes, or some of them."""
        at, wanted = self._first + len(self._got), self._end - self._first
        with hub.open_range(self._url, at, self._end) as answer:
            self._check(answer, at)
            for piece in answer.pieces:  # read to its end, or the connection could not be used again
                self._got += piece[: wanted - len(self._got)]
                if self._abandoned.is_set() or (answer.status == 200 and len(self._got) == wanted):
                    return
        if len(self._got) < wanted:
            came = f"{self._first + len(self._got) - at:,} of {self._end - at:,} bytes"
            raise _Busy(f"{_status(answer)} broke off after {came}", 0.0)

    def _check(self, answer: hub.Answer, at: int) -> None:
        """Raise _Refused or _Busy unless the answer brings the bytes from ``at`` on."""
        if answer.status not in (200, 206):
            status = f"{_status(answer)} {answer.headers.get('x-error-message', '')}".strip()
            if 400 <= answer.status < 500 and not hub.is_passing(answer.status) and not answer.redirected:
                access = ". Set HF_TOKEN to the token of an account with access" if answer.status in (401, 403) else ""
                raise _Refused(status + access)
            raise _Busy(status, hub.seconds_to_wait(answer.headers))
        first, size = _extent(answer)
        if size not in (None, self._size):
            rule = f"the file has {size:,} bytes there, and {self._size:,} in the list of files"
            raise _Refused(f"{_status(answer)}: {rule}")
        if first != at:
            rule = f"asked for bytes from {at:,} on, the server sends those from {first:,} on"
            raise _Refused(f"{_status(answer)}: {rule}")


def _status(answer: hub.Answer) -> str:
    return f"{answer.status} {responses.get(answer.status, '')}".strip()


def _extent(answer: hub.Answer) -> tuple[int, int | None]:
    """The position of the first byte in an answer, and the size of the whole file, or None if it is not given."""
    if answer.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("content-range", ""))
        if not found:
            brings = answer.headers.get("content-range")
            raise _Busy(f"{_status(answer)} that does not say which bytes it brings (Content-Range: {brings})", 0.0)
        return int(found[1]), None if found[2] == "*" else int(found[2])
    length = answer.headers.get("content-length")
    return 0, None if length is None else int(length)
