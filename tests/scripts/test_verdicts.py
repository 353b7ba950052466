"""The comparison with the papers: its verdicts are those of the results, and of nothing else."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import verdicts
from verdicts import CLAIMS, DOCS, Results, written

PAGE = DOCS / "papers.md"
JUDGED = [claim for rows in CLAIMS.values() for row in rows for claim in row.get("claims", ())]
KEYS = {"says", "ours", "each", "near", "within", "most", "least", "form", "beside", "seeds", "open"}


def test_the_page_has_the_verdicts_of_the_results():
    text = PAGE.read_text()
    assert written(text, Results()) == text, "docs/papers.md is out of date: run python scripts/papers/verdicts.py"


@pytest.mark.parametrize("claim", JUDGED, ids=lambda claim: claim["says"][:40])
def test_a_claim_is_judged_in_one_way(claim):
    """A bound whose name is misspelled would let everything pass."""
    assert set(claim) <= KEYS
    assert sum((("near" in claim), bool({"most", "least"} & set(claim)), ("open" in claim))) == 1


def test_every_number_is_read(monkeypatch):
    """Other results give other numbers, in each claim, and each of its parts."""
    rng = np.random.default_rng(0)

    def shifted(data):
        if isinstance(data, dict):
            return {key: shifted(value) for key, value in data.items()}
        if isinstance(data, list):
            return [shifted(value) for value in data]
        return data * rng.uniform(1.1, 2) if isinstance(data, int | float) else data

    class Shifted(Results):
        def read(self, data):
            return shifted(data)

    def values(results):
        read = []
        for claim in JUDGED:
            beside = [expression for expression, _ in claim.get("beside", {}).values()]
            expressions = [claim.get("ours"), claim.get("seeds"), *beside]
            for expression in filter(None, expressions):
                try:
                    read.append([results.value(expression, x) for x in claim.get("each", [None])])
                except verdicts.Open:
                    read.append(None)
        return read

    before, true = values(Results()), verdicts.cell

    def other_cell(*given, **more):
        return true(*given, **more) * rng.uniform(1.1, 2)

    monkeypatch.setattr(verdicts, "cell", other_cell)
    monkeypatch.setitem(verdicts.FUNCTIONS, "cell", other_cell)
    for one, other in zip(before, values(Shifted()), strict=True):
        assert one is None or not np.isclose(np.array(one, float), np.array(other, float), rtol=1e-6).any(), one
    assert len(before) > 60 and before.count(None) < 6


def test_another_result_gives_another_verdict(tmp_path):
    for name in ("results/figures", "results/arena"):
        shutil.copytree(DOCS / name, tmp_path / name)
    for name in ("densestream.md", "results/benchmarks.md"):
        shutil.copy(DOCS / name, tmp_path / name)
    text, path = PAGE.read_text(), tmp_path / "results" / "figures" / "deepreduce_6.json"
    assert written(text, Results(tmp_path)) == text
    made = json.loads(path.read_text())
    made["data"]["crossing"] = 0.0041
    path.write_text(json.dumps(made))
    (old,), (new,) = (
        set(one.splitlines()) - set(other.splitlines())
        for ways in [(text, written(text, Results(tmp_path)))]
        for one, other in (ways, ways[::-1])
    )
    assert "**No**: 0.00676 (published 0.004 ± 10%)" in old and "Yes: 0.0041 (published 0.004 ± 10%)" in new


def test_a_verdict_that_one_seed_decides_is_none(tmp_path):
    def verdict(*accuracies):
        runs = [{"accuracy": [0.1, one], "parameters": 5} for one in accuracies]
        (tmp_path / "results" / "figures" / "some.json").write_text(json.dumps({"data": {"one": runs}}))
        return Results(tmp_path).verdict({"says": "It ends at 90%", "ours": 'accuracy(some["one"])', "least": 90})

    (tmp_path / "results" / "figures").mkdir(parents=True)
    assert verdict(0.91, 0.92, 0.93) == "Yes: 92 (at least 90)"
    assert verdict(0.86, 0.87, 0.88) == "**No**: 87 (at least 90)"
    assert verdict(0.88, 0.91, 0.92) == "**Not decided**: 90.3 (at least 90; otherwise without one of the seeds)"
    assert verdict(0.91, 0.92, 0.88) == "**Not decided**: 90.3 (at least 90; otherwise without one of the seeds)"
    assert verdict(0.89) == "**No**: 89 (at least 90)"


def test_a_row_of_the_arena_takes_its_verdict():
    def campaign(accuracy):
        early = {"loss": 0.1, "accuracy": accuracy}
        line = {"loss": 0.1, "accuracy": 0.98, "share": 0.02, "volume": 0.01, "early": early}
        return SimpleNamespace(runs=[line] * 5, at_edge=())

    results, given = Results(), ("deepreduce-resnet", "DeepReduce, Figure 7: P2 converges faster")
    results.arena = {"deepreduce-resnet": {"Top-r": campaign(0.97)}}
    assert [verdict for _, verdict in results.of_the_arena(*given)] == ["open: being trained again to convergence"]
    results.arena["deepreduce-resnet"]["BF-P2"] = campaign(0.96)
    ((words, verdict),) = results.of_the_arena(*given)
    assert words == "BF-P2: P2 converges faster than Top-r" and verdict.startswith("**No.**") and "+1.00" in verdict
