# SPDX-License-Identifier: Apache-2.0
"""An S3 server on this machine, in a process of its own, that may answer late, not at all, or with errors."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.request import Request, urlopen

from farflung.testing.patience import patience

BUCKET = "runs"
_CONTROL = "/-/faults"


class Faulty:
    """A WSGI application in front of another one.

    Attributes:
        faults: what may be set: `error_s`, for how long all requests get a 503; `loses`, every how-manieth answer is
            lost, after the request was carried out; `late_s`, how late answers are; `ignores`, whether objects that
            are to be created are overwritten where they exist.
    """

    def __init__(self, inner):
        self._inner, self._lock = inner, threading.Lock()
        self.faults, self.counts = {}, {}
        self._error_until, self._num = 0.0, 0

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == _CONTROL:
            return [self._control(environ, start_response)]
        with self._lock:
            self._num += 1
            number, method = self._num, environ["REQUEST_METHOD"]
            method = "LIST" if "list-type" in environ.get("QUERY_STRING", "") else method
            self.counts[method] = self.counts.get(method, 0) + 1
        if time.monotonic() < self._error_until:
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        time.sleep(self.faults.get("late_s", 0))
        if self.faults.get("ignores"):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        # moto looks whether an object exists, and then writes it: two requests at once would both create it.
        with self._lock if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            answer = list(self._inner(environ, start_response))
        if self.faults.get("loses") and number % self.faults["loses"] == 0:
            environ["werkzeug.socket"].shutdown(2)
        return answer

    def _control(self, environ, start_response):
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if content:
            self.faults = json.loads(content)
            self._error_until = time.monotonic() + self.faults.get("error_s", 0)
        start_response("200 OK", [])
        return json.dumps(self.counts).encode()


def serve(host):
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server(host, 0, application, threaded=True)
    threading.Thread(target=server.serve_forever).start()
    urlopen(Request(f"http://127.0.0.1:{server.port}/{BUCKET}", b"", method="PUT")).close()
    print(server.port, flush=True)


def variables_for(url):
    """Return those by which clients find a server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


class S3Server:
    """The server, as tests see it; it has one bucket.

    Attributes:
        variables: see `variables_for`.
    """

    def __init__(self, url):
        self._url, self._num = url, 0
        self.variables = variables_for(url)

    def address(self):
        """Return the address of another run."""
        self._num += 1
        return f"s3://{BUCKET}/run{self._num}"

    def set(self, **faults):
        """Set how requests fail from now on, in place of what was set before."""
        self._ask(_CONTROL, json.dumps(faults).encode())

    def counts(self):
        """Return how many requests there were, by method."""
        return json.loads(self._ask(_CONTROL))

    def _ask(self, path, content=None):
        with urlopen(Request(self._url + path, content, method="GET" if content is None else "PUT")) as answer:
            return answer.read()


def given_variables():
    """Return those of this process, for one that a fork server starts."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@contextmanager
def s3_server(host="127.0.0.1", command=()):
    """Start a server, and end it.

    Args:
        host: where it listens; with 0.0.0.0 on all addresses of its machine.
        command: of that machine, if it is another one; then the block is given the port.
    """
    process = subprocess.Popen(
        [*command, sys.executable, "-m", "tests.s3_server", host],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        cwd=Path(__file__).parents[1],
        text=True,
    )
    try:
        timer = threading.Timer(patience(60.0), process.kill)
        timer.start()
        port = process.stdout.readline().strip()
        timer.cancel()
        assert port, "the server has not started"
        yield S3Server(f"http://{host}:{port}") if not command else port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    serve(sys.argv[1])
