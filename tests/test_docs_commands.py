"""The commands in the documents: quick ones are run, and of the others the program, its options and its target exist.

A command is a line of an indented block, or text between backquotes, that begins with a program of ``PROGRAMS``. What
``hvd-deepreduce`` is asked to do is done, on files with the names that the documents give. Examples are run by
test_examples.py under the same command. Scripts that train or measure take long: their ``--help`` must know the
options.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine.timeline import Trace
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tools import gradient_file, gradients
from hvd_deepreduce.tools.app import app
from tests import test_examples
from tests.ranks import ROOT
from tests.selection import thorough

PROGRAMS = ("make", "mpirun", "horovodrun", "torchrun", "python", "hvd-deepreduce", "scripts/", "tests/")
BEGIN = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)})(?![\w:])\S*(?: |$)")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LONG = {"advise": "tests/test_advise.py", "doctor": "tests/command/test_command.py"}
"""Subcommands that are not run again, with the tests that run them: their options are looked up."""
FOUND_WRONG = {"hvd-deepreduce configs mine.yaml"}
"""Commands that the documents show to fail: they end with 1."""


class Command(NamedTuple):
    """A command of a page, without the variables before it and the comment behind it."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def commands_of(page: str, text: str) -> list[Command]:
    """The commands of a document, in its order."""
    found = []
    for line in text.splitlines():
        block = re.match(r" {4,}(\S.*)", line)
        for candidate in [block[1]] if block else re.findall(r"`([^`]+)`", line):
            if BEGIN.match(candidate):
                words = shlex.split(re.sub(r" {2,}[A-Za-z].*", "", candidate), comments=True)
                while re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                found.append(Command(page, tuple(words)))
    return found


def every_command() -> list[Command]:
    return [one for page in PAGES for one in commands_of(page.name, page.read_text("utf-8"))]


COMMANDS = every_command()
OURS = sorted({one for one in COMMANDS if one.words[0] == "hvd-deepreduce" and len(one.words) > 1})


def script_of(command: Command) -> tuple[str, list[str]] | None:
    """The script that a command starts, and the arguments after it; None: it starts none."""
    words = list(command.words)
    if words[0] == "make":
        arguments = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        makefile = (ROOT / "Makefile").read_text("utf-8")
        recipe = re.search(rf"^{' '.join(words[1:2])}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        scripts = re.findall(r"(?:scripts|tests)/[\w/]+\.py", recipe[1]) if recipe else []
        return (scripts[0], shlex.split(arguments[0])) if scripts and arguments else None
    for number, word in enumerate(words):
        if re.fullmatch(r"(?:scripts|examples|tests)/[\w/.]+", word):
            return word, words[number + 1 :]
    return None


def options_by_script() -> dict[str, set[tuple[str, str]]]:
    """The options that the documents give to each Python script, each with its subcommand or ``""``."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for command in COMMANDS:
        script, arguments = script_of(command) or ("", [])
        if script.endswith(".py"):
            first = arguments[0] if arguments and re.fullmatch(r"[a-z]\w*", arguments[0]) else ""
            found[script] |= {(first, one.split("=")[0]) for one in arguments if one.startswith("--")}
    return {script: options for script, options in found.items() if options}


def test_the_parser():
    text = """
    make soak TOTAL_SECONDS=600                  # ten minutes
    A=b mpirun -np 2 python examples/x.py --to "a b"
    hvd-deepreduce: it says something
    making = 1
Take `make train ARGS="--job gpt"` or `hvd.allreduce`.
"""
    assert [one.words for one in commands_of("page", text)] == [
        ("make", "soak", "TOTAL_SECONDS=600"),
        ("mpirun", "-np", "2", "python", "examples/x.py", "--to", "a b"),
        ("make", "train", "ARGS=--job gpt"),
    ]
    assert script_of(commands_of("page", text)[2]) == ("scripts/train/compare.py", ["--job", "gpt"])
    assert len(COMMANDS) > 60 and len(OURS) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_command_names_is_there(page):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in commands_of(page.name, page.read_text("utf-8")):
        if command.words[0] == "make":
            for word in command.words[1:]:
                name, given, _ = word.partition("=")
                there = f"$({name})" in makefile if given else re.search(rf"^{name}:", makefile, re.MULTILINE)
                assert there, f"{command}: the Makefile has no {name}"
        script = script_of(command)
        if script is not None:
            assert (ROOT / script[0]).is_file(), f"{command}: there is no {script[0]}"


def test_examples_are_shown_with_the_commands_that_test_examples_runs():
    shown = 0
    for command in COMMANDS:
        script, _ = script_of(command) or ("", [])
        if script.startswith("examples/"):
            words = shlex.split(test_examples.shown(Path(script).name))
            tested = " ".join(word for word in words if not re.match(r"[A-Z_]+=", word))
            assert str(command) == tested, f"{command.page} has {command}, and {script} has {tested}"
            shown += 1
    assert shown > 8


@cache
def help_of(script: str, subcommand: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / script, *([subcommand] if subcommand else []), "--help"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, f"{script} {subcommand} --help: {done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(script, options, id=script, marks=() if script == "scripts/train/compare.py" else thorough)
        for script, options in sorted(options_by_script().items())
    ],
)
def test_scripts_know_their_options(script, options):
    for subcommand, option in sorted(options):
        known = re.findall(r"(?<![\w-])--[\w-]+", help_of(script, subcommand))
        assert option in known, f"a document gives {option} to {script} {subcommand}, whose --help does not have it"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the documents' commands read, small."""
    monkeypatch.chdir(tmp_path)
    vector = gradients.generated(20_000, 0)
    gradient_file.write(
        "gradients_step30.npz", {("gradient", 0): vector, ("accumulator", 0): vector}, ["weight"], [vector.size],
        {"shapes": [[100, 200]], "step": 30},
    )  # fmt: skip
    for name in ("gradients.npz", "gradients_step100.npz"):
        Path(name).write_bytes(Path("gradients_step30.npz").read_bytes())
    packed = Pipeline(Config.load("topk_rice_qsgd")).encode(vector, None, RngKey(0, 0, 0))
    Path("container.hvdr").write_bytes(np.asarray(packed).tobytes())
    Path("mine.yaml").write_text("{scope: model, bucket_bytes: 5000000}")
    for name in ("timeline.json", "timeline.json.deepreduce.0.json"):
        trace = Trace(tmp_path / name, 0)
        trace.add("encode", "bucket 0", 1.0, 2.0)
        trace.end()
    return tmp_path


@pytest.mark.parametrize("command", OURS, ids=str)
def test_the_command_does_what_the_documents_ask_for(command, files):
    arguments = [word.replace("/tmp/", f"{files}/") for word in command.words[1:]]
    if arguments[0] in LONG:
        text = CliRunner().invoke(app, [arguments[0], "--help"], terminal_width=200).output
        for option in (word for word in arguments if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{command}: no {option} in --help"
        return
    arguments = [one for word in arguments for one in (sorted(glob.glob(word)) if "*" in word else [word])]
    ended = CliRunner().invoke(app, arguments)
    expected = 1 if str(command) in FOUND_WRONG else 0
    assert ended.exit_code == expected, (command, ended.output, ended.exception)
    assert ended.output
