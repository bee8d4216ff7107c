# SPDX-License-Identifier: Apache-2.0
"""Runs on Kubernetes: the manifests, and what is asked of the API, spoken over HTTP with a server of this machine."""

from __future__ import annotations

import json
import random
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from farflung.config.launch import LaunchSettings
from farflung.launch.engines.engine import Job
from farflung.launch.engines.kubernetes import Kubernetes
from farflung.launch.engines.kubernetes_api import PodLog, first_exit_code, name_of, problems
from farflung.launch.folder import SUBMITTED
from tests.launch.engines.launchers import launched
from tests.launch.keyed import KEY, check_sealed_and_unseen, end_soon, write_key
from tests.python import call_farflung
from tests.waits import until

pytest.importorskip("kmock")  # needs Python 3.11
from tests.launch.engines import cluster as fake

TRAINS = """
import time, torch
from farflung import Accelerator
torch.set_num_threads(1)
accelerator, model = Accelerator(), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
loop = accelerator.outer_loops[0]
print("is in the run", flush=True)
while loop.position <= 40 or not open("last").read():
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
print("trained", loop.position > 40, loop.stats().replicas_joined)
accelerator.end_training()
"""
GOLDEN = Path(__file__).parent / "golden"
FIXED = "--num_machines 2 --num_processes 4 --engine-options image=example.org/train:1,gpus=2,memory=32Gi,cpu=8"
ELASTIC = (
    "--elastic 2:8 --replicas 4 --meet s3://bucket/run7 --outer diloco --outer-every 64 --engine-options "
    "image=example.org/train:1,gpus=1,claim=work,secret=bucket,service_account=trainer,end_within=300,folder=/app,"
    "python=python3.12,namespace=training,context=here,node_selector=gpu=a100;zone=eu-1"
)
HERE = ["--engine-options", f"image=example.org/train:1,namespace={fake.NAMESPACE},claim={fake.CLAIM}"]
FIXED_HERE = ["--engine", "kubernetes", "--cpu", "--num_machines", "2", "--run-dir", "run", *HERE, "train.py"]
ELASTIC_HERE = ["--engine", "kubernetes", "--cpu", "--elastic", "1:6", "--replicas", "4", "--run-dir", "run"]
ELASTIC_HERE += ["--meet", "file:///workspace/run7", *HERE, "train.py"]


@pytest.fixture
def kubeconfig(home, monkeypatch):
    """Let the client read the kubeconfig of the empty home; it asks the environment when it is loaded."""
    monkeypatch.setenv("KUBECONFIG", str(home / "kubeconfig"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(home / "kubeconfig"))


@pytest.fixture
def cluster(home, kubeconfig, clock):
    """A cluster that kubeconfig describes, and a script in the empty home."""
    (home / "train.py").touch()
    with fake.running(home) as made:
        yield made


def is_submitted() -> bool:
    """Whether the folder has by what the run is known, after which it is followed."""
    file = Path("run", SUBMITTED)
    return file.exists() and bool(json.loads(file.read_text())["handle"])


def launched_pods(cluster):
    """Submit and follow a fixed run; return a call that waits for its exit code, and its two pods."""
    code = launched(*FIXED_HERE)
    until(is_submitted)
    return code, *cluster.pods.values()


@pytest.mark.parametrize(("name", "flags"), [("fixed", FIXED), ("elastic", ELASTIC)])
def test_manifests_are_those_that_are_kept(name, flags, home, capsys):
    (home / "train.py").touch()
    words = ["launch", "--engine", "kubernetes", "--run-dir", "/runs/Run_7", *flags.split(), "--dry-run"]
    assert call_farflung(*words, "train.py", "--name", "$(HOME)") == 0
    text = capsys.readouterr().out
    assert text == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.package("kubernetes_validate")
@pytest.mark.parametrize("name", ["fixed", "elastic"])
def test_a_server_takes_the_manifests_that_are_kept(name):
    kubernetes_validate = import_module("kubernetes_validate")
    for version in ("1.31", kubernetes_validate.latest_version()):
        for manifest in yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()):
            kubernetes_validate.validate(manifest, version, strict=True)
            misspelt = manifest | {"spec": manifest["spec"] | {"speck": 0}}
            with pytest.raises(kubernetes_validate.ValidationError, match="speck"):  # so it sees a misspelt field
                kubernetes_validate.validate(misspelt, version, strict=True)


