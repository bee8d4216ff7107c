# SPDX-License-Identifier: Apache-2.0
"""Starts a run on Kubernetes: an Indexed Job whose pods are the replicas or, in a fixed run, the machines."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import yaml

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.comm.patience import waiting
from farflung.config.launch import DEFAULT_PORT
from farflung.launch.codes import BY_SIGNAL, DONE, ENGINE, REQUEUE, USAGE, EngineFailure
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.engines.kubernetes_api import ApiError, KubernetesApi, PodLog, first_exit_code, name_of, problems
from farflung.launch.folder import NONE
from farflung.launch.supervisor import max_restarts
from farflung.observe.folder import RUNS

# Keys of `engine_options`.
_OPTIONS = (
    *("image", "namespace", "context", "claim", "folder", "python", "gpus", "cpu", "memory", "node_selector"),
    *("service_account", "secret", "end_within"),
)
_MOUNT = "/workspace"
_CONTAINER, _JOB, _INDEX = "farflung", "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
_LONGEST_NAME = 41  # of 63, as a digest follows, and pods add their index and a word
_LOOK_S = 1.0
_AWAY_S = 600.0  # for how long the cluster may give no answer while a job is followed
_SURE_S = 5.0  # for how long it must refuse, or know no such job, to be believed
# DNS has no name of pod 0 before pod 0 has an address.
_WAIT_FOR_NAME = """\
import socket, sys, time
for _ in range(300):
    try:
        sys.exit(0 if socket.getaddrinfo(sys.argv[1], None) else 1)
    except OSError:
        time.sleep(2)
sys.exit(sys.argv[1] + " has had no address for ten minutes")
"""


class _Yaml(yaml.SafeDumper):
    """Writes texts of several lines as such, and in quotes what another reader than PyYAML may take for a number."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        is_word = re.fullmatch(r"(--?[A-Za-z]|/|[A-Za-z_$][^\n])[^\n]*", text)
        style = None if is_word else "|" if text == _WAIT_FOR_NAME else '"' if not text.isprintable() else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Yaml.add_representer(str, _Yaml.represent_str)


