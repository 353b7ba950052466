"""What setup.cfg, the continuous-integration files and the documents say about the project."""

from __future__ import annotations

import ast
import configparser
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import hvd_deepreduce

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSION = hvd_deepreduce.__version__


def setup_cfg() -> configparser.ConfigParser:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings


def lines(value: str) -> list[str]:
    return [line for line in value.splitlines() if line]


def stating_files() -> list[Path]:
    """The text files in which a version would be stated. The changelog is history, constraints.txt is about others.
    Bytecode has other suffixes while Python writes it, as it may now in another process."""
    found = [path for path in ROOT.iterdir() if path.suffix in (".py", ".cfg", ".toml", ".md", ".in", ".yaml")]
    found += [ROOT / "Makefile", *(ROOT / "scripts").rglob("*.*"), *WORKFLOWS]
    for folder in ("hvd_deepreduce", "kernels", "configs", "docs", "examples"):
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix not in (".so", ".png")]
    texts = [path for path in found if path.name != "CHANGELOG.md" and path.parent.name != "__pycache__"]
    return [path for path in texts if path.is_file()]


def test_one_file_states_the_version():
    assert setup_cfg()["metadata"]["version"] == "attr: hvd_deepreduce.__version__"
    stated = re.compile(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.])")
    assert [path for path in stating_files() if stated.search(path.read_text("utf-8"))] == [
        ROOT / "hvd_deepreduce" / "__init__.py"
    ]


def test_the_version_can_be_read_without_an_import():
    """setuptools takes it from the syntax tree: it must be a plain string."""
    tree = ast.parse((ROOT / "hvd_deepreduce" / "__init__.py").read_text("utf-8"))
    found = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"
    ]
    assert found == [VERSION]


def test_every_package_is_listed():
    listed = set(lines(setup_cfg()["options"]["packages"]))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "hvd_deepreduce").rglob("*.py")}
    packages = {".".join(folder.parts) for folder in folders}
    assert listed == packages | {"hvd_deepreduce.kernels", "hvd_deepreduce.configs"}, "update `packages` in setup.cfg"


def test_every_kernel_source_is_package_data():
    patterns = lines(setup_cfg()["options.package_data"]["hvd_deepreduce.kernels"])
    matched = {path for pattern in patterns for path in (ROOT / "kernels").glob(pattern)}
    assert matched == {path for path in (ROOT / "kernels").rglob("*") if path.is_file()}


def test_the_image_is_made_as_set_up_makes_the_environment():
    """hadolint has nothing against it; here: it copies what is there, runs a script that is there, and has env.sh's
    variables."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert "RUN scripts/dev/setup.sh" in text and (ROOT / "scripts" / "dev" / "setup.sh").is_file()
    variables = (ROOT / "scripts" / "dev" / "env.sh").read_text("utf-8")
    listed = re.search(r'^hvd_env="(.*?)"$', variables, re.MULTILINE | re.DOTALL)
    assert listed
    folder = re.search(r"^WORKDIR (\S+)$", text, re.MULTILINE)
    assert folder
    for variable in listed[1].replace("$hvd_root", folder[1]).splitlines():
        assert re.search(rf"\b{re.escape(variable)}(?: \\)?$", text, re.MULTILINE), f"the image does not set {variable}"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_exists(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["jobs"] and workflow[True], "YAML reads the key `on` as true"
    commands = []
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["steps"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            commands += [step.get("run", ""), *map(str, step.get("env", {}).values())]
    targets = re.findall(r"\bmake ([a-z-]+)", "\n".join(commands))
    assert targets and set(targets) <= make_targets(), f"no such target: {set(targets) - make_targets()}"
    for script in re.findall(r"\b(?:tests|scripts)/[\w/]+\.\w+", "\n".join(commands)):
        assert (ROOT / script).is_file(), script


def test_the_parts_of_the_workflow_and_of_make_test_all_run_every_test_once():
    """Whatever markers a test has, one part selects it."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    parts = [part["select"] for part in jobs["test"]["strategy"]["matrix"]["include"]]
    recipes = re.search(r"^test: .*?^test-fast", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert recipes
    targets = [quoted or word for quoted, word in re.findall(r" -m (?:'(.*?)'|([a-z]+) \$)", recipes[0])]
    assert len(parts) == 4 and len(targets) == 3
    markers = [line.split(":")[0] for line in lines(setup_cfg()["tool:pytest"]["markers"])]
    for values in itertools.product((False, True), repeat=len(markers)):
        marked = dict(zip(markers, values, strict=True))
        for selections in (parts, targets):
            assert sum(bool(eval(one, {}, marked)) for one in selections) == 1, (marked, selections)


def test_the_workflow_tries_the_claimed_python_versions():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    classifiers = lines(setup_cfg()["metadata"]["classifiers"])
    claimed = [found[1] for line in classifiers if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", line))]
    assert jobs["pythons"]["strategy"]["matrix"]["python"] == claimed


def test_the_contributing_page_names_targets_that_exist():
    named = set(re.findall(r"(?:    |`)make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    assert {"setup", "lint", "test", "test-all", "test-fast", "sanitize", "fuzz"} <= named <= make_targets()


def test_commit_hooks_fetch_nothing():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert shutil.which(hook["entry"].split()[0]), f"{hook['id']} needs {hook['entry'].split()[0]}"


def test_the_changelog_has_a_place_for_changes():
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_license_is_the_one_that_is_declared():
    metadata = setup_cfg()["metadata"]
    assert metadata["license_expression"] == "Apache-2.0" and metadata["license_files"] == "LICENSE"
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License\n                           Version 2.0" in text and "The hvd_deepreduce authors" in text


def test_make_clean_removes_the_library(tmp_path):
    """In a copy of the Makefile's tree: the target is run, not read."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    library = tmp_path / "hvd_deepreduce" / "_cpu.so"
    for path in (library, tmp_path / "build" / "objects" / "a.o", tmp_path / "kernels" / "a" / "a.cpp"):
        path.parent.mkdir(parents=True)
        path.touch()
    subprocess.run(["make", "-s", "clean"], cwd=tmp_path, check=True)
    assert not library.exists() and not (tmp_path / "build").exists()
    assert (tmp_path / "kernels" / "a" / "a.cpp").exists()


def test_the_environment_of_a_checkout_behind_a_link_is_that_of_the_checkout(tmp_path):
    """As Python names it: set-up would take .venv for one that was moved."""
    (tmp_path / "link").symlink_to(ROOT)
    script = 'unset OPAL_PREFIX; . "$0"; echo "$OPAL_PREFIX"'
    command = ["bash", "-c", script, tmp_path / "link" / "scripts" / "dev" / "env.sh"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT.resolve() / ".venv")
