# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API on a port of this machine: objects are kept by kmock, and what its controllers do is played here.

A Job's pods appear and go as `completions` says. They are records that a test fills (`says`, `ends`) or, with
`starts`, processes of this machine that run the container's command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import aiohttp.web
import kmock
import yaml

from tests.launch.engines.kubelet import expanded

try:
    import kubernetes_validate
except ImportError:  # which `make test-all` has
    kubernetes_validate = None

VERSION = "1.33"
CUT, LOST = -1, -2  # in place of a status: the connection breaks in the middle of the answer; LOST: to what was done
NAMESPACE, CLAIM = "training", "work"
JOBS, PODS = kmock.resource("batch", "v1", "jobs"), kmock.resource("", "v1", "pods")
CLAIMS, INDEX = kmock.resource("", "v1", "persistentvolumeclaims"), "batch.kubernetes.io/job-completion-index"


class Pod:
    """A pod of a Job, and what it has printed."""

    def __init__(self, index: int) -> None:
        self.index, self.name = index, f"job-{index}-{uuid.uuid4().hex[:5]}"
        self.lines: list[str] = []
        self.phase, self.code, self.troubles = "Pending", None, []
        self.process: subprocess.Popen[str] | None = None

    def kill(self) -> None:
        """Kill all processes, as if the container were killed."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def as_object(self) -> dict:
        meta = {"name": self.name, "namespace": NAMESPACE, "annotations": {INDEX: str(self.index)}}
        state = {} if self.code is None else {"terminated": {"exitCode": self.code, "finishedAt": _now()}}
        status = {"phase": self.phase, "conditions": self.troubles, "containerStatuses": [{"state": state}]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "000Z")


class Cluster(kmock.KubernetesEmulator):
    """The API. Requests that a real server refuses are refused: unknown fields, other namespaces, fixed sizes."""

    def prepare(self, starts: Path | None) -> None:
        """Begin with a claim; `starts`: the folder that stands for it, where pods are to be processes."""
        self.pods: dict[int, Pod] = {}
        self.failed: dict[int, int] = {}
        self.containers: list[threading.Thread] = []
        self.folder, self.cut_after = starts, None
        self.secrets: dict[str, dict[str, str]] = {}  # variables by the name of a secret
        self.asked: list[tuple[str, dict]] = []  # of what changes something
        self.answers: list[int] = []  # statuses of the next answers, instead of what was asked for; CUT, or 0: none
        self.retry_after: str | None = None  # of those
        self.loop = asyncio.get_running_loop()
        self.resources[PODS] = self.resources[JOBS] = {}
        self.objects[CLAIMS, NAMESPACE, CLAIM] = {"metadata": {"name": CLAIM}}

    @property
    def job(self) -> dict:
        return next(obj.raw for (kind, _, _), obj in self.objects.items() if kind == JOBS)

    async def _handle(self, request):
        if request.headers.get("Authorization") != "Bearer a-token":
            raise kmock.KubernetesError(401, "Unauthorized", "Unauthorized", {})
        if (status := self.answers.pop(0) if self.answers else 0) in (CUT, LOST):
            if status == LOST:
                self.answers.insert(0, 0)
                await self._handle(request)
            answer = aiohttp.web.StreamResponse(headers={"Content-Length": "100"})
            await answer.prepare(request._raw_request)
            await answer.write(b'{"items": [')
            request._raw_request.transport.close()
            return answer
        if status:
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return aiohttp.web.json_response({"message": "one bad answer"}, status=status, headers=headers)
        if request.namespace != NAMESPACE:
            raise kmock.KubernetesError(404, "NotFound", f'namespaces "{request.namespace}" not found', {})
        if request.subresource == "log":
            return await self._log(request)
        if request.resource == PODS:
            [name] = [name for kind, _, name in self.objects if kind == JOBS]
            assert request.params["labelSelector"] == f"batch.kubernetes.io/job-name={name}"
            return aiohttp.web.json_response({"items": [pod.as_object() for pod in self.pods.values()]})
        if request.action == kmock.action.CREATE:
            if kubernetes_validate is not None:
                try:
                    kubernetes_validate.validate(request.data, VERSION, strict=True)
                except kubernetes_validate.ValidationError as error:
                    raise kmock.KubernetesError(400, "BadRequest", error.message, {}) from None
            key = (request.resource, NAMESPACE, request.data["metadata"]["name"])
            if key in self.objects and not self.objects[key].deleted:
                raise kmock.KubernetesError(409, "AlreadyExists", f'"{key[2]}" already exists', {})
            if request.params.get("dryRun") == "All":
                assert request.params["fieldValidation"] == "Strict"
                return aiohttp.web.json_response(request.data)
            request.data["metadata"]["uid"] = str(uuid.uuid4())
        if request.action == kmock.action.UPDATE:
            assert request.headers["Content-Type"] == "application/merge-patch+json"
            spec = request.data["spec"]
            assert spec["completions"] == spec["parallelism"], "completions of an Indexed Job follow parallelism"
        if request.data is not None:
            self.asked.append((request.action.value, request.data))
        answer = await super()._handle(request)
        if request.resource == JOBS and request.action == kmock.action.DELETE:
            assert request.params["propagationPolicy"] == "Background"  # the API's own default leaves pods behind
            self.reconcile(0)
        elif request.resource == JOBS and request.action in (kmock.action.CREATE, kmock.action.UPDATE):
            self.reconcile(self.job["spec"]["completions"])
        return answer

    def reconcile(self, count: int) -> None:
        """Have pods 0 ... count - 1, as the Job controller does; those that are too many get SIGTERM."""
        for index in [index for index in self.pods if index >= count]:
            pod = self.pods.pop(index)
            pod.phase = "Failed"
            if pod.process is not None:
                pod.process.send_signal(signal.SIGTERM)
        for index in set(range(count)) - set(self.pods):
            self.pods[index] = Pod(index)
            if self.folder is not None:
                self.containers.append(threading.Thread(target=self._be, args=(self.pods[index],), daemon=True))
                self.containers[-1].start()

    def _be(self, pod: Pod) -> None:
        """Run the pod's container as a process, to its end."""
        [container] = self.job["spec"]["template"]["spec"]["containers"]
        words = [expanded(word, {}).replace("/workspace", str(self.folder)) for word in container["command"]]
        env = os.environ | {one["name"]: str(pod.index) for one in container.get("env", [])}
        for source in container.get("envFrom", []):
            env |= self.secrets[source["secretRef"]["name"]]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=self.folder, env=env, text=True, start_new_session=True, **streams)
        pod.process, pod.phase = process, "Running"
        with process.stdout as lines:
            for line in lines:
                self.says(pod, line.rstrip("\n"))
        self.ends(pod, process.wait())

    def says(self, pod: Pod, line: str) -> None:
        pod.phase = "Running" if pod.phase == "Pending" else pod.phase
        pod.lines.append(f"{_now()} {line}\n")

    def ends(self, pod: Pod, code: int) -> None:
        """Let the pod end with an exit code, and the Job with it, or a new pod begin, as its policy says."""
        pod.code, pod.phase = code, "Failed" if code else "Succeeded"
        self.loop.call_soon_threadsafe(self._judge, pod)

    def _judge(self, pod: Pod) -> None:
        if self.pods.get(pod.index) is not pod:
            return  # one that was too many
        spec = self.job["spec"]
        _, again, codes = spec["podFailurePolicy"]["rules"]
        if pod.code in again["onExitCodes"]["values"]:
            self._replace(pod)
        elif pod.code:
            times = self.failed[pod.index] = self.failed.get(pod.index, 0) + 1
            is_final = pod.code in codes["onExitCodes"]["values"] or times > spec["backoffLimitPerIndex"]
            if not is_final:
                self._replace(pod)
            elif spec.get("maxFailedIndexes") == 0:
                self._end("Failed", f"Pod {pod.name} failed with exit code {pod.code}")
        if all(one.code is not None for one in self.pods.values()):
            failed = [str(one.index) for one in self.pods.values() if one.code]
            self._end("Failed" if failed else "Complete", f"Failed indexes: {','.join(failed)}")

    def _replace(self, pod: Pod) -> None:
        del self.pods[pod.index]
        self.reconcile(self.job["spec"]["completions"])

    def _end(self, kind: str, message: str) -> None:
        [key] = [key for key in self.objects if key[0] == JOBS]
        if "status" not in self.objects[key].raw:
            conditions = [{"type": kind, "status": "True", "message": message}]
            self.objects[key].patch({"status": {"conditions": conditions}})

    async def _log(self, request) -> aiohttp.web.StreamResponse:
        pod = next(one for one in self.pods.values() if one.name == request.name)
        answer = aiohttp.web.StreamResponse()
        await answer.prepare(request._raw_request)
        sent = 0
        while pod.phase == "Running" or sent < len(pod.lines):
            if self.cut_after == sent:
                self.cut_after = None
                break
            if sent < len(pod.lines):
                await answer.write(pod.lines[sent].encode())
                sent += 1
            else:
                await asyncio.sleep(0.02)
        await answer.write_eof()
        return answer


@contextmanager
def running(home: Path, starts: Path | None = None) -> Iterator[Cluster]:
    """Serve a cluster, and describe it in `home`/kubeconfig."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin():
        cluster = Cluster()
        cluster.prepare(starts)
        await cluster.__aenter__()
        server = kmock.Server(cluster)
        await server.__aenter__()
        return cluster, server

    cluster, server = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    rows = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
    rows["clusters"] = [{"name": "here", "cluster": {"server": str(server.url).rstrip("/")}}]
    rows["users"] = [{"name": "me", "user": {"token": "a-token"}}]
    rows["contexts"] = [{"name": "here", "context": {"cluster": "here", "user": "me"}}]
    (home / "kubeconfig").write_text(yaml.safe_dump(rows))
    try:
        yield cluster
    finally:
        for pod in cluster.pods.values():
            pod.kill()
        for container in cluster.containers:
            container.join()

        async def end():
            await server.__aexit__(None, None, None)
            await cluster.__aexit__(None, None, None)

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
