"""The files for SLURM and Kubernetes: two nodes of this machine train as the files say."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.ranks import ROOT, environment, free_port
from tests.selection import thorough
from tests.test_examples import assert_trained

pytestmark = [pytest.mark.launch, thorough]
FOLDER = ROOT / "examples" / "cluster"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
SRUN = """#!/bin/bash
# Each node's task, as srun starts it; SLURM_NNODES of them.
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & done
for task in $(jobs -p); do wait "$task" || exit 1; done
"""
# The second name comes late: a reader that stops at the first would make it fail (SIGPIPE under pipefail).
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames nodes[1-2]" ] && echo localhost && sleep 0.2 && echo other
"""


def test_slurm(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    text = (FOLDER / "fsdp.sbatch").read_text("utf-8")
    nodes, ranks = re.search(r"--nodes=(\d+)", text)[1], re.search(r"--nproc-per-node (\d+)", text)[1]
    assert f"--gpus-per-node={ranks} " in text
    slurm = {"SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_NNODES": nodes, "SLURM_JOB_ID": "7", **LOOPBACK}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text.replace(":29400", f":{free_port()}")], cwd=ROOT,
        env=environment(tmp_path) | slurm, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert_trained(done.stdout)


def test_kubernetes():
    service, job = yaml.safe_load_all((FOLDER / "fsdp-job.yaml").read_text("utf-8"))
    pod = job["spec"]["template"]["spec"]
    # The name that the pods look up is that of the first pod of this job, in the service's subdomain.
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": job["metadata"]["name"]}}
    (container,) = pod["containers"]
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    command, port = container["command"], free_port()
    assert f"--master-addr {first} --master-port 29400" in command[-1]
    command[-1] = command[-1].replace(first, "localhost").replace("29400", port)
    assert f"--nnodes {job['spec']['completions']} " in command[-1]
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in container["volumeMounts"]}
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment() | LOOPBACK | {"JOB_COMPLETION_INDEX": str(index)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for index in range(job["spec"]["parallelism"])
    ]  # fmt: skip
    said = [one.communicate(timeout=200)[0] for one in started]
    assert not any(one.returncode for one in started), said
    assert_trained(said[0])
