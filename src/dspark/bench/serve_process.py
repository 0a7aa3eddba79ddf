"""A server of this package in a process of its own: started on a free port of the loopback, and always stopped."""

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from dspark.config.errors import DSparkError

_PROGRAM = "from dspark.cli import main; main()"
_ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost|\[::1\]):(\d+)")
_KEPT_LINES = 200
_POLL_S = 0.1
# A proxy of the environment has no business on the loopback.
_DIRECT = build_opener(ProxyHandler({}))


class ServerProcess:
    """`dspark serve` with some arguments, as a context.

    Args:
        arguments: of the command, besides host and port.
        start_s: how long it may take until it is healthy.
        stop_s: how long it may take to drain before it is killed.
        program: what to run instead of this package's command line (tests).

    Attributes:
        url: its address, once the context is entered.
        num_tracebacks: that it has printed so far.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        start_s: float = 180.0,
        stop_s: float = 45.0,
        program: Sequence[str] = (sys.executable, "-c", _PROGRAM),
    ) -> None:
        self._command = [*program, "serve", "--host", "127.0.0.1", "--port", "0", *arguments]
        self._start_s, self._stop_s = start_s, stop_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._has_address = threading.Event()
        self.url = ""
        self.num_tracebacks = 0

    @property
    def pid(self) -> int:
        """Of the server's process."""
        assert self._process is not None  # the context is entered
        return self._process.pid

    @property
    def output(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self._lines)

    def is_alive(self) -> bool:
        """Is the process still there?"""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> "ServerProcess":
        """Start it and wait until it is healthy.

        Raises:
            DSparkError: it ended or did not become healthy in time; holds what it printed last.
        """
        # A session of its own: Ctrl-C ends the benchmark, which then stops its server in order.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read_output, daemon=True).start()
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int | None:
        """Ask it to drain, and kill it if it does not end; returns its exit code."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def _read_output(self) -> None:
        """Keep its pipe empty, and find its address in what it prints."""
        process = self._process
        assert process is not None and process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip("\n"))
            self.num_tracebacks += line.startswith("Traceback (most recent call last)")
            if not self.url and (match := _ADDRESS.search(line)):
                self.url = f"http://127.0.0.1:{match[1]}"
                self._has_address.set()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            if not self.is_alive():
                raise DSparkError(f"the server ended before it was healthy. It printed:\n{self._last_words()}")
            if self._has_address.wait(_POLL_S) and _is_healthy(self.url):
                return
            time.sleep(_POLL_S)
        raise DSparkError(f"the server was not healthy within {self._start_s:g} s. It printed:\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(list(self._lines)[-12:]) or "(nothing)"


def _is_healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