class Kubernetes:
    """The engine of `--engine kubernetes`, over the API of the cluster and the client that Kubernetes publishes."""

    outlives_launch = True

    def __init__(self, job: Job) -> None:
        job.check_options(_OPTIONS, numbers=("gpus", "end_within"))
        self._job, self._options = job, job.options
        word = re.sub(r"[^a-z0-9]+", "-", job.name.lower())
        digest = hashlib.sha256(os.fsencode(job.folder)).hexdigest()[:8]  # names may differ in what is left out
        name = f"{f'farflung-{word}'[:_LONGEST_NAME].strip('-')}-{digest}"
        self._name = str(job.handle.get("job", name))
        self._namespace = str(job.handle.get("namespace", self._options.get("namespace", "default")))
        if not job.handle:
            self._check_settings()

    def _check_settings(self) -> None:
        meet, options = self._job.settings.meet or "", self._options
        if not options.get("image"):
            raise ConfigError(
                "engine is kubernetes, but no image is named. Add --engine_options image=registry/name:tag, one with "
                "Python, farflung and the script."
            )
        for pair in filter(None, options.get("node_selector", "").split(";")):
            if not re.fullmatch(r"[^=]+=[^=]*", pair):
                raise ConfigError(f"engine_options has node_selector={pair}; use key=value;key=value.")
        if "secret" not in options or self._job.settings.key_file:
            words = "kubectl create secret generic run7 --from-file=FARFLUNG_KEY=run7.key"
            self._job.check_key(f"`{words}`, then --engine_options secret=run7 and no --key_file.", has_files=False)
        placed = ("main_process_ip", "machine_rank")
        self._job.check_left_out(placed, "Kubernetes names and numbers the pods itself.")
        if self._job.is_elastic and (not meet or meet.startswith("tcp://")):
            raise ConfigError(
                f"meet is {meet or None}, but pods come and go, the first one too. Have replicas meet in a bucket, "
                f"--meet s3://bucket/run7, or on a claim: --meet file://{_MOUNT}/run7 --engine_options claim=NAME."
            )
        is_mounted = meet.startswith(f"file://{_MOUNT}/") and "claim" in options
        if meet.startswith("file://") and not is_mounted:
            raise ConfigError(
                f"meet is {meet}, a folder that pods don't share. Mount a claim at {_MOUNT} and meet there: "
                f"--meet file://{_MOUNT}/run7 --engine_options claim=NAME."
            )
        self._job.check_unicode("the API of Kubernetes", self._pod()["containers"][0]["command"])

    @cached_property
    def _api(self) -> KubernetesApi:
        return KubernetesApi(self._options.get("context"), self._namespace)

    def check(self) -> None:
        if claim := self._options.get("claim"):
            self._api.request("GET", f"persistentvolumeclaims/{claim}")
        for body in self._manifests():
            self._api.request("POST", f"{body['kind'].lower()}s", body, dryRun="All", fieldValidation="Strict")

    def described(self) -> str:
        return str(yaml.dump_all(self._manifests(), Dumper=_Yaml, sort_keys=False, width=inf)).rstrip()

    def submit(self) -> Mapping[str, Any]:
        job, *services = self._manifests()
        made = self._api.create("jobs", job)
        owner = {"apiVersion": job["apiVersion"], "kind": "Job", "name": self._name, "uid": made["metadata"]["uid"]}
        try:
            for service in services:
                service["metadata"]["ownerReferences"] = [owner]  # so that it ends with the job
                self._api.create("services", service)
        except EngineFailure:
            self.cancel()
            raise
        return {"job": self._name, "namespace": self._namespace}

    def follow(self) -> int:
        logs: dict[str, PodLog] = {}
        reported: set[str] = set()
        answered_at, looks = time.monotonic(), waiting(_LOOK_S)
        while True:
            next(looks)
            try:
                job = self._api.request("GET", f"jobs/{self._name}", patience_s=_AWAY_S)
                pods = self._api.request("GET", "pods", patience_s=_AWAY_S, labelSelector=f"{_JOB}={self._name}")[
                    "items"
                ]
            except ApiError as error:
                if time.monotonic() < answered_at + _SURE_S:
                    continue
                if error.status != 404:
                    raise
                record(Kind.FAILED, message=f"the job {self._name} was deleted", job=self._name)
                ended, code = True, BY_SIGNAL + 15
            else:
                answered_at = time.monotonic()
                self._show(pods, logs, reported)
                ended, code = self._end_of(job, pods)
            if ended:
                for log in logs.values():
                    log.join()
                return code

    def _show(self, pods: Sequence[Any], logs: dict[str, PodLog], reported: set[str]) -> None:
        """Print what is new about pods, and have their logs printed."""
        for pod in pods:
            for line in set(problems(pod)) - reported:
                reported.add(line)
                record(Kind.STATE, name_of(pod), message=f"{name_of(pod)} {line}", job=self._name)
            if pod["status"].get("phase", "Pending") != "Pending":
                logs.setdefault(pod["metadata"]["name"], PodLog(self._api, pod)).follow(pod)

    def _end_of(self, job: Mapping[str, Any], pods: Sequence[Any]) -> tuple[bool, int]:
        """Return whether the job has ended, and its exit code: 0, or that of the first pod that failed."""
        conditions = job.get("status", {}).get("conditions", [])
        states = {each["type"]: each for each in conditions if each["status"] == "True"}
        if "Complete" in states:
            return True, DONE
        if "Failed" not in states:
            return False, DONE
        message = f"the job {self._name} has failed: {states['Failed'].get('message', '')}"
        record(Kind.FAILED, message=message, job=self._name)
        return True, first_exit_code(pods)

    def scale(self, count: int) -> str:
        before = self._api.request("GET", f"jobs/{self._name}")["spec"]["completions"]
        self._api.request("PATCH", f"jobs/{self._name}", {"spec": {"completions": count, "parallelism": count}})
        return f"the job {self._name} had {before} replicas and is to have {count}"

    def cancel(self) -> str:
        self._api.request("DELETE", f"jobs/{self._name}", propagationPolicy="Background")
        return f"the job {self._name} is deleted; its pods have {self._end_within_s} s to end"

    @property
    def _end_within_s(self) -> int:
        return int(self._options.get("end_within", 120))

    def _manifests(self) -> list[dict[str, Any]]:
        """Return what is submitted, the Job first; with several machines, the Service that gives pods names too."""
        labels = {"app.kubernetes.io/managed-by": "farflung"}
        count, is_elastic = self._job.count, self._job.is_elastic
        codes = {"containerName": _CONTAINER, "operator": "In", "values": [USAGE, ENGINE]}
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {**codes, "values": [REQUEUE]}},  # saved, and to be started again
            # Started again, it would end so again.
            {"action": "FailIndex" if is_elastic else "FailJob", "onExitCodes": codes},
        ]
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": max_restarts(self._job.settings) if is_elastic else 0,
            **({} if is_elastic else {"maxFailedIndexes": 0}),
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": dict(labels)}, "spec": self._pod()},
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self._name, "labels": labels},
            "spec": spec,
        }
        if self._job.settings.num_machines == 1:
            return [job]
        spec["template"]["spec"]["subdomain"] = self._name
        # Pods meet before they are ready.
        port = {"name": "rendezvous", "port": self._job.settings.main_process_port or DEFAULT_PORT}
        names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_JOB: self._name}}
        meta = {"name": self._name, "labels": dict(labels)}
        return [job, {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {**names, "ports": [port]}}]

    def _pod(self) -> dict[str, Any]:
        options, settings = self._options, self._job.settings
        asked = {name: options[name] for name in ("cpu", "memory") if name in options}
        most = {"memory": options["memory"]} if "memory" in options else {}
        most |= {"nvidia.com/gpu": options["gpus"]} if "gpus" in options else {}
        volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # 64 MB otherwise
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        if claim := options.get("claim"):
            volumes.append({"name": "workspace", "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": "workspace", "mountPath": _MOUNT})
        main = f"{self._name}-0.{self._name}"
        python = options.get("python", "python3")
        place = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
        several = settings.num_machines > 1
        folder = Path(_MOUNT, RUNS, self._job.name) if claim else Path(NONE)
        changes = {"replicas": 1} if self._job.is_elastic else {"main_process_ip": main} if several else {}
        words = launcher_command(replace(self._job, folder=folder).command(**changes), python)
        container = {
            "name": _CONTAINER,
            "image": options["image"],
            "command": [word.replace("$", "$$") for word in words],  # kubelet halves them, and replaces $(NAME)
            "workingDir": options.get("folder", _MOUNT),
            "env": [{"name": "FARFLUNG_MACHINE_RANK", "valueFrom": place}] if several else [],
            "envFrom": [{"secretRef": {"name": options["secret"]}}] if "secret" in options else [],
            "resources": {key: value for key, value in (("requests", asked), ("limits", most)) if value},
            "volumeMounts": mounts,
        }
        waits = {"name": "wait-for-pod-0", "image": options["image"], "command": [python, "-c", _WAIT_FOR_NAME, main]}
        pairs = [pair.split("=") for pair in filter(None, options.get("node_selector", "").split(";"))]
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self._end_within_s,
            **({"nodeSelector": dict(pairs)} if pairs else {}),
            **({"serviceAccountName": options["service_account"]} if "service_account" in options else {}),
            **({"initContainers": [waits]} if several else {}),
            "containers": [{key: value for key, value in container.items() if value not in ([], {})}],
            "volumes": volumes,
        }
