"""A headless Chromium, driven through chromedriver by the W3C WebDriver protocol, which is a few HTTP calls.

Needs two programs (Debian packages chromium and chromium-driver) and no package of Python.
"""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Shift": "\ue008", "Alt": "\ue00a"}
_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
PATIENCE_S = 15.0


def why_no_browser() -> str | None:
    """Why no browser can be driven here, or None."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Browser:
    """One window.

    Args:
        width, height: of the window, in pixels.
        dark: prefer dark colours.
    """

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self._driver = subprocess.Popen(
            [shutil.which("chromedriver"), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._base = f"http://127.0.0.1:{self._find_port()}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*_OPTIONS, f"--window-size={width},{height}"],
        }
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._session = f"/session/{session['sessionId']}"
        self.resize(width, height)
        if dark:
            self._emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def _find_port(self) -> int:
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip().rstrip(".").rsplit(" ", 1)[1])
        raise RuntimeError("chromedriver ended before it listened")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def _call(self, method: str, path: str, body: object = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def _emulate(self, command: str, **params: object) -> None:
        self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def resize(self, width: int, height: int) -> None:
        """A viewport of this size, also below the smallest window that the browser makes."""
        self._emulate(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: object):
        """The value of a function body."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Text of all elements of a selector, joined by line ends."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('\\n')", selector
        )

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def is_shown(self, selector: str) -> bool:
        return self.run("const e = document.querySelector(arguments[0]); return !!e && e.checkVisibility()", selector)

    def wait(self, condition: str, *arguments: object, seconds: float = PATIENCE_S):
        """Wait until a JavaScript expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}", *arguments)):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {condition}\n{self.text('body')[-1500:]}")
            time.sleep(0.03)
        return value

    def wait_text(self, selector: str, text: str, seconds: float = PATIENCE_S) -> None:
        condition = "[...document.querySelectorAll(arguments[0])].some(e => e.textContent.includes(arguments[1]))"
        self.wait(condition, selector, text, seconds=seconds)

    def click(self, selector: str) -> None:
        """A click of the mouse: the element has to be in reach."""
        self._call("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys together, in the element that has the focus."""
        codes = [_KEYS.get(key, key) for key in keys]
        actions = [{"type": "keyDown", "value": code} for code in codes]
        actions += [{"type": "keyUp", "value": code} for code in reversed(codes)]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._call("POST", f"{self._session}/actions", body)

    def _find(self, selector: str) -> str:
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def complaints(self) -> list[str]:
        """What the console has said since the last time: errors, and what the policy of the page forbids."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self) -> bytes:
        """The viewport as PNG."""
        return base64.b64decode(self._call("GET", f"{self._session}/screenshot"))
