"""contrafed check: what it finds of authors' mistakes, its report, and its cheap part before a run."""

import re
import time

import pytest
import torch
from helpers import config_of, sized_workspace
from mistakes import MISTAKES, Mistake, write_mistake
from omegaconf import OmegaConf

from contrafed.check.command import check_run
from contrafed.config.compose import compose_job
from contrafed.config.run_config import resolve
from contrafed.runs.run import run
from contrafed.training.errors import translate_hint


@pytest.fixture
def author(on_path):
    """Return a function that writes a mistake and composes its run."""

    def compose(mistake, *more):
        overrides, line = write_mistake(on_path, mistake)
        return OmegaConf.to_container(compose_job([*overrides, *more], on_path / "yamls"), resolve=True), line

    return compose


def by_name(name):
    return next(mistake for mistake in MISTAKES if mistake.name.startswith(name))


TEACHER = """
    def init_client_state(self, received):
        return add_prefix("teacher", {name: 2 * value for name, value in self.workspace.initial.items()})

    def local_update(self, stack):
        teacher = add_prefix("teacher", stack.get_state("teacher"))
        self.train(stack, parts=("classifier",), loss_inputs=teacher)
        return self.make_upload(stack)

    def loss(self, params, batch, loss_inputs):
        features = self.forward(params, batch)
        teacher = {name.removeprefix("teacher/"): value for name, value in loss_inputs.items()}
        extra = self.forward(teacher, batch).logits.square().mean()  # HERE
        return {"loss": self.task_loss(features, batch), "extra": extra}
"""
FIRST = """
    def init_client_state(self, received):
        return {"width": torch.tensor(float(len(self.client_states)))}  # HERE
"""


@pytest.mark.parametrize(
    ("code", "check"), [(TEACHER, "a client trains"), (FIRST, "alone equals stacked")], ids=["images-repeat", "first-round"]
)
def test_mistakes_that_only_some_rounds_show_are_found(author, code, check):
    """Images repeat within a phase, and a stack also trains in its clients' first round."""
    found = {name: text for name, result, text in check_run(resolve(author(Mistake("", "client", "", True, code))[0]))}
    (said,) = [text for name, text in found.items() if check in name]
    assert "Fix: " in said


QUICK = (
    "a branch on a tensor",
    "a list of the module",
    "an in-place edit that",
    "padding as",
    "layers in",
    "a loss of the wrong",
)
PARAMETERS = [
    pytest.param(mistake, marks=[] if mistake.name.startswith(QUICK) else [pytest.mark.slow], id=mistake.name.replace(" ", "-"))
    for mistake in MISTAKES
]


@pytest.mark.parametrize("mistake", PARAMETERS)
def test_a_mistake_is_found_at_its_line(mistake, author):
    """Those that nothing finds are in docs/check.md too."""
    config, line = author(mistake)
    state = torch.get_rng_state()
    found = {name: text for name, result, text in check_run(resolve(config)) if result == "failed"}
    torch.set_rng_state(state)
    assert bool(found) == bool(mistake.check), found
    if mistake.check:
        said = [text for name, text in found.items() if mistake.check in name]
        assert said, found
        assert (line in said[0]) == mistake.line, (line, said)
        assert "Fix: " in said[0]


@pytest.mark.parametrize("code", ["return self.mean(model, replies)", "return replies.mean('model', replies.num_examples)"])
def test_a_right_strategy_passes(author, code):
    config, _ = author(Mistake("right", "strategy", "", False, code))
    assert {name: text for name, result, text in check_run(resolve(config)) if result != "ok"} == {}


def test_what_a_run_refuses_is_found_too(author, expect_error):
    body = "return self.mean(model, replies)\n\n    def eval_model(self, model):\n        return {'classifier': 0}"
    config, _ = author(Mistake("wrong", "strategy", "", False, body))
    failed = {name: text for name, result, text in check_run(resolve(config)) if result == "failed"}
    assert "eval_model" in failed["two rounds run with the strategy"]
    with expect_error("strategy.local.batch_size"):
        list(check_run(resolve(config_of("strategy=fedavg", "model=cnn_bn", "strategy.local.batch_size=1"))))


def test_check_may_stand_after_an_option(call_command, author, tmp_path):
    author(by_name("a branch"))
    done = call_command(f"--config-dir={tmp_path}/yamls", "check", "strategy=mine", "model=mlp", "model.hidden=[6]")
    assert (done.returncode, "checks in" in done.stdout) == (1, True)


def test_at_least_thirty_mistakes_are_written_down():
    assert len(MISTAKES) >= 30
    assert [mistake.name for mistake in MISTAKES if not mistake.check] == NOT_FOUND


