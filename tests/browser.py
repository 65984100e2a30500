"""A headless Chromium, driven over the DevTools protocol through a pair of pipes: it needs no package."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab: what was asked of the network, what its console said, and scripts that run in it."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number, self._session, self._rest = 0, "", b""
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def open_tab(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        size = {"width": 1500, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 2**20)
            if not part:
                raise ConnectionError("Chromium ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(about["args"])[:500])
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> None:
        """Until an expression counts as true; the limit is for machines that do much else."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({script})"):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not within {seconds} s: {script}\npage: {self.run('document.body.innerText')}"
                )
            time.sleep(0.1)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def click_tab(self, name: str) -> None:
        """The tab of that name; where tabs do not fit, Gradio draws some twice."""
        find = f"[...document.querySelectorAll('button[role=tab]')].find(b => b.innerText.trim() == {name!r})"
        self.run(f"{find}.click()")

    def fill(self, selector: str, value: object) -> None:
        """Set an input as if it had been typed."""
        self.run(
            f"""(() => {{
                const box = document.querySelector({json.dumps(selector)});
                const kind = box.tagName == 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;
                Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(box, {json.dumps(str(value))});
                box.dispatchEvent(new Event('input', {{bubbles: true}}));
                box.dispatchEvent(new Event('change', {{bubbles: true}}));
            }})()"""
        )

    def choose(self, selector: str, name: str) -> None:
        """An entry of one of Gradio's lists, which is there while the list has the focus."""
        self.run(f"document.querySelector({json.dumps(selector + ' input')}).focus()")
        entry = f"[...document.querySelectorAll('ul[role=listbox] li')].find(li => li.innerText.includes({name!r}))"
        self.wait_for(entry)
        self.run(f"{entry}.dispatchEvent(new MouseEvent('mousedown', {{bubbles: true}}))")
        self.run("document.activeElement.blur()")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser of its own, without a network beyond this machine, ended at the end."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip
    # Chromium reads commands from descriptor 3 and writes to 4; the shell puts the pipes there.
    redirect = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, CHROMIUM, *options],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    browser = Browser(to_browser[1], from_browser[0])
    try:
        browser.open_tab()
        yield browser
        browser._session = ""
        browser.send("Browser.close")
    finally:
        os.close(to_browser[1])
        os.close(from_browser[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