def test_pods_of_a_fixed_run_have_a_number_and_find_pod_0_by_name():
    job, service = yaml.safe_load_all((GOLDEN / "fixed.yaml").read_text())
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    main = f"{name}-0.{service['metadata']['name']}"  # an Indexed Job's pods have the host names <job>-<index>
    words = pod["containers"][0]["command"]
    assert words[words.index("--main_process_ip") + 1] == main == pod["initContainers"][0]["command"][-1]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_a_run_is_submitted_followed_and_ends_with_the_job(cluster, clock, capsys):
    code, one, two = launched_pods(cluster)
    two.troubles = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
    since = clock.now
    until(lambda: clock.now > since + 3)
    cluster.says(one, "step 1")
    cluster.says(two, "step 1 as well")
    cluster.ends(one, 0)
    cluster.says(two, "step 2")
    cluster.ends(two, 0)
    assert code() == 0
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[pod 0] step 1", "[pod 1] step 1 as well", "[pod 1] step 2"]
    assert shown.err.count("pod 1 waits for a node: 0/3 nodes are available") == 1
    [(_, job), (_, service)] = cluster.asked
    assert (job["kind"], service["kind"]) == ("Job", "Service")
    assert service["metadata"]["ownerReferences"][0]["uid"] == cluster.job["metadata"]["uid"]


def test_a_log_whose_stream_ends_early_is_read_on_and_no_line_is_shown_twice(cluster, capsys):
    cluster.cut_after = 2
    code, one, two = launched_pods(cluster)
    for number in range(5):
        cluster.says(one, f"step {number}")
    until(lambda: cluster.cut_after is None)
    cluster.says(one, "step 5")
    for pod in (one, two):
        cluster.ends(pod, 0)
    assert code() == 0
    assert capsys.readouterr().out.splitlines() == [f"[pod 0] step {number}" for number in range(6)]


def test_one_bad_answer_of_each_kind_costs_a_run_nothing(cluster, capsys):
    draw, kinds = random.Random(1), [*range(400, 419), *range(421, 430), 431, 451, *range(500, 512), fake.CUT]
    code = launched(*FIXED_HERE)
    until(is_submitted)
    cluster.answers = [one for kind in draw.sample(kinds, len(kinds)) for one in (kind, *[0] * draw.randrange(2, 5))]
    until(lambda: not cluster.answers)
    for pod in cluster.pods.values():
        cluster.says(pod, "the last line")
        cluster.ends(pod, 0)
    assert code() == 0
    assert capsys.readouterr().out.count("the last line") == 2


def test_a_bad_answer_to_what_is_submitted_is_asked_again_and_a_refusal_is_final(cluster, clock, capsys):
    cluster.answers, cluster.retry_after = [503, 0, 0, 0, fake.LOST, 0, 0, fake.LOST], "20"
    code = launched(*FIXED_HERE)
    until(is_submitted)
    assert [body["kind"] for _, body in cluster.asked] == ["Job", "Service"]
    assert clock.now >= 20
    cluster.answers, began = [403] * 100, clock.now
    assert code() == 5
    assert clock.now >= began + 4  # five since the last good answer
    assert "The cluster refuses GET jobs/farflung-run-" in (said := capsys.readouterr().err)
    assert "in the namespace training (403): one bad answer" in said


@pytest.mark.parametrize(("status", "last"), [(404, 0.0), (503, 25.5)])
def test_what_is_not_accepted_is_not_submitted(status, last, cluster, clock, capsys):
    cluster.answers = [status] * 100
    assert call_farflung("launch", *FIXED_HERE) == 5
    assert f"({status})" in capsys.readouterr().err
    assert (clock.now, cluster.asked) == (last, [])


def test_a_job_whose_service_is_refused_is_deleted(cluster, capsys):
    cluster.answers = [0, 0, 0, 0, 403]
    assert call_farflung("launch", *FIXED_HERE) == 5
    assert "refuses POST services" in capsys.readouterr().err
    assert not cluster.pods


def test_a_cluster_may_be_away_for_ten_minutes(cluster, clock, capsys):
    code, *_ = launched_pods(cluster)
    cluster.answers, began = [500] * 300, clock.now
    assert code() == 5
    assert 585 < clock.now - began <= 602


def test_lines_of_one_time_and_of_a_clock_that_goes_back_are_all_shown(monkeypatch, capsys):
    whole = [b"2026-01-01T00:00:0%cZ %c" % (*line,) for line in (b"5a", b"5b", b"5b", b"1c", b"6d")]
    log = PodLog(None, {"metadata": {"name": "x"}})
    for lines in (whole[:2], whole[:4], whole, whole[3:]):  # the stream ends, and ends again; then kubelet rotates
        log._show(lines)
    assert capsys.readouterr().out.split("\n")[:-1] == [f"[pod x] {line}" for line in "abbcd"]