NOT_FOUND = ["a term without a gradient"]


def test_the_command_prints_a_line_of_each_check(call_command, author, tmp_path):
    author(by_name("a branch"))
    done = call_command("check", f"--config-dir={tmp_path}/yamls", "strategy=mine", "model=mlp", "model.hidden=[6]")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    (failed,) = [line for line in lines if line.startswith("failed")]
    assert re.search(
        r"alone equals stacked in float64: clients as a stack raise .* \(author/client.py, line \d+\)\. Fix: ", failed
    )
    assert "skipped padding has no influence" in done.stdout.replace("  ", " ")
    assert lines[-1].startswith("16 checks in ")
    assert call_command("check", "strategy=moon", "model=mlp", "model.hidden=[6]").returncode == 0
    assert not list(tmp_path.glob("outputs"))


@pytest.mark.parametrize("arguments", [["-m"], ["--cfg", "job"], ["strategy=nothing"], ["lr=1"]])
def test_a_wrong_line_is_one_line_of_status_2(arguments, call_command):
    done = call_command("check", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "mistake", ["torch's global", "an attribute", "a change of what", "an in-place activation", "a generator"]
)
def test_the_cheap_part_runs_before_a_run(mistake, author, tmp_path, expect_error):
    config, line = author(by_name(mistake), "engine=local", f"output_dir={tmp_path}/run")
    with expect_error("strategy"):
        run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mistake", ["torch's global", "an attribute", "a change of what", "an in-place activation"])
def test_a_slow_machine_refuses_the_same(mistake, author, monkeypatch, expect_error):
    monkeypatch.setattr("contrafed.check.before_run.MAX_SECONDS", 0)
    with expect_error("strategy"):
        run(author(by_name(mistake), "engine=local")[0])


def test_a_run_prints_a_line_about_a_check_that_would_take_long(author, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("contrafed.check.before_run.MAX_SECONDS", 0)
    config, _ = author(by_name("a generator"), "engine=local", "num_rounds=1", f"output_dir={tmp_path}/run")
    run(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "contrafed check" in line]
    assert "two calls give the same output" in line


def test_the_cheap_part_takes_less_than_a_second(author):
    from contrafed.check.before_run import check_before_run, is_own
    from contrafed.data.federation import load_federation
    from contrafed.training.workspace import make_model

    wanted = resolve(author(by_name("a loss of the wrong sign"))[0])
    federation = load_federation(wanted.client)
    model = make_model(wanted.client, federation)
    began = time.process_time()
    assert is_own(wanted)
    check_before_run(wanted, federation, model)
    assert time.process_time() - began < 1


def test_methods_of_the_project_are_not_tried_before_a_run(monkeypatch):
    from contrafed.check import before_run

    assert not before_run.is_own(resolve(config_of("strategy=moon", "model=mlp")))


def edit_saved(w):
    e = w.exp()
    out = e.square().sum()
    e.add_(1)
    out.backward()


def go_back_twice(w):
    total = (w * w).sum()
    total.backward()
    total.backward()


@pytest.mark.parametrize(
    ("mistake", "fix"), [(edit_saved, "x = x + 1"), (lambda w: w.mul_(2), "clone"), (go_back_twice, "detach")]
)
def test_torchs_hints_are_in_plain_words(mistake, fix):
    with pytest.raises(RuntimeError) as found:
        mistake(torch.ones(3, requires_grad=True))
    assert fix in translate_hint(found.value)
    assert "retain_graph" not in translate_hint(found.value)


def test_stacks_and_batches_print_shapes():
    workspace, shown = sized_workspace("fedavg", [5, 4]), []

    class Printing(workspace.client_class):
        def local_update(self, stack):
            shown.append(repr(stack))
            return super().local_update(stack)

        def loss(self, params, batch, loss_inputs):
            shown.append(repr(batch))
            return super().loss(params, batch, loss_inputs)

    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    Printing(workspace, [0, 1]).update([received] * 2, 1)
    assert shown[0].startswith(
        "ClientStack(clients=[0, 1], examples=[5, 4], round=1, step=0)\n  params: encoder.stages.0.1.weight (2,"
    )
    assert re.fullmatch(r"Batch\(x \(5, 1, 8, 8\), y \(5,\), mask \(5,\)\)", shown[1]), shown[1]


def test_data_that_only_devices_have_are_refused(expect_error):
    own = ("partition=own", "dataset=own", "dataset.height=8", "dataset.width=8", "dataset.num_classes=4")
    with expect_error("partition"):
        list(check_run(resolve(config_of("strategy=fedavg", "model=mlp", "engine=local", *own))))
