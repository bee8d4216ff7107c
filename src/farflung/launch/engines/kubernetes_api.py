# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster as its engine sees it: requests to the API, the logs of pods, and what their states say."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from farflung.launch.codes import ENGINE, FAILED, HUNG, USAGE, EngineFailure

_TIMES_S = (10.0, 60.0)  # to connect, and to be answered
_LAST_WORDS_S = 10.0
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
        self._client, self._namespace = client.ApiClient(settings), namespace

    def request(self, method: str, path: str, body: Any = None, *, times_s: Any = _TIMES_S, **query: Any) -> Any:
        """Send a request about `path`, such as `jobs/run7`, and return the answer: JSON, or a stream of `.../log`.

        Raises:
            EngineFailure: the cluster can't be reached, or refuses it.
        """
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
            if answer.status < 300 and path.endswith("/log"):
                return answer.response
            text = answer.read().decode(errors="replace")
        except HTTPError as error:
            where = self._client.configuration.host
            why = getattr(error, "reason", None) or error
            raise EngineFailure(f"The cluster at {where} can't be reached: {why}.") from None
        if answer.status < 300:
            return json.loads(text)
        with suppress(ValueError):
            text = json.loads(text)["message"]
        what = f"{method} {path} in the namespace {self._namespace}"
        raise ApiError(f"The cluster refuses {what} ({answer.status}): {text}", answer.status)

    def find(self, path: str) -> Any:
        """Return the object at `path`, None where there is none."""
        try:
            return self.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise


class ApiError(EngineFailure):
    """The cluster has answered, with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PodLog:
    """Prints what a pod does, each line once and behind its name, in a thread of its own."""

    def __init__(self, api: KubernetesApi, pod: Mapping[str, Any]) -> None:
        self._api, self._name, self._label = api, pod["metadata"]["name"], name_of(pod)
        self._last = ""  # the time of the last line
        self._is_whole = False
        self._thread: threading.Thread | None = None

    def follow(self, pod: Mapping[str, Any]) -> None:
        """Read on where nobody does: the API ends streams of running pods too."""
        if self._is_whole or (self._thread and self._thread.is_alive()):
            return
        self._is_whole = pod["status"]["phase"] in ("Succeeded", "Failed")
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the last lines are there."""
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_S)

    def _show(self) -> None:
        from kubernetes.watch.watch import iter_resp_lines
        from urllib3.exceptions import HTTPError

        with suppress(EngineFailure, HTTPError):  # tried again, as long as there is a pod
            path = f"pods/{self._name}/log"
            for row in iter_resp_lines(self._api.request("GET", path, times_s=None, follow="true", timestamps="true")):
                stamp, _, line = row.partition(" ")
                if (moment := stamp.rstrip("Z")) > self._last:
                    self._last = moment
                    click.echo(f"[{self._label}] {line}")


def name_of(pod: Mapping[str, Any]) -> str:
    """Return a pod's short name, `pod 3`: that of its index, whatever pods there were before it."""
    notes = {**pod["metadata"].get("labels", {}), **pod["metadata"].get("annotations", {})}
    return f"pod {notes.get('batch.kubernetes.io/job-completion-index', pod['metadata']['name'])}"


def problems(pod: Mapping[str, Any]) -> Sequence[str]:
    """Return why a pod does not run, in sentences without their subject; nothing where all is well."""
    status = pod["status"]
    found = [
        f"waits for a node: {one.get('message', '')}"
        for one in status.get("conditions", [])
        if (one["type"], one["status"]) == ("PodScheduled", "False")
    ]
    for one in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        state = one.get("state", {})
        waits, ended = state.get("waiting", {}), state.get("terminated", {})
        if waits.get("reason", _NORMAL[0]) not in _NORMAL:
            found.append(f"waits: {waits['reason']}: {waits.get('message', '')}")
        if ended.get("exitCode"):
            found.append(f"has ended with exit code {ended['exitCode']} ({ended.get('reason', 'Error')})")
    return found


def first_exit_code(pods: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code of a run that failed: that of the container that failed first, if it is one of ours."""
    ends = [
        one.get("state", {}).get("terminated", {}) for p in pods for one in p["status"].get("containerStatuses", [])
    ]
    failed = sorted((one for one in ends if one.get("exitCode")), key=lambda one: str(one.get("finishedAt", "")))
    code = failed[0]["exitCode"] if failed else FAILED
    return code if code in (USAGE, FAILED, HUNG, ENGINE) else FAILED
