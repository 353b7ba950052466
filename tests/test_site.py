"""The site of the documents: what its first page and its other pages link to, and that a broken link is an error."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.ranks import ROOT

NEEDED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile", "LICENSE", "mkdocs.yml")
FOLDERS = ("docs", "examples", "scripts")


def build(folder):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder / "site"],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_site(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: run make setup")
    for name in NEEDED + FOLDERS:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    for part in ("Will it help me?", 'src="results/figures/accuracy.png"', 'href="files/examples.html"'):
        assert part in first
    assert "15,608 bytes" in (tmp_path / "site" / "files" / "examples" / "first_look.ipynb.html").read_text()
    example = (tmp_path / "site" / "files" / "examples" / "numpy_codec.py.html").read_text()
    assert "python examples/numpy_codec.py" in re.sub(r"<[^>]*>", "", example)
    page, text = tmp_path / "docs" / "limits.md", (ROOT / "docs" / "limits.md").read_text()
    for broken in ("missing.md", "../missing.py", "using.md#missing", "results/figures/missing.png"):
        page.write_text(f"{text}\n[a link]({broken})\n")
        done = build(tmp_path)
        assert done.returncode == 1 and broken.split("#")[-1] in done.stderr, (broken, done.stderr)
    page.write_text(text)
    (tmp_path / "docs" / "another.md").write_text("# In no list\n")
    done = build(tmp_path)
    assert done.returncode == 1 and "another.md" in done.stderr, done.stderr
