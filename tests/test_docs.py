"""The documents say what the code does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import index_codecs, joint_codecs, sparsifiers, value_codecs
from hvd_deepreduce.exchange.settings import exchanges

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "dev"))


def test_configuration_is_up_to_date():
    from describe import DOC, page

    assert DOC.read_text() == page(), "docs/configuration.md is out of date: run python scripts/dev/describe.py"


def test_the_example_of_overrides_is_a_config():
    text = (ROOT / "docs" / "configuration.md").read_text()
    part = text.split("\n### Settings of single tensors\n")[1].split("\n### ")[0]
    example = yaml.safe_load("\n".join(line for line in part.splitlines() if line.startswith("    ")))
    config = Config.load(example)
    config.check_overrides(["a.bias", "embedding.weight", "head.weight", "b.weight"])
    assert config.variants["embedding.*"] == Config.load(density=0.001, value={"bits": 4}, scope=config.scope)


def test_every_setting_is_described():
    from describe import attributes

    for registry in (sparsifiers, index_codecs, value_codecs, joint_codecs, exchanges):
        for name, codec in registry.by_name.items():
            missing = set(codec.model_fields) - set(attributes(codec))
            assert not missing, f"{registry.kind} {name}: its docstring's Attributes do not describe {missing}"


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_codec_has_its_layout_in_the_container_page():
    text = (ROOT / "docs" / "container.md").read_text()
    for title, registry in (("Index", index_codecs), ("Value", value_codecs), ("Joint", joint_codecs)):
        part = text.split(f"\n## {title} codecs\n")[1].split("\n## ")[0]
        for name, codec in registry.by_name.items():
            heading = f"\n### {name} ({codec.id})\n"
            assert heading in part, f"docs/container.md has no {heading.strip()!r} under {title} codecs"
            assert len(part.split(heading)[1].split("\n### ")[0].strip()) > 40, f"{heading.strip()!r} says nothing"


def test_scripts_and_manifests_can_be_read():
    """A block of bash that bash cannot parse, or of YAML that is none, is of no use to copy."""
    count, fenced = 0, re.compile(r"^```(bash|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for language, block in fenced.findall(page.read_text("utf-8")):
            count += 1
            if language == "yaml":
                assert all(isinstance(one, dict) for one in yaml.safe_load_all(block)), f"{page.name}:\n{block}"
            else:
                done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
                assert done.returncode == 0, f"{page.name}: {done.stderr}"
    assert count > 5


@pytest.mark.thorough
def test_the_notebook_runs():
    """Its cells in order, but for the one that starts a job, which test_examples.py runs too."""
    import matplotlib

    matplotlib.use("Agg")
    cells = json.loads((ROOT / "examples" / "first_look.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, object] = {}
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if "torchrun" not in source:
            exec(source, names)
    assert names["data"].size < 0.005 * names["gradient"].nbytes


def test_presets_are_given_by_name():
    """A path into configs/ works only in a checkout's root."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    code = [path for folder in ("hvd_deepreduce", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")]
    for path in pages + code:
        found = re.findall(r"configs/[\w/]+\.ya?ml", path.read_text("utf-8"))
        assert not found, f"{path.relative_to(ROOT)} has {found}: write the preset's name"


def test_the_tests_of_the_promises_are_there():
    text = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"\b(?:tests|scripts|\.github)/[\w./]+\w", text)
    assert len(set(named)) > 10
    for path in named:
        assert (ROOT / path).exists(), f"docs/reliability.md names {path}, which is not there"


def test_the_tests_of_the_bounds_are_there():
    sections = re.findall(r"^## [^\n]*: the (?:lemmas|bounds|equations)\b.*?(?=^## )",
                          (ROOT / "docs" / "papers.md").read_text(), re.MULTILINE | re.DOTALL)  # fmt: skip
    assert len(sections) == 4
    for section in sections:
        rows = [line for line in section.splitlines() if line.startswith("|")][2:]
        assert len(rows) > 5
        for row in rows:
            named = row.strip("| ").rpartition(" | ")[2].split(", ")
            for path, _, function in (one.partition("::") for one in named):
                assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{function}"


def test_the_soak_explains_its_faults():
    from tests.soak.episodes import FAULTS

    rows = re.findall(r"^\| (\w[\w ]*) \| [^|]{8,} \|$", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)
    assert {fault.lower() for fault in FAULTS} <= {row.lower().removeprefix("no fault") or "none" for row in rows}
