# SPDX-License-Identifier: Apache-2.0
"""An S3 server of the tests, in a process of its own: objects in memory, and the manners of several products.

It answers as S3, R2, MinIO, Ceph and versitygw document it. `Manners` says how it may fail, late, silently or in words.
Below a namespace it is Hugging Face's gateway, as https://huggingface.co/docs/hub/storage-buckets-s3 describes it.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape, unescape

from farflung.testing.patience import patience

BUCKET = "runs"
NAMESPACE = "someone"  # of the gateway
_CONTROL = "/-/manners"
# What each product says, by its documentation.
ANSWERS = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed; the region 'x' is wrong"),
    "ConditionalRequestConflict": (409, "The conditional request cannot succeed due to a conflicting operation"),
    "ExpiredToken": (400, "The provided token has expired."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
    "InvalidArgument": (400, "If-None-Match is not supported here"),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NotImplemented": (501, "A header you provided implies functionality that is not implemented"),
    "PermanentRedirect": (301, "The bucket must be addressed using another endpoint"),
    "PreconditionFailed": (412, "At least one of the preconditions you specified did not hold"),
    "SlowDown": (503, "Please reduce your request rate."),
}


@dataclass
class Manners:
    """How a server answers.

    Attributes:
        error_s: for how long, from now on, all requests get a 503.
        loses: every how-manieth answer is lost, after the request was carried out.
        late_s: how late answers are.
        create: what a create is told, in place of being tried: an answer's name, or `ignored`: objects that exist are
            overwritten.
        conflicts: the share of creates that get a 409, though nobody has decided.
        bulk: what a DeleteObjects is told.
        denied: operations that get a 403: Put, Get, List, Delete. Without List, so does a read of a missing key.
        storm: the share of requests that get a 503.
        lost: the share of answers that are lost, after the request was carried out.
        listing_late_s: how old listings are.
        page: how many keys a page of a listing has.
        lifetime_s: after which a rule deletes objects; 0: there is none.
        at, for_s, then: from so many seconds from now on, for so many seconds, all are told this.
        edge: what the host is told to answer that the gateway sends those who read to; an answer's name, or none of S3.
        only: what is denied, told or deleted by a rule concerns keys with this pattern in them alone.
        seed: of what happens by chance.
    """

    error_s: float = 0.0
    loses: int = 0
    late_s: float = 0.0
    create: str = ""
    conflicts: float = 0.0
    bulk: str = ""
    denied: tuple = ()
    storm: float = 0.0
    lost: float = 0.0
    listing_late_s: float = 0.0
    page: int = 1000
    lifetime_s: float = 0.0
    at: float = 0.0
    for_s: float = 0.0
    then: str = ""
    edge: str = ""
    only: str = ""
    seed: int = 0
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self.chance = random.Random(self.seed)

    def denies(self, operation, key):
        return operation in self.denied and re.search(self.only, key) is not None

    def told(self, key, is_list):
        """What all requests are told now, whatever they ask."""
        now = time.monotonic() - self.since
        if now < self.error_s or self.chance.random() < self.storm:
            return "SlowDown"
        is_meant = not is_list and re.search(self.only, key) is not None
        return self.then if self.at <= now < self.at + self.for_s and (is_meant or not self.only) else ""


class Objects:
    """The objects of a bucket: content, when it appeared and was written last; those deleted of late, with when."""

    def __init__(self):
        self.lock, self.there, self.gone, self.uploads = threading.Lock(), {}, [], {}

    def put(self, key, content):
        now = time.monotonic()
        self.there[key] = content, self.there[key][1] if key in self.there else now, now

    def delete(self, key):
        if key in self.there:
            _, since, _ = self.there.pop(key)
            self.gone = [one for one in self.gone if one[2] > time.monotonic() - 60]
            self.gone.append((key, since, time.monotonic()))

    def names(self, late_s):
        """The keys that there were so many seconds ago."""
        at = time.monotonic() - late_s
        there = {key for key, (_, since, _) in self.there.items() if since <= at}
        return sorted(there | {key for key, since, until in self.gone if since <= at < until})

    def expire(self, lifetime_s, only):
        at = time.monotonic() - lifetime_s
        for key in [one for one, (_, _, written) in self.there.items() if written < at and re.search(only, one)]:
            self.delete(key)


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1
    objects, counts, number, sent = Objects(), Counter(), 0, Counter()
    manners = Manners()
    timeout = 60

    def log_message(self, *args):
        return None

    def handle_expect_100(self):
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def handle_request(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.content = self.rfile.read(length)
        if self.path.startswith(_CONTROL):
            return self.control()
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.is_gateway = path.startswith(f"/{NAMESPACE}/")
        _, bucket, *rest = path.removeprefix(f"/{NAMESPACE}").split("/", 2)
        self.key, self.query = "".join(rest), parse_qs(parts.query, keep_blank_values=True)
        manners, is_list = self.manners, self.command == "GET" and not self.key
        with self.objects.lock:
            Handler.number += 1
            number = Handler.number
            self.counts["LIST" if is_list else self.command] += 1
            told = manners.told(self.key, is_list)
            is_lost = manners.chance.random() < manners.lost
        time.sleep(manners.late_s)
        if told or bucket != BUCKET:
            return self.say(told or "NoSuchBucket")
        with self.objects.lock:
            if manners.lifetime_s:
                self.objects.expire(manners.lifetime_s, manners.only)
            status, headers, content = self.carried_out(is_list)
        if is_lost or (manners.loses and number % manners.loses == 0):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(2)
            return None
        return self.answer(status, content, headers)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def carried_out(self, is_list):
        key, query, objects, manners = self.key, self.query, self.objects, self.manners
        if self.is_gateway and (why := self.unknown_to_the_gateway()):
            return self.worded(why)
        operation = {"PUT": "Put", "POST": "Put", "DELETE": "Delete"}.get(self.command, "List" if is_list else "Get")
        if "delete" in query:
            if manners.bulk:
                return self.worded(manners.bulk)
            keys = [
                unescape(one, {"&quot;": '"', "&apos;": "'"})
                for one in re.findall(r"<Key>(.*?)</Key>", self.content.decode())
            ]
            rows = ""
            for one in keys:
                if manners.denies("Delete", one):
                    why = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
                    rows += f"<Error><Key>{escape(one)}</Key>{why}</Error>"
                else:
                    objects.delete(one)
                    rows += f"<Deleted><Key>{escape(one)}</Key></Deleted>"
            return 200, {}, f"<DeleteResult>{rows}</DeleteResult>".encode()
        if manners.denies(operation, query.get("prefix", [""])[0] if is_list else key):
            return self.worded("AccessDenied")
        if is_list:
            return 200, {}, self.page(query)
        if self.command == "PUT":
            return self.put()
        if self.command == "POST":
            return self.finish_upload()
        if self.command == "DELETE":
            objects.delete(key)
            return 204, {}, b""
        if key not in objects.there:
            return self.worded("AccessDenied" if manners.denies("List", key) else "NoSuchKey")
        content = objects.there[key][0]
        if self.is_gateway:
            digest = hashlib.sha256(content).hexdigest()
            Edge.contents[digest] = content
            return 302, {"Location": f"http://{self.headers['Host'].partition(':')[0]}:{Edge.port}/{digest}"}, b""
        return self.range(content)

    def unknown_to_the_gateway(self):
        """What a request is told that S3 carries out, and the gateway does not."""
        key, query = self.key, self.query
        if re.search(r"//|\.\./|\\|\0|^\./|^/|/$|\.\.$", key) or query.get("delimiter", ["/"]) != ["/"]:
            return "InvalidArgument"
        is_chunked = "aws-chunked" in (self.headers.get("Content-Encoding") or "")
        is_old = self.command == "GET" and not key and query.get("list-type") != ["2"]
        return "NotImplemented" if is_chunked or is_old else ""

    def put(self):
        key, query, objects, manners = self.key, self.query, self.objects, self.manners
        if "partNumber" in query:
            objects.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = self.content
            return 200, {"ETag": '"x"'}, b""
        if "If-None-Match" in self.headers and manners.create != "ignored":
            if manners.create or manners.chance.random() < manners.conflicts:
                return self.worded(manners.create or "ConditionalRequestConflict")
            if key in objects.there:
                return self.worded("PreconditionFailed")
        objects.put(key, self.content)
        return 200, {"ETag": f'"{hashlib.md5(self.content).hexdigest()}"'}, b""

    def finish_upload(self):
        if "uploads" in self.query:
            name = f"upload{len(self.objects.uploads)}"
            self.objects.uploads[name] = {}
            xml = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, xml.encode()
        name = self.query["uploadId"][0]
        if parts := self.objects.uploads[name]:  # else it is asked again, as the answer was lost
            self.objects.put(self.key, b"".join(parts[number] for number in sorted(parts)))
            self.objects.uploads[name] = {}
        return 200, {}, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"

    def range(self, content):
        size, found = len(content), re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        headers = {"ETag": '"x"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        if not found:
            return 200, headers, content
        begin, end = int(found[1]), min(size, int(found[2] or size) + 1)
        if begin >= size:
            return 416, {}, b"<Error><Code>InvalidRange</Code><Message>not satisfiable</Message></Error>"
        return 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}, content[begin:end]

    def page(self, query):
        prefix = query.get("prefix", [""])[0]
        after = (query.get("continuation-token") or query.get("start-after") or [""])[0]
        names = self.objects.names(self.manners.listing_late_s)
        names = [one for one in names if one.startswith(prefix) and one > after]
        shown, is_cut = names[: self.manners.page], len(names) > self.manners.page
        row = "<Contents><Key>{}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
        rows = "".join(row.format(escape(one)) for one in shown)
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if is_cut else ""
        cut = f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}"
        return f"<ListBucketResult><Name>{BUCKET}</Name>{cut}{rows}</ListBucketResult>".encode()

    def worded(self, code):
        status, message = ANSWERS[code]
        xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
        return status, {}, xml.encode()

    def say(self, code):
        status, headers, content = self.worded(code)
        self.answer(status, content, headers)

    def answer(self, status, content=b"", headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        Handler.sent["bytes"] += len(content)
        self.wfile.write(b"" if self.command == "HEAD" else content)

    def control(self):
        with self.objects.lock:
            if self.content:
                rows = json.loads(self.content)
                for pattern in rows.pop("vanish", []):
                    self.objects.expire(0.0, pattern)
                Handler.manners = Manners(**rows)
            self.answer(200, json.dumps([self.counts, self.sent["bytes"]]).encode())


class Edge(BaseHTTPRequestHandler):
    """The host that has the contents of objects: it knows no keys, and says less than S3 if it fails."""

    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1
    contents, port, timeout = {}, 0, 60
    answer, range, worded = Handler.answer, Handler.range, Handler.worded

    def log_message(self, *args):
        return None

    def do_GET(self):
        how = Handler.manners.edge
        if how in ANSWERS or "Authorization" in self.headers:
            status, headers, content = self.worded(how or "AccessDenied")
        else:
            status, headers, content = self.range(self.contents[self.path.strip("/")])
        if how and how not in ANSWERS:
            status, headers, content = int(how), {}, b"<html>"
        self.answer(status, content, headers)


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def handle_error(self, request, client_address):
        return None


def serve(host):
    server, edge = (Server((host, 0), one) for one in (Handler, Edge))
    Edge.port = edge.server_port
    threading.Thread(target=edge.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    server.serve_forever()


def variables_for(url):
    known = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return {"AWS_ENDPOINT_URL": url, **known}


class S3Server:
    """The server, as tests see it; it has one bucket.

    Attributes:
        variables: see `variables_for`.
    """

    def __init__(self, url):
        self._url, self._num = url, 0
        self.variables = variables_for(url)

    def address(self):
        self._num += 1
        return f"s3://{BUCKET}/run{self._num}"

    def hub_address(self):
        """One behind the gateway."""
        return self.address().replace("s3://", f"hf://{NAMESPACE}/")

    def set(self, **manners):
        """Set how requests are answered from now on, in place of what was set before; `vanish`: patterns of keys."""
        assert manners.keys() <= {"vanish", *(one.name for one in fields(Manners))}, manners
        self._ask(json.dumps(manners or {"seed": 0}).encode())

    def counts(self):
        return json.loads(self._ask())[0]

    def bytes_sent(self):
        return json.loads(self._ask())[1]

    def _ask(self, content=None):
        with urlopen(Request(self._url + _CONTROL, content, method="GET" if content is None else "PUT")) as answer:
            return answer.read()


def given_variables():
    """Return those of this process, for one that a fork server starts."""
    return {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "FARFLUNG_KEY"))}


@contextmanager
def s3_server(host="127.0.0.1", command=()):
    """Start a server, and end it.

    Args:
        host: where it listens; with 0.0.0.0 on all addresses of its machine.
        command: of that machine, if it is another one; then the block is given the port.
    """
    is_elsewhere, command = bool(command), [*command, sys.executable, "-m", "tests.s3_server", host]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], **streams)
    try:
        timer = threading.Timer(patience(60.0), process.kill)
        timer.start()
        port = process.stdout.readline().strip()
        timer.cancel()
        assert port, "the server has not started"
        yield S3Server(f"http://{host}:{port}") if not is_elsewhere else port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    serve(sys.argv[1])
