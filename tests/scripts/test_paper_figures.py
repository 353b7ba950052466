"""The list of figures: its files are there, each figure is made of a tiny input, and the pages show what was made."""

from __future__ import annotations

import json
import re

import figure_kit
import figures
import figures_training
import numpy as np
import pytest
from arena import done
from contests import CONTESTS
from figures import DOCS, SCRIPTS, every, own, tables
from networks import NETWORKS
from torch import nn

from hvd_deepreduce import Config
from tests.ranks import ROOT

PROGRAM = "scripts/papers/figures.py"
OWN = {figure.name: figure for figure in own()}


def small(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))


def test_the_list_names_what_is_there():
    names = [one.name for one in every()]
    assert len(set(names)) == len(names)
    for script in SCRIPTS:
        assert (ROOT / "scripts" / script.command[0]).exists(), script.command
        text = (DOCS / script.page).read_text()
        assert text.count(f"<!-- begin {script.section} -->") == 1, f"{script.page} has no section {script.section}"
        if script.drawn:
            assert script.png.exists() and f"figures/{script.png.name})" in text, script.name


def test_the_pictures_of_the_documents_are_those_of_the_list():
    listed = {one.png.name for one in every() if getattr(one, "drawn", True)}
    trained = {name: done(name) for name in CONTESTS}
    drawn = {name: one for name, one in trained.items() if not CONTESTS[name].repeats}
    listed |= {f"arena_{name}.png" for name, one in drawn.items() if CONTESTS[name].reference in one and len(one) > 1}
    assert {path.name for path in figure_kit.FOLDER.glob("*.png")} == listed
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        shown = set(re.findall(r"figures/([\w-]+\.png)", page.read_text()))
        assert shown <= listed, f"{page.name} shows {shown - listed}, which no script of the list makes"


@pytest.mark.parametrize("one", list(every()), ids=lambda one: one.name)
def test_the_json_says_when_and_where_it_was_made(one):
    made = json.loads(one.json.read_text())
    assert made["figure"] == one.name and made["papers"] == list(one.papers) and made["data"]
    assert made["date"] is None or re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert one.json.stat().st_size < 200_000
    if one.name in OWN:
        machine = made["machine"]
        assert machine["cores"] >= 1 and machine["cpu"] and "/" not in machine["cpu"]
        # An hour is what the page says; the seconds are those of a machine that did other work, too.
        assert one.minutes <= 60 and made["seconds"] < 3 * 60 * one.minutes
    else:
        assert made["source"] == f"docs/{one.page}, section {one.section}"
        text = (DOCS / one.page).read_text()
        section = text.split(f"<!-- begin {one.section} -->")[1].split(f"<!-- end {one.section} -->")[0]
        assert made["data"] == tables(section), f"{one.json.name} is old: python {PROGRAM} --draw {one.name}"


@pytest.mark.parametrize("name", OWN)
def test_the_page_shows_what_was_made(name):
    figure, text = OWN[name], figures.PAGE.read_text()
    section = text.split(f"<!-- begin {name} -->\n")[1].split(f"\n<!-- end {name} -->")[0].strip()
    expected = f"## {figure.title}\n\n{figure.section(json.loads(figure.json.read_text()))}"
    assert section == expected, f"docs/results/figures.md is old: python {PROGRAM} --draw {name}"
    assert figure.png.stat().st_size > 5_000


@pytest.mark.parametrize("name", OWN)
def test_a_figure_of_a_tiny_input(name, tmp_path, monkeypatch):
    for network in ("resnet50", "vgg16"):
        monkeypatch.setitem(NETWORKS, network, small)
    monkeypatch.setattr(figures_training, "FPRS", (0.001, 0.1))
    monkeypatch.setattr(figure_kit, "FOLDER", tmp_path)
    figure = OWN[name]
    figure_kit.dump(figure.json, figure.make(tiny=True))
    made = json.loads(figure.json.read_text())
    figure.save(made)
    assert figure.png.parent == tmp_path and figure.png.stat().st_size > 5_000
    said = figure.section(made)
    assert f"![{figure.title}](figures/{name}.png)" in said and made["date"] in said and made["machine"]["cpu"] in said
    assert "nan" not in said


def test_what_is_sent_is_counted_by_layer():
    """Of weights of 4 and 6 elements, with biases between: the largest 3 of the whole model, of either rank."""
    ranks = figures_training.Placed(Config.load("topk_raw", density=0.25, scope="model"), 2, [4, 1, 6, 1])
    first, second = (np.full(12, 0.01, np.float32) for _ in range(2))
    first[[0, 1, 5]], second[[0, 6, 11]] = 1, 2
    ranks.mean([first, second])
    assert [one.tolist() for one in ranks.layers] == [[2, 0, 2, 1]]
    assert [figures_training.depth(kept) for kept in ([1, 0, 0], [0.2, 0, 0.2], [0, 0.5, 0.5])] == [0, 0.5, 0.75]


def test_only_what_is_asked_for_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure_kit, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "PAGE", tmp_path / "figures.md")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figure_kit.dump(OWN["deepreduce_5"].json, OWN["deepreduce_5"].make(tiny=True))
    figures.main(["deepreduce_5", "deepreduce_6"], draw=True, listed=False, processes=1)
    assert (tmp_path / "deepreduce_5.png").exists() and not (tmp_path / "deepreduce_6.png").exists()
    assert "there is no deepreduce_6.json yet" in capsys.readouterr().out
    assert (tmp_path / "figures.md").read_text().count("<!-- begin") == 1
    with pytest.raises(figures.typer.BadParameter, match="no figure is named deepreduce_1; the names are: deepreduce"):
        figures.main(["deepreduce_1"], draw=False, listed=False, processes=1)


def test_numbers_are_written_with_five_digits_and_lists_on_one_line(tmp_path):
    figure_kit.dump(tmp_path / "a.json", {"a": [1.23456789, 2], "b": {"c": 1e-9 / 3}})
    assert (tmp_path / "a.json").read_text() == '{\n "a": [ 1.2346, 2 ],\n "b": {\n  "c": 3.3333e-10\n }\n}\n'


def test_tables_of_a_section():
    section = "## One\n\nwith | a bar\n\n| a | a |\n| --- | ---: |\n| 1 | 2 |\n\n### Two\n\n| b |\n| --- |\n| 3 |\n"
    assert tables(section) == [
        {"heading": "One", "head": ["a", "a"], "rows": [["1", "2"]]},
        {"heading": "Two", "head": ["b"], "rows": [["3"]]},
    ]


def test_links_to_sections_lead_to_headings():
    def anchors(path):
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for name in ("papers.md", "results/figures.md"):
        for target, anchor in re.findall(r"\]\(([\w/.]*)#([\w-]+)\)", (DOCS / name).read_text()):
            page = DOCS / name
            assert anchor in anchors(page.parent / target if target else page), f"{name} links to {target}#{anchor}"
