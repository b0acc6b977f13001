"""Drive the server's chat page in a real browser: ask, watch the answer come, stop it, ask again.

    python tests/check_page.py [screenshot.png]

Needs Chromium and chromedriver. Not part of the test run, since most machines have neither.
"""

import base64
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

from test_server import serving

PORT = 9515
SECONDS = 30  # the longest wait for anything
OPTIONS = {"args": ["--headless=new", "--no-sandbox", "--window-size=900,700"]}


class Browser:
    """A page, by the WebDriver protocol."""

    def __init__(self):
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": OPTIONS}}
        self.session = ""
        session = self.call("POST", "/session", {"capabilities": wanted})
        self.session = f"/session/{session['sessionId']}"

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=SECONDS)
        data = None if body is None else json.dumps(body)
        connection.request(method, self.session + path, data)
        value = json.loads(connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            sys.exit(value["message"])
        return value

    def element(self, selector):
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{next(iter(found.values()))}"

    def type(self, selector, text):
        self.call("POST", self.element(selector) + "/value", {"text": text})

    def click(self, selector):
        self.call("POST", self.element(selector) + "/click", {})

    def text(self, selector):
        return self.call("GET", self.element(selector) + "/text")

    def wait_for(self, what, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"in vain: {what}")
            time.sleep(0.05)
        print(what)


def main() -> None:
    driver = subprocess.Popen(["chromedriver", f"--port={PORT}"], stdout=subprocess.DEVNULL)
    time.sleep(1)
    try:
        with serving("demo", "--slots", "0.25") as client:
            browser = Browser()
            browser.call("POST", "/url", {"url": client.url + "/"})
            browser.type("#prompt", "Tell me of the sea.")
            browser.click("#send")
            browser.wait_for("an answer comes", lambda: len(browser.text("#log")) > 100)
            browser.wait_for("its speed is told", lambda: "expert hits" in browser.text("#stats"))
            if sys.argv[1:]:
                Path(sys.argv[1]).write_bytes(base64.b64decode(browser.call("GET", "/screenshot")))
            assert browser.text("#send") == "Stop"
            browser.click("#send")
            browser.wait_for("it stops", lambda: browser.text("#send") == "Send")
            browser.wait_for("the server has stopped", lambda: client.counter("cancelled") >= 1)
            before = len(browser.text("#log"))
            browser.type("#prompt", "And of the sky?")
            browser.click("#send")
            browser.wait_for("it goes on", lambda: len(browser.text("#log")) > before + 60)
            browser.call("DELETE", "")
    finally:
        driver.terminate()


if __name__ == "__main__":
    main()
