# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster as its engine sees it: requests to the API, the logs of pods, and what their states say."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from farflung.comm.patience import waiting
from farflung.launch.codes import ENGINE, FAILED, HUNG, USAGE, EngineFailure
from farflung.launch.events import pass_on

_TIMES_S = (10.0, 60.0)  # to connect, and to be answered
_LAST_WORDS_S = 10.0
_PATIENCE_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 30.0, 0.5, 10.0
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # of answers: the same request may get another one later
_REFUSALS = 3  # of a log, to be believed
_MARK = "farflung/request"  # an annotation
_NORMAL = ("ContainerCreating", "PodInitializing")  # of what a container waits for


class KubernetesApi:
    """The objects of one namespace, as JSON.

    Args:
        context: which cluster, as kubeconfig calls it; None: its current one or, in a pod, that pod's.
    """

    def __init__(self, context: str | None, namespace: str) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise EngineFailure("The engine kubernetes needs a package: pip install 'farflung[k8s]'.") from None
        settings = client.Configuration()
        try:
            config.load_kube_config(context=context, client_configuration=settings)
        except config.ConfigException as error:
            if context is not None:
                raise EngineFailure(f"context is {context!r}, which kubeconfig does not describe: {error}") from None
            try:
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                raise EngineFailure(
                    f"No cluster is configured: {str(error).rstrip('.')}. Set KUBECONFIG, or try `kubectl get nodes`."
                ) from None
        settings.retries = False  # urllib3's own know neither our bound nor an overloaded server
        self._client, self._namespace = client.ApiClient(settings), namespace
        self._has_answered = False  # a cluster that never has is rather a slip than a pause

    def request(
        self, method: str, path: str, body: Any = None, *, patience_s: float = _PATIENCE_S, **query: Any
    ) -> Any:
        """Send a request about `path`, such as `jobs/run7`, and return the JSON that answers it.

        It is sent again for `patience_s` seconds while the cluster is overloaded, restarts or does not answer.

        Raises:
            EngineFailure: the cluster can't be reached; ApiError: it has answered, and refuses.
        """
        from urllib3.exceptions import HTTPError

        give_up_at, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
        while True:
            try:
                answer = json.loads(self._answer(method, path, body, query, _TIMES_S).read())
                self._has_answered = True
                return answer
            except (EngineFailure, ValueError, HTTPError) as error:  # HTTPError: the connection breaks in the answer
                failure = (
                    error if isinstance(error, EngineFailure) else EngineFailure(f"No JSON answers {path}: {error}")
                )
                wait_s = max(wait_s, getattr(error, "wait_s", 0.0))
                is_final = isinstance(error, ApiError) and error.status not in _PASSING
                if is_final or not self._has_answered or time.monotonic() + wait_s > give_up_at:
                    raise failure from None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def create(self, path: str, body: dict[str, Any]) -> Any:
        """Make an object and return it. A request whose answer was lost may have made it: it is known by a mark."""
        mark = os.urandom(8).hex()
        self._has_answered = True  # when the run was checked, over another connection
        body["metadata"]["annotations"] = {_MARK: mark}
        try:
            return self.request("POST", path, body)
        except ApiError as error:
            if error.status != 409:
                raise
            found = self.request("GET", f"{path}/{body['metadata']['name']}")
            if found["metadata"].get("annotations", {}).get(_MARK) != mark:
                raise
            return found

    def lines(self, path: str, is_whole: bool) -> Iterator[bytes]:
        """Yield the lines of a log while it grows; a last one without its end only if the log `is_whole`."""
        rest, query = b"", {"follow": "true", "timestamps": "true"}
        for part in self._answer("GET", path, None, query, None).response.stream(amt=None, decode_content=False):
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
        if rest and is_whole:
            yield rest

    def _answer(self, method: str, path: str, body: Any, query: Mapping[str, Any], times_s: Any) -> Any:
        """Send a request once; return the answer, or raise EngineFailure."""
        from urllib3.exceptions import HTTPError

        root = "/apis/batch/v1" if path.startswith("jobs") else "/api/v1"
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        words = self._client.param_serialize(
            *(method, f"{root}/namespaces/{self._namespace}/{path}"),
            query_params=[(name, str(value)) for name, value in query.items()],
            header_params={"Content-Type": kind, "Accept": "application/json, */*"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(*words, _request_timeout=times_s)
            if answer.status < 300:
                return answer
            text = answer.read().decode(errors="replace")
        except HTTPError as error:
            where = self._client.configuration.host
            why = getattr(error, "reason", None) or error
            raise EngineFailure(f"The cluster at {where} can't be reached: {why}.") from None
        self._has_answered = True
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        what = f"{method} {path} in the namespace {self._namespace}"
        after = str(answer.headers.get("Retry-After", ""))
        wait_s = float(after) if after.isdecimal() else 0.0
        raise ApiError(f"The cluster refuses {what} ({answer.status}): {text}", answer.status, wait_s)


class ApiError(EngineFailure):
    """The cluster has answered, with an error."""

    def __init__(self, message: str, status: int, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.wait_s = status, wait_s  # `wait_s`: for how long it asks to be left alone


class PodLog:
    """Prints what a pod does, each line once and behind its name, in a thread of its own."""

    def __init__(self, api: KubernetesApi, pod: Mapping[str, Any]) -> None:
        self._api, self._name, self._label = api, pod["metadata"]["name"], name_of(pod)
        self._shown: list[int] = []  # hashes of the lines, in order: their times may be equal, or go back
        self._has_ended = False  # the pod, so that its log grows no more
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def follow(self, pod: Mapping[str, Any]) -> None:
        """Begin to read, or note that the pod has ended."""
        self._has_ended = pod["status"]["phase"] in ("Succeeded", "Failed")
        if self._thread.ident is None:
            self._thread.start()

    def join(self) -> None:
        """Wait until the last lines are there, as long as some come."""
        self._has_ended, before = True, -1
        while self._thread.is_alive() and len(self._shown) > before:
            before = len(self._shown)
            self._thread.join(_LAST_WORDS_S)

    def _follow(self) -> None:
        """Read on until all of an ended pod's log was read: the API ends streams of running pods too."""
        from urllib3.exceptions import HTTPError

        is_whole, num_refused, looks = False, 0, waiting(_FIRST_WAIT_S)
        while not is_whole:
            next(looks)
            has_ended = self._has_ended
            try:
                self._show(self._api.lines(f"pods/{self._name}/log", has_ended))
                is_whole = has_ended
            except ApiError as error:  # a pod that was deleted has no log
                num_refused += error.status not in _PASSING
                is_whole = has_ended and num_refused > _REFUSALS
            except (EngineFailure, HTTPError):  # tried again
                pass

    def _show(self, lines: Iterable[bytes]) -> None:
        """Print the lines after those that were shown. A log begins with its first line, until kubelet rotates it."""
        known: int | None = None  # how many of the lines to come were shown
        for line in lines:
            key = hash(line)
            if known is None:
                known = len(self._shown) - self._shown.index(key) if key in self._shown else 0
            if known > 0:
                known -= 1
                continue
            self._shown.append(key)
            pass_on(b"[%s] %s\n" % (self._label.encode(), line.partition(b" ")[2]), sys.stdout)


def name_of(pod: Mapping[str, Any]) -> str:
    """Return a pod's short name, `pod 3`: that of its index, whatever pods there were before it."""
    notes = {**pod["metadata"].get("labels", {}), **pod["metadata"].get("annotations", {})}
    return f"pod {notes.get('batch.kubernetes.io/job-completion-index', pod['metadata']['name'])}"


def problems(pod: Mapping[str, Any]) -> Sequence[str]:
    """Return why a pod does not run, in sentences without their subject; nothing if all is well."""
    status = pod["status"]
    found = [
        f"waits for a node: {condition.get('message', '')}"
        for condition in status.get("conditions", [])
        if (condition["type"], condition["status"]) == ("PodScheduled", "False")
    ]
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        state = container.get("state", {})
        waits, ended = state.get("waiting", {}), state.get("terminated", {})
        if waits.get("reason", _NORMAL[0]) not in _NORMAL:
            found.append(f"waits: {waits['reason']}: {waits.get('message', '')}")
        if ended.get("exitCode"):
            found.append(f"has ended with exit code {ended['exitCode']} ({ended.get('reason', 'Error')})")
    return found


def first_exit_code(pods: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code of a run that failed: that of the container that failed first, if it is one of ours."""
    ends = [
        container.get("state", {}).get("terminated", {})
        for p in pods
        for container in p["status"].get("containerStatuses", [])
    ]
    failed = sorted((end for end in ends if end.get("exitCode")), key=lambda end: str(end.get("finishedAt", "")))
    code = failed[0]["exitCode"] if failed else FAILED
    return code if code in (USAGE, FAILED, HUNG, ENGINE) else FAILED
