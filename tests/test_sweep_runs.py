"""Running a sweep: finished jobs in its folder, stopped and failed jobs, and jobs of another process."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import check_overrides, config_of, slow
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from contrafed.command import INTERRUPTED_STATUS
from contrafed.config.compose import Job, expand_jobs
from contrafed.core.errors import UserError
from contrafed.runs import run
from contrafed.runs.checkpoint import identity
from contrafed.runs.output.folder import claim_folder
from hydra_plugins import contrafed_sweeper
from hydra_plugins.contrafed_sweeper import ContrafedSweeper, Left, find_runs


@pytest.fixture
def call_command(call_command, monkeypatch, tmp_path):
    """Run the command in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        done = call_command(*arguments)
        return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)

    return call


QUICK_RUN = ("engine=local", "num_clients=4", "num_rounds=2", "eval_every=1", "model=mlp", "model.hidden=[8]", "tracker=none")
DIGITS_SWEEP = ("-m", "experiment=digits", *QUICK_RUN, "participation=uniform", "strategy=fedavg")


def list_finished(home):
    return sorted(path.parent.name for path in Path(home).glob("*/summary.json") if '"finished"' in path.read_text())


def test_a_sweep_runs_what_its_folder_does_not_hold(call_command):
    first = call_command(*DIGITS_SWEEP, "seed=0")
    assert (first.status, list_finished("outputs/digits")) == (0, ["fedavg-uniform-seed=0"])
    assert "1 job: 1 to run in outputs/digits" in first.out
    before = Path("outputs/digits/fedavg-uniform-seed=0/metrics.csv").stat().st_mtime_ns
    # Known by its configuration: also under another name.
    Path("outputs/digits/fedavg-uniform-seed=0").rename("outputs/digits/renamed")
    more = call_command(*DIGITS_SWEEP, "seed=0,1")
    assert (more.status, list_finished("outputs/digits")) == (0, ["fedavg-uniform-seed=1", "renamed"])
    assert "2 jobs, 1 of them finished already: 1 to run in outputs/digits" in more.out
    said = "[job 1, 1 left, less than a minute to go] experiment=digits strategy=fedavg participation=uniform seed=1"
    assert said in more.out
    assert Path("outputs/digits/renamed/metrics.csv").stat().st_mtime_ns == before
    # Another configuration is another run, in a separate folder if the name is taken.
    changed = call_command(*DIGITS_SWEEP, "seed=1", "num_rounds=1")
    assert (changed.status, list_finished("outputs/digits")) == (
        0, ["fedavg-uniform-seed=1", "fedavg-uniform-seed=1-2", "renamed"],
    )  # fmt: skip
    stored = yaml.safe_load(Path("outputs/digits/fedavg-uniform-seed=1-2/config.yaml").read_text())
    assert (stored["experiment"], stored["num_rounds"]) == ("digits", 1)
    assert "num_rounds=1" in stored["changed"]


def test_a_data_set_that_cannot_be_loaded_is_told_once_before_the_first_job(call_command):
    Path("bad.npz").write_bytes(b"no archive")
    sets = ("-m", *QUICK_RUN, "dataset=npz", "output_dir=out")
    refused = call_command(*sets, "dataset.path=bad.npz", "strategy=fedavg,moon", "seed=0,1")
    assert (refused.status, refused.err.count("error: "), "[job" in refused.out) == (2, 1, False)
    assert "bad.npz" in refused.err
    assert list(Path("out").iterdir()) == []


