"""A headless Chromium, driven over its DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ANSWER_S = 60


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on a server of one's own."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Browser:
    """One page. Every request that it or its workers make is in ``requests``, every text of its console in ``said``."""

    def __init__(self, profile: Path, *options: str) -> None:
        assert CHROMIUM is not None
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Chromium reads commands from file 3 and writes to file 4. As root it has no sandbox.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", CHROMIUM, "--headless", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run",
             "--disable-component-update", f"--user-data-dir={profile}", "--remote-debugging-pipe",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", *options, "about:blank"],
            pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self.requests: list[str] = []
        self.said: list[str] = []
        self._unread, self._number = b"", 0
        [page] = [one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Network.enable")
        self.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The page's answer to a command."""
        return self._call(method, self._session, **parameters)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + ANSWER_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"still not: {expression}; console: {self.said}"
            time.sleep(0.1)

    def press(self, key: str) -> None:
        """Press a key as a keyboard does, wherever the focus is."""
        text = {"text": key} if len(key) == 1 else {}
        code = {"ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36, "Tab": 9, " ": 32}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                      **(text if kind == "keyDown" else {}))

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Make the window so large."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def picture(self, file: Path, whole: bool = False) -> None:
        """Write a PNG of what is seen, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, session, parameters)
        deadline = time.monotonic() + ANSWER_S
        while True:
            message = self._message(deadline, method)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._event(message)

    def _send(self, method: str, session: str | None, parameters: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data):]
        return self._number

    def _message(self, deadline: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser does not answer {awaited}"
            data = os.read(self._from, 1 << 20)
            assert data, f"the browser has ended, at {awaited}"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(text))

    def _event(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Target.attachedToTarget" and given["targetInfo"]["type"] != "page":
            for command in ("Network.enable", "Runtime.enable", "Runtime.runIfWaitingForDebugger"):
                self._send(command, given["sessionId"], {})
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(part.get("value", part.get("description"))) for part in given["args"]))
        elif method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.said.append(str(details.get("exception", {}).get("description", details["text"])))