def test_runs_of_long_names_or_of_one_name_in_two_folders_are_different_jobs(home):
    runs = [home / f"2026-01-01T00-00-00-{'long' * 20}{end}" for end in ("", "-2")]
    runs += [home / "of another user" / runs[0].name]
    settings = LaunchSettings(engine="kubernetes", engine_options="image=a")
    names = {Kubernetes(Job(settings, "train.py", (), run))._name for run in runs}
    assert len(names) == 3
    assert all(len(name) <= 50 for name in names)


@pytest.mark.parametrize(("exit_code", "expected"), [(2, 2), (4, 4), (137, 3)])
def test_a_machine_that_fails_ends_a_fixed_run_with_its_code(exit_code, expected, cluster, capsys):
    code, _, two = launched_pods(cluster)
    cluster.says(two, "out of luck")
    cluster.ends(two, exit_code)
    assert code() == expected
    shown = capsys.readouterr()
    assert "[pod 1] out of luck" in shown.out
    assert f"has failed: Pod {two.name} failed with exit code {exit_code}" in shown.err


def test_machines_that_have_saved_at_a_signal_start_again(cluster):
    code, *before = launched_pods(cluster)
    for pod in before:
        cluster.ends(pod, 75)
    until(lambda: len(cluster.pods) == 2 and not set(before) & set(cluster.pods.values()))
    for pod in list(cluster.pods.values()):
        cluster.ends(pod, 0)
    assert code() == 0


def test_an_elastic_run_is_scaled_in_one_request_and_cancelled(cluster, capsys):
    code = launched(*ELASTIC_HERE)
    until(is_submitted)
    for count in (6, 2):
        assert call_farflung("scale", "run", str(count)) == 0
        assert set(cluster.pods) == set(range(count))
        assert cluster.asked[-1][1] == {"spec": {"completions": count, "parallelism": count}}
    assert call_farflung("scale", "run", "7") == 2
    assert call_farflung("cancel", "run") == 0
    assert not cluster.pods
    assert code() == 143
    shown = capsys.readouterr()
    assert "had 4 replicas and is to have 6" in shown.out
    assert "had 6 replicas and is to have 2" in shown.out
    assert "elastic is 1:6" in shown.err
    assert "was deleted" in shown.err


def test_a_replica_that_is_lost_starts_again_and_one_that_is_used_wrongly_does_not(cluster, capsys):
    code = launched(*ELASTIC_HERE)
    until(lambda: len(cluster.pods) == 4)
    lost = cluster.pods[0]
    cluster.ends(lost, 137)
    until(lambda: cluster.pods[0] is not lost)
    cluster.ends(cluster.pods[1], 2)
    for index in (0, 2, 3):
        cluster.ends(cluster.pods[index], 0)
    assert code() == 2
    assert "Failed indexes: 1" in capsys.readouterr().err


@pytest.mark.long
def test_pods_of_an_elastic_run_meet_on_the_claim_and_one_that_is_lost_comes_back(home, kubeconfig, capsys):
    """The containers' commands are run here, so the launchers and replicas are real; only the cluster is not."""
    (home / "claim").mkdir()
    (home / "claim" / "train.py").write_text(TRAINS)
    (home / "claim" / "last").touch()
    options = f"{HERE[1]},python={sys.executable},folder={home / 'claim'}"
    words = [*ELASTIC_HERE[:6], "2", *ELASTIC_HERE[7:-3], "--outer", "diloco", "--outer-every", "4"]
    with fake.running(home, starts=home / "claim") as cluster:
        code = launched(*words, "--engine-options", options, "train.py")
        wait_for(cluster, "training begins with")
        assert call_farflung("scale", "run", "3") == 0
        for index in range(3):
            wait_for(cluster, "is in the run", index)
        lost = cluster.pods[0]
        lost.kill()
        until(lambda: cluster.pods[0] is not lost)
        wait_for(cluster, "is out:")
        wait_for(cluster, "is in the run", 0)
        (home / "claim" / "last").write_text("now")
        assert code() == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert all(f"[pod {index}] trained True" in shown for index in range(3)), shown