@pytest.mark.parametrize("asked", ["", slow("checkpoint_every=2")])
def test_a_stopped_job_goes_on_from_its_checkpoint_to_the_same_bytes(call_command, monkeypatch, asked):
    """A job without a request for checkpoints keeps them until it is finished."""
    monkeypatch.setattr(contrafed_sweeper, "MIN_CHECKPOINT_ROUNDS", 2)
    whole = ("seed=0", "num_rounds=6", *asked.split())
    assert call_command(*DIGITS_SWEEP, *whole, "output_dir=whole").status == 0
    from contrafed.runs.output import RunRecorder

    real = RunRecorder.flush

    def stops(self):
        real(self)
        if self.rounds >= 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "flush", stops)
        stopped = call_command(*DIGITS_SWEEP, *whole)
    assert stopped.status == INTERRUPTED_STATUS
    assert list_finished("outputs/digits") == []
    again = call_command(*DIGITS_SWEEP, *whole)
    assert (again.status, list_finished("outputs/digits")) == (0, ["fedavg-uniform-seed=0"])
    summary = json.loads(Path("outputs/digits/fedavg-uniform-seed=0/summary.json").read_text())
    assert Path(summary["resumed_from"]).name == "000004"
    assert Path("outputs/digits/fedavg-uniform-seed=0/checkpoints").exists() == bool(asked)
    a, b = (Path(home, "fedavg-uniform-seed=0", "metrics.csv").read_bytes() for home in ("whole", "outputs/digits"))
    assert a == b


def test_a_stopped_sweep_leaves_the_table_of_what_is_finished(call_command, monkeypatch):
    real = run.run_resolved

    def stops(wanted, **more):
        if wanted.seed == 2:
            raise KeyboardInterrupt
        return real(wanted, **more)

    monkeypatch.setattr(run, "run_resolved", stops)
    assert call_command(*DIGITS_SWEEP, "seed=0,1,2").status == INTERRUPTED_STATUS
    assert "| fedavg | 2 |" in Path("outputs/digits/sweep.md").read_text()


def test_where_the_data_lie_makes_no_other_run():
    """Nor another table: a finished job is found on another disk."""
    asked = ["experiment=pmfl/base", "dataset=svhn"]
    one, other, third = (
        check_overrides(*asked, *more).composed
        for more in ([], ["dataset.root=elsewhere", "dataset.download=true"], ["dataset.fraction=0.5"])
    )
    assert identity(one) == identity(other) != identity(third)
    assert (other["changed"], third["changed"]) == (["dataset=svhn"], ["dataset=svhn", "dataset.fraction=0.5"])


def test_cells_that_a_scale_makes_alike_are_jobs_of_their_own():
    """Half and double the clients or rounds are both twenty clients and four rounds at scale=small."""
    keys = {
        identity(check_overrides(*job.overrides).composed) for job in expand_jobs(["experiment=mpfedcon/table2", "scale=small"])
    }
    assert len(keys) == 24


def test_a_job_that_is_shortened_stands_beside_the_cell_of_its_case():
    job = ["experiment=mpfedcon/table2", "clients=m100", "rounds=t200", "method=fedrep", "num_rounds=60"]
    composed = check_overrides(*job).composed
    assert composed["published"]["setting"] == "clients=100 classes=5 m=100 T=200"
    assert (composed["num_rounds"], composed["changed"]) == (60, ["num_rounds=60"])


def test_the_time_to_go_is_by_method_data_and_rounds_that_are_left(tmp_path, monkeypatch):
    def of(name, rounds, dataset="digits"):
        choice = lambda name: SimpleNamespace(name=name)  # noqa: E731
        client = SimpleNamespace(strategy=choice(name), dataset=choice(dataset))
        return Left(Job(0, [], name, "table", None), SimpleNamespace(num_rounds=rounds, client=client), tmp_path)

    jobs = ContrafedSweeper()
    monkeypatch.setattr(jobs, "_find_past", lambda each: tmp_path / each.run.client.strategy.name)
    (tmp_path / "moon" / "checkpoints" / "000900").mkdir(parents=True)
    assert jobs._estimate_time([of("pmfl", 1000)]) == ""
    jobs._add_finished(Path("a"), {"seconds_per_round": 6.0}, of("pmfl", 10).run)
    jobs._add_finished(Path("b"), {"seconds_per_round": 2.0}, of("fedavg", 10).run)
    # 1,000 rounds of 6 s, 60 of 2 s, and 60 of the mean 4 s, 900 of them done before: 100 + 2 + 4 minutes.
    assert jobs._estimate_time([of("pmfl", 1000), of("fedavg", 60), of("moon", 960)]) == ", about 1 h 46 min to go"


