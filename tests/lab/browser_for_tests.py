"""A real Chromium without a window, spoken to over a pipe: no driver and no package needed."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page in a fresh profile. Console errors and requests are collected from the start."""

    def __init__(self, profile, width=1280, height=900, dark=False):
        assert CHROMIUM is not None
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()

        def at_three_and_four():  # where Chromium expects its pipe
            spare = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
                 f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            [CHROMIUM, *flags], preexec_fn=at_three_and_four, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._buffer, self.events = itertools.count(1), b"", []
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = None
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Emulation.setEmulatedMedia",
             features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])  # fmt: skip

    _session = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def __call__(self, method, **params):
        """Send a command of the DevTools protocol and wait for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(60)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _read(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            self._buffer += os.read(self._from, 1 << 20)
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def open(self, path):
        """Load a file and wait until it is drawn."""
        self("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read(60))
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, script):
        """The value of an expression in the page."""
        result = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def move(self, x, y):
        """Move the mouse."""
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def errors(self):
        """Whatever the page complained about, violations of its own security policy included."""
        return [
            event
            for event in self.events
            if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
            or (event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"))
        ]

    def requests(self):
        """Addresses asked for, besides the file itself and data inside it."""
        sent = (e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [url for url in sent if not url.startswith(("file:", "data:"))]