@pytest.mark.long
def test_a_key_reaches_pods_by_a_secret_unseen_and_seals_the_run(home, kubeconfig, capsys):
    claim = home / "claim"
    claim.mkdir()
    key = write_key(claim)
    key.rename(home / key.name)
    options = f"{HERE[1]},python={sys.executable},folder={claim},secret=run7"
    words = [*ELASTIC_HERE[:3], "--elastic", "2:2", "--replicas", "2", *ELASTIC_HERE[7:-3], "--engine-options", options]
    with fake.running(home, starts=claim) as cluster:
        cluster.secrets["run7"] = {"FARFLUNG_KEY": KEY}
        assert call_farflung("launch", *words, "--dry_run", "train.py") == 0
        code = launched(*words, "train.py")
        wait_for(cluster, "training begins with 2 replicas")
        end_soon(claim)
        ended, records = code(), json.dumps(cluster.asked)
    shown = capsys.readouterr()
    assert ended == 0, shown
    check_sealed_and_unseen(home, claim / "run7", shown.out, shown.err, records)


def wait_for(cluster, words: str, index: int | None = None) -> None:
    """Wait until a pod, or the one of this index, prints `words`; events of the run may be older."""

    def lines() -> list[str]:
        return [f"[pod {one}] {line}" for one, pod in list(cluster.pods.items()) for line in pod.lines]

    prefix = "" if index is None else f"[pod {index}] "
    until(lambda: any(words in line for line in lines() if line.startswith(prefix)), lambda: "".join(lines()))


def pod(name="job-0-x1", index=None, **status) -> dict:
    notes = {} if index is None else {"annotations": {fake.INDEX: index}}
    return {"metadata": {"name": name, "labels": {}, **notes}, "status": status}


def test_a_pod_has_its_index_as_a_name_and_says_why_it_does_not_run():
    assert [name_of(pod(index="3")), name_of(pod())] == ["pod 3", "pod job-0-x1"]
    waits = [{"state": {"waiting": {"reason": reason, "message": "m"}}} for reason in ("PodInitializing", "ErrImage")]
    ended = [{"state": {"terminated": {"exitCode": code, "reason": "OOM"}}} for code in (0, 137)]
    placed = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
    assert problems(pod(conditions=placed, initContainerStatuses=waits, containerStatuses=ended)) == [
        "waits: ErrImage: m",
        "has ended with exit code 137 (OOM)",
    ]
    assert problems(pod()) == []


def test_a_run_fails_with_the_code_of_the_container_that_failed_first():
    def failed(*ends) -> int:
        states = [{"state": {"terminated": {"exitCode": code, "finishedAt": at}}} for code, at in ends]
        return first_exit_code([pod(containerStatuses=[state]) for state in states])

    assert failed((4, "2026-01-01T00:00:02Z"), (2, "2026-01-01T00:00:01Z"), (0, "2026-01-01T00:00:00Z")) == 2
    assert [failed((code, "")) for code in (2, 3, 4, 5, 1, 137)] == [2, 3, 4, 5, 3, 3]
    assert failed() == 3


WRONG = [
    ("--engine-options image=a,context=there", "context is 'there', which kubeconfig does not describe"),
    ("--engine-options image=a,namespace=nowhere", 'namespaces "nowhere" not found'),
    ("--engine-options image=a,namespace=training,claim=none", "persistentvolumeclaims/none"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_a_wrong_use_is_answered_in_words_and_nothing_is_submitted(flags, words, cluster, capsys):
    assert call_farflung("launch", "--engine", "kubernetes", "--run-dir", "run", *flags.split(), "train.py") == 5
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) <= 15
    assert not cluster.asked
    assert not Path("run").exists()


def test_a_cluster_that_is_away_and_one_that_is_not_described_are_told_apart(cluster, home, capsys):
    text = (home / "kubeconfig").read_text()
    (home / "kubeconfig").write_text(re.sub(r"127.0.0.1:\d+", "127.0.0.1:1", text))
    assert call_farflung("launch", *FIXED_HERE) == 5
    assert "The cluster at http://127.0.0.1:1 can't be reached" in capsys.readouterr().err
    (home / "kubeconfig").unlink()
    assert call_farflung("launch", *FIXED_HERE) == 5
    assert "No cluster is configured" in capsys.readouterr().err


def test_a_missing_package_is_named_and_a_dry_run_needs_none(cluster, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert call_farflung("launch", *FIXED_HERE) == 5
    assert "pip install 'farflung[k8s]'" in capsys.readouterr().err
    assert call_farflung("launch", "--dry-run", *FIXED_HERE) == 0
    assert "kind: Job" in capsys.readouterr().out


def test_a_second_run_of_one_name_is_refused_and_the_first_one_stays(cluster, capsys):
    code, *pods = launched_pods(cluster)
    assert call_farflung("launch", *FIXED_HERE) == 5
    assert "(409)" in capsys.readouterr().err
    for pod in pods:
        cluster.ends(pod, 0)
    assert code() == 0