def test_a_folder_that_is_a_runs_or_has_a_jobs_is_refused_before_any_job(call_command):
    assert call_command(*QUICK_RUN, "strategy=fedavg", "output_dir=one").status == 0
    some = ("-m", *QUICK_RUN, "strategy=fedavg", "seed=0,1")
    onto = call_command(*some, "output_dir=one")
    assert (onto.status, onto.err) == (
        2,
        "error: output_dir: one already holds a run. Fix: another output_dir, or move the run away\n",
    )
    Path("one").rename("1")
    again = call_command(*some, "output_dir=.")
    assert (again.status, Path("0").exists()) == (2, False)
    assert again.err == "error: output_dir: 1 already holds a run. Fix: another output_dir, or move the run away\n"
    above = call_command(*QUICK_RUN, "strategy=fedavg", "output_dir=.")
    assert (above.status, above.err.count("\n")) == (2, 1)
    assert "has the run 1 below it" in above.err


def sweeper_in(folder, named=False):
    """Return a sweeper whose command line names a folder, or whose folder has the current time."""
    sweeper = ContrafedSweeper()
    sweeper.named, sweeper.config = named, OmegaConf.create({"hydra": {"sweep": {"dir": folder}}})
    return sweeper


def test_a_run_and_a_sweep_of_one_second_have_folders_of_their_own(call_command):
    one, some = (*QUICK_RUN, "strategy=fedavg"), ("-m", *QUICK_RUN, "strategy=fedavg", "seed=0,1")
    assert call_command(*one, "output_dir=outputs/now").status == 0
    assert sweeper_in("outputs/now")._find_home(Job(0, [], "run", None, None), None) == Path("outputs/now-2")
    assert call_command(*some, "output_dir=outputs/later").status == 0
    assert claim_folder(Path("outputs/later"), unique=True) == Path("outputs/later-2")


def test_sweeps_of_one_second_have_folders_of_their_own(tmp_path):
    homes = [sweeper_in(f"{tmp_path}/outputs/now")._find_home(Job(0, [], "run", None, None), None) for _ in range(3)]
    assert [home.name for home in homes] == ["now", "now-2", "now-3"]


def test_a_folder_in_an_experiments_file_is_refused_for_its_sweep(call_command, expect_error):
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text("# @package _global_\ndefaults: [digits, _self_]\noutput_dir: there\n")
    mine = ("-m", "--config-dir", "conf", "experiment=mine", *DIGITS_SWEEP[2:], "seed=0")
    refused = call_command(*mine)
    assert (refused.status, {path.name for path in Path().iterdir()}) == (2, {"conf"})
    expect_error.check(refused.err)
    assert call_command(*mine, "output_dir=named").status == 0
    assert list_finished("named") == ["fedavg-uniform-seed=0"]


def test_a_stopped_job_with_secret_noise_begins_anew(call_command, monkeypatch):
    """Repeated rounds would have other noise, so it has no checkpoint to resume from."""
    from contrafed.runs.output import RunRecorder

    secret = ("seed=0", "privacy=local")

    def stops(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "flush", stops)
        assert call_command(*DIGITS_SWEEP, *secret).status == INTERRUPTED_STATUS
    again = call_command(*DIGITS_SWEEP, *secret)
    assert (again.status, again.err) == (0, "")
    assert len(list_finished("outputs/digits")) == 1


def test_what_is_left_of_a_sweep_of_no_experiment_is_done_by_resume(call_command):
    """A finished job without checkpoints was counted as failed."""
    some = ("-m", *QUICK_RUN, "strategy=fedavg", "seed=0,1", "output_dir=some")
    assert call_command(*some).status == 0
    shutil.rmtree("some/1")
    again = call_command(*some, "resume=latest")
    assert (again.status, again.err, list_finished("some")) == (0, "", ["0", "1"])
    assert "2 jobs, 1 of them finished already: 1 to run in some" in again.out
    other = call_command(*some, "resume=latest", "num_rounds=1")
    assert (other.status, "0 of 2 jobs finished, 2 failed" in other.out) == (2, True)  # another configuration does not resume


