"""Read a documented command with its program's own parser, without running it."""

import argparse
import importlib
import re
import runpy
import shlex
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
from omegaconf import OmegaConf

from contrafed.config.command_line import check_arguments, read_arguments
from contrafed.config.compose import compose_job, expand_jobs
from contrafed.config.run_config import resolve
from contrafed.core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
# Programs of others, which have no parser to ask. Their files and extras are looked up.
OTHERS = {
    ".", ".ci/mypy", ".ci/run", ".release/bin/pip", ".release/bin/python", ".release/bin/twine", "apt-get", "cd",
    "chmod", "cp", "diff", "docker", "env", "export", "git", "grep", "head", "install", "journalctl", "jupyter", "ls",
    "mkdir", "mkdocs", "mv", "nginx", "nvidia-smi", "peers/bin/pip", "pip", "pip-audit", "pytest", "python3", "python3.12",
    "ruff", "sbatch", "systemctl", "touch", "umask",
}  # fmt: skip
GLUE = {"&&", "||", "|", "(", ")", ";", "&", "<("}
# A file of the reader, whose name alone is checked: another file takes its place.
READER_FILE = re.compile(r"^((?:\w+\.)*(?:path|pretrained))=.*")
# A path of the repository, as opposed to one of the reader's.
OWN_PATH = re.compile(r"(?:benchmarks|docs|notebooks|results|tests|\.ci|\.github)/[\w./-]+$")


class Read(Exception):
    """The arguments are valid."""


def check_command(command):
    """Read each program's arguments in a shell command. Raises an error for a wrong option, key, value, file or program."""
    if shown := re.search(r'(.*) 2>&1 \| grep "([^"]+)"$', command):  # a mistake, and the message that the page explains
        with pytest.raises(UserError, match=re.escape(shown[2])):
            check_command(shown[1])
        return
    for words in split_command(command):
        check_program(words)


def split_command(command):
    """Yield the words of each program in a shell command, without redirections and variables."""
    plain = re.sub(r"\d?>&\d|\d?[<>]+(?!\()\s*[^\s()]+", "", command)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    words = []
    for word in [*lexer, ";"]:
        if word in GLUE:
            while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
                del words[0]
            if words:
                yield words
            words = []
        else:
            words.append(word)


def check_program(words):
    program, arguments = words[0], words[1:]
    for word in words:
        assert not OWN_PATH.match(word) or (ROOT / word).exists(), f"{word}: no such file"
    if program in ("python", "python3", "python3.12", ".release/bin/python") and arguments:
        check_python(arguments)
    elif program == "contrafed":
        check_ours(tuple(arguments))
    elif program == "flwr":
        from flwr.cli.app import app
        from typer.main import get_command

        read_click(get_command(app), arguments)
        for overrides in (found[1] for word in arguments if (found := re.search(r'overrides="([^"]*)"', word))):
            check_ours(tuple(overrides.split()))
    elif program == "ray":
        from ray.scripts.scripts import cli

        read_click(cli, arguments)
    elif program in ("contrafed-report", "flower-superexec", "flower-superlink", "flower-supernode"):
        (found,) = entry_points(group="console_scripts", name=program)
        read_argparse(found.load(), program, arguments)
    else:
        assert program in OTHERS, f"{program}: a program that no parser reads. Fix: add its parser or its name"
    if program == "sbatch":
        check_ours(("-m", *(word for word in arguments if "=" in word and not word.startswith("--"))))
    if "install" in words and (extras := re.search(r"\.\[([\w,]+)\]", " ".join(words))):
        offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(extras[1].split(",")) <= offered.keys(), extras[1]


def check_python(words):
    """Read ``python FILE ...``, ``python -m MODULE ...`` or ``python -c CODE``."""
    if words[0] == "-c":
        compile(words[1], "<documented>", "exec")
    elif words[0] == "-m":
        if words[1].startswith("contrafed"):
            read_argparse(importlib.import_module(words[1]).main, words[1], words[2:])
            if words[1].endswith("leakage"):
                check_ours(tuple(word for word in words[2:] if re.match(r"[a-z.]+=", word)))
    elif words[0] == "main.py":
        check_ours(tuple(words[1:]))
    elif words[0] == "report.py":
        check_program(["contrafed-report", *words[1:]])
    elif (path := ROOT / words[0]).exists():
        text = path.read_text(encoding="utf-8")
        if "parse_args" in text:
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(str(path.parent))
                read_argparse(runpy.run_path(str(path), run_name="documented")["main"], words[0], words[1:])
        else:  # a word of its table of parts
            assert all(f'"{word}"' in text for word in words[1:]), words
    # Otherwise a script of the page, which its own test runs.


@cache
def check_ours(arguments):
    """Compose and check the jobs of a command, a tuple of words."""
    arguments = arguments[1:] if arguments[:1] == ("check",) else arguments
    asked = read_arguments([READER_FILE.sub(rf"\1={ROOT / 'README.md'}", word) for word in arguments])
    if "participation=trace" in asked.overrides:  # the file is read here
        return
    if asked.config_dir is not None or asked.help:  # a folder of the reader, which the page's own test runs
        return
    if "hydra/sweeper=optuna" in asked.overrides:  # which draws the values: its own settings are composed
        check_arguments(asked)
        return
    every, seen = [job.overrides for job in expand_jobs(asked.overrides)] if asked.multirun else [asked.overrides], set()
    for job in every if len(every) <= 6 else (every[0], every[-1]):  # other tests cover a paper's whole grid
        if seen.issuperset(job):  # every value of a sweep once, not every combination
            continue
        seen.update(job)
        config = OmegaConf.to_container(compose_job(job), resolve=True)
        if not config["evaluate_only"]:  # which needs a run's folder
            resolve(config)


def read_argparse(main, program, arguments):
    """Call a program's ``main`` until its parser has read the arguments."""

    def read(parser, args=None, namespace=None):
        found, others = parser.parse_known_args(args, namespace)
        assert not others, f"{program}: unknown arguments {others}"
        raise Read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", read)
        patch.setattr(sys, "argv", [program, *arguments])
        patch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
        try:
            main()
        except Read:
            return
        except SystemExit as error:
            raise AssertionError(f"{program} refuses {arguments}") from error
    raise AssertionError(f"{program}: its arguments were not read")


def read_click(command, arguments):
    """Read the arguments of a click program, and of its command below. A name alone is a mention, without its arguments."""
    context, arguments = None, ["1" if re.fullmatch("[A-Z]+_ID", word) else word for word in arguments]
    while True:
        try:
            context = command.make_context(command.name, list(arguments), parent=context)
        except click.MissingParameter:
            assert not arguments, arguments
            return
        if not isinstance(command, click.Group) or not (rest := [*context._protected_args, *context.args]):
            return
        _, command, arguments = command.resolve_command(context, rest)
        assert command is not None, rest
