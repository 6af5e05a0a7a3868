"""Many machines: a Ray cluster of two loopback addresses, by the commands of docs/many-machines.md, and the SLURM script."""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_deployment import ROOT, free_ports

sys.path.insert(0, str(ROOT / "docs" / "generate"))
import blocks

SCRIPT = ROOT / "docs" / "deploy" / "slurm-array.sh"
SMALL = ["model=mlp", "model.hidden=[8]", "num_clients=6", "num_rounds=2", "participation=full", "eval_every=1"]
SWEEP = ["-m", "strategy=fedavg,moon", *SMALL]
# Ray takes 127.0.0.1 for the machine's address in the network.
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
BIN = Path(sys.executable).parent


def page_command(start):
    """Return the page's command that begins so, as words."""
    lines = [line for block in blocks.blocks_of(ROOT / "docs" / "many-machines.md") for line in block.commands()]
    return shlex.split(next(line for line in lines if line.startswith(start)))


@pytest.fixture
def cluster(tmp_path):
    """Start two Ray nodes by the page's commands. Return the head's address, the environment with the token, and both."""
    (port,) = free_ports(1)
    (tmp_path / "ray-token").write_text(secrets.token_hex(32))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "ray-token")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = kept | token | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for start in ("ray start --head", "ray start --address"):
            words = page_command(start)
            for name, value in (("HEAD", HEAD), ("OTHER", OTHER), ("6379", str(port))):
                words = [word.replace(name, value) for word in words]
            command = [str(BIN / words[0]), *words[1:], "--block", "--num-gpus=0"]
            with (tmp_path / f"ray-{len(processes)}.log").open("w") as log:
                started = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
            processes.append(started)
            wait_for_text("Ray runtime started", tmp_path / f"ray-{len(processes) - 1}.log", started)
        yield f"{HEAD}:{port}", env, processes
    finally:
        for one in reversed(processes):
            one.send_signal(signal.SIGTERM)  # it ends its own processes
        for one in processes:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)


def wait_for_text(text, log, process, seconds=180):
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()  # noqa: PT018
        time.sleep(0.2)


def run_main(folder, env, *arguments):
    words = [sys.executable, str(ROOT / "main.py"), *arguments]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_nodes_run_a_run_and_a_sweep_with_the_bytes_of_one(cluster, tmp_path):
    address, env, _ = cluster
    both = ["engine=ray", f"engine.address={address}"]
    nodes = (
        "import ray; ray.init(address='auto', logging_level=50); print(sorted(n['NodeManagerAddress'] for n in ray.nodes()))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", nodes], env=env | {"RAY_ADDRESS": address}, capture_output=True, text=True, timeout=120
    )
    assert str([HEAD, OTHER]) in seen.stdout, seen.stderr
    run_main(tmp_path, env, "strategy=moon", *SMALL, *both, "output_dir=cluster/run")
    run_main(tmp_path, env, *SWEEP, *both, "output_dir=cluster/sweep")
    run_main(tmp_path, env, "strategy=moon", *SMALL, "engine=local", "output_dir=one/run")
    run_main(tmp_path, env, *SWEEP, "engine=local", "output_dir=one/sweep")
    for folder in ("run", "sweep/0", "sweep/1"):
        for file in ("metrics.csv", "clients.csv", "model.safetensors"):
            assert (tmp_path / "cluster" / folder / file).read_bytes() == (tmp_path / "one" / folder / file).read_bytes()


def kill_machine(process):
    """Kill all processes of a Ray node at once."""
    found = [process.pid]
    for pid in found:  # which grows
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in found:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_that_lost_a_machine_ends_in_one_line_and_resumes(cluster, tmp_path):
    address, env, processes = cluster
    rounds = ["strategy=moon", *SMALL, "num_rounds=60", "checkpoint_every=1"]
    command = [*rounds, "engine=ray", f"engine.address={address}", "output_dir=cluster/run"]
    with (tmp_path / "run.log").open("w") as log:
        words = [sys.executable, str(ROOT / "main.py"), *command]
        started = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        wait_for_text("participants   6", tmp_path / "run.log", started)
        kill_machine(processes[1])
        started.wait(180)
    finally:
        started.kill()
    said = (tmp_path / "run.log").read_text()
    assert started.returncode == 1, said
    assert said.count("engine=ray: a machine of the cluster is gone. Fix: ") == 1, said
    assert "Traceback" not in said
    assert json.loads((tmp_path / "cluster" / "run" / "summary.json").read_text())["status"] == "failed"
    run_main(tmp_path, env, *command, "resume=latest")
    run_main(tmp_path, env, *rounds, "engine=local", "output_dir=one/run")
    for file in ("metrics.csv", "clients.csv", "model.safetensors"):
        assert (tmp_path / "cluster" / "run" / file).read_bytes() == (tmp_path / "one" / "run" / file).read_bytes()


def test_each_task_of_a_slurm_array_runs_its_shard(tmp_path):
    stub = tmp_path / "contrafed"
    stub.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $@"\n')
    stub.chmod(0o755)
    for task, first, shard in ((1, 1, "1/3"), (3, 1, "3/3"), (7, 5, "3/3")):
        slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": str(first), "SLURM_ARRAY_TASK_COUNT": "3"}
        env = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run([str(SCRIPT), "experiment=pmfl/table1"], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == f"1 -m experiment=pmfl/table1 engine=local shard={shard}\n"
    every_other = {
        "SLURM_ARRAY_TASK_ID": "6",
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_ARRAY_TASK_STEP": "2",
    }
    done = subprocess.run([str(SCRIPT)], env=env | every_other, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "shard=4/4"
    outside = {key: value for key, value in env.items() if not key.startswith("SLURM_")}
    done = subprocess.run([str(SCRIPT)], env=outside, capture_output=True, text=True)
    assert "submit with sbatch --array" in done.stderr
    alone = env | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "1", "TASKS": "8"}
    done = subprocess.run([str(SCRIPT), "experiment=pmfl/table1"], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "shard=3/8"
    assert page_command("sbatch")[2] == str(SCRIPT.relative_to(ROOT))