def test_a_failing_job_does_not_end_a_sweep(call_command):
    done = call_command(*DIGITS_SWEEP, "partition=pathological", "partition.classes_per_client=3,20,4", "seed=0")
    assert done.status == 2
    assert list_finished("outputs/digits") == [f"fedavg-uniform-seed=0-classes_per_client={n}" for n in (3, 4)]
    assert not Path("outputs/digits/fedavg-uniform-seed=0-classes_per_client=20").exists()
    assert "2 of 3 jobs finished, 1 failed" in done.out
    assert "1 job(s) failed: experiment=digits" in done.err


def test_a_sweep_that_fails_as_a_whole_names_a_few_jobs(capsys):
    sweeper = ContrafedSweeper()
    sweeper.failures = [(job, True) for job in expand_jobs(["seed=range(7)"])]
    with pytest.raises(SystemExit) as ended:
        sweeper.report_failures()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: 7 job(s) failed: seed=0; seed=1; seed=2; seed=3; seed=4; and 2 more\n"


CASES = """# @package _global_
defaults: [digits, _self_]
grid:
  {strategy: [fedavg], participation: null, way: {"a<5": {num_rounds: 1}, "a>5": {num_rounds: 2}, same: {num_rounds: 1}}}
"""


def test_jobs_that_start_at_once_share_no_folder_and_equal_ones_run_once(tmp_path, monkeypatch, capsys):
    """Folders of launchers such as joblib are chosen before any job runs."""
    monkeypatch.chdir(tmp_path)
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/cases.yaml").write_text(CASES)
    jobs = expand_jobs(["experiment=cases", *(each for each in QUICK_RUN if "rounds" not in each), "seed=0"], Path("conf"))
    left = [Left(job, check_overrides(*job.overrides, folder=Path("conf")), Path("home")) for job in jobs]
    assert [each.job.name for each in left] == ["fedavg-seed=0-a_5", "fedavg-seed=0-a_5", "fedavg-seed=0-same"]
    launched = []

    def launch(lines, initial_job_idx):
        launched.extend(lines)
        return [SimpleNamespace(status=JobStatus.FAILED, _return_value=UserError("a: b")) for _ in lines]

    sweeper = sweeper_in("home", named=True)
    sweeper.launcher, sweeper._there = SimpleNamespace(launch=launch), {Path("home"): {}}
    assert len(sweeper._launch(left)) == 2
    folders = [word for line in launched for word in line if word.startswith("hydra.sweep.subdir=")]
    assert folders == ["hydra.sweep.subdir='fedavg-seed=0-a_5'", "hydra.sweep.subdir='fedavg-seed=0-a_5-2'"]
    assert "job 2 is the same run as job 0" in capsys.readouterr().out
    assert [job.number for job, mistake in sweeper.failures if mistake] == [0, 1, 2]


def lock(folder):
    """Hold a folder as another process does."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_two_processes_do_not_run_one_job(call_command):
    (first, _), home = (
        expand_jobs(["experiment=digits", *DIGITS_SWEEP[2:], "seed=0,1"]),
        Path("outputs/digits/fedavg-uniform-seed=0"),
    )
    elsewhere = lock(home)
    (home / "config.yaml").write_text(check_overrides(*first.overrides).text)
    busy = call_command(*DIGITS_SWEEP, "seed=0,1")
    assert (busy.status, list_finished("outputs/digits")) == (0, ["fedavg-uniform-seed=1"])
    assert "another process is at it" in busy.out
    assert "1 of 2 jobs finished, 0 failed, 1 left to another process" in busy.out
    os.close(elsewhere)
    assert call_command(*DIGITS_SWEEP, "seed=0,1", "shard=1/2").status == 0
    assert list_finished("outputs/digits") == ["fedavg-uniform-seed=0", "fedavg-uniform-seed=1"]
    assert "shard" not in (home / "config.yaml").read_text()
    empty = call_command(*DIGITS_SWEEP, "seed=0", "shard=2/2")
    assert (empty.status, empty.err) == (2, "error: shard=2/2: the sweep has only 1 jobs\n")


@pytest.mark.slow
def test_two_processes_do_not_run_one_job_that_cannot_go_on(call_command):
    """Secret noise must not be drawn twice."""
    asked = ("experiment=digits", *DIGITS_SWEEP[2:], "seed=0", "privacy=local")
    (job,), home = expand_jobs([*asked]), Path("outputs/digits/fedavg-uniform-seed=0")
    elsewhere = lock(home)
    (home / "config.yaml").write_text(check_overrides(*job.overrides).text)
    busy = call_command("-m", *asked)
    assert (busy.status, list_finished("outputs/digits")) == (0, [])
    assert "another process is at it" in busy.out
    os.close(elsewhere)
    assert call_command("-m", *asked).status == 0  # anew, under another name
    assert list_finished("outputs/digits") == ["fedavg-uniform-seed=0-2"]


def test_a_folder_may_be_named_with_hydras_plus(call_command):
    assert call_command(*DIGITS_SWEEP, "seed=0", "++output_dir=named").status == 0
    assert list_finished("named") == ["fedavg-uniform-seed=0"]
    assert not Path("outputs").exists()


def test_a_job_waits_for_what_another_process_begins_under_its_name(call_command, monkeypatch):
    """Until the other has loaded its data, its run is unknown. It could be the same one."""
    home, looks = Path("outputs/digits/fedavg-uniform-seed=0"), []
    elsewhere = lock(home)

    def begins(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            (home / "config.yaml").write_text("seed: 7\n")

    monkeypatch.setattr(contrafed_sweeper.time, "sleep", begins)
    done = call_command(*DIGITS_SWEEP, "seed=0")
    os.close(elsewhere)
    assert (done.status, looks, list_finished("outputs/digits")) == (
        0,
        [contrafed_sweeper.POLL_SECONDS] * 2,
        ["fedavg-uniform-seed=0-2"],
    )


def test_a_numbered_job_finds_its_folder_taken_by_a_process_that_has_not_claimed_it(call_command):
    some, held = ("-m", *QUICK_RUN, "strategy=fedavg", "seed=0,1"), []
    held.append(lock("named/0"))
    refused = call_command(*some, "output_dir=named")
    assert (refused.status, list_finished("named")) == (2, ["1"])
    assert "error: output_dir: another process writes in named/0. Fix: " in refused.err
    held.append(lock("dated/0"))
    sweeper, run = sweeper_in("dated"), check_overrides(*QUICK_RUN)
    assert sweeper._find_folder(Left(Job(0, [], "run", None, None), run, Path("dated"))) == Path("dated/0-2")
    assert claim_folder(Path("dated/0"), unique=True) == Path("dated/0-2")
    assert not Path("dated/0/config.yaml").exists()
    for handle in held:
        os.close(handle)


def test_parts_of_a_sweep_leave_a_table_of_all_that_is_finished(call_command):
    """The table is complete after the last part, in any order, and has no other runs of the folder."""
    plain = ("-m", *QUICK_RUN, "strategy=fedavg", "output_dir=plain")
    for line, home in ((DIGITS_SWEEP, "outputs/digits"), (plain, "plain")):
        for shard in ("shard=1/2", "shard=2/2"):
            done = call_command(*line, "seed=0,1", shard)
        assert done.status == 0
        assert f"of 2 runs are in {home}" in done.out
        assert call_command(*QUICK_RUN, "strategy=moon", f"output_dir={home}/moon").status == 0
    assert "of 2 runs" in call_command(*DIGITS_SWEEP, "seed=0,1", "shard=1/2").out
    (row,) = Path("outputs/digits/sweep.csv").read_text().splitlines()[1:]
    assert row.startswith("fedavg,2,")


def test_a_damaged_run_is_nobodys(tmp_path):
    for name, text in (("a", ""), ("b", "{"), ("c", yaml.safe_dump(config_of("seed=3")))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    assert [path.name for path in find_runs(tmp_path).values()] == ["c"]


def test_a_foreign_summary_ends_no_sweep(call_command):
    assert call_command(*DIGITS_SWEEP, "seed=0").status == 0
    summary = Path("outputs/digits/fedavg-uniform-seed=0/summary.json")
    for text, said in (('{"status": "finished"}', "1 of them finished already"), ("[]", "1 to run")):
        summary.write_text(text)
        done = call_command(*DIGITS_SWEEP, "seed=0,1", "shard=1/2")
        assert (done.status, said in done.out) == (0, True)
