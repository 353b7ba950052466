"""The arena: the search and its edges, campaigns that continue, the schemes beside obvious versions, and the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partialmethod

import arena
import gpt_job
import muon
import numpy as np
import page
import pytest
import scipy.fft
import torch
from contests import CONTESTS, Claim, Contest, Method, density_of, once_more, put
from schemes import SCHEMES, Containers, DeMo, OneBitMomentum, PowerSGD
from trainer import _updates, train
from tuning import Choice, Scale, search

from hvd_deepreduce.tools.measuring import entropy_bits
from tests.ranks import ROOT

SHAPES = [(6, 4), (5,), (8, 8)]
NUMEL = 24 + 5 + 64


def searched(knobs, trials, loss):
    """The end of a search whose losses a function gives, and all settings that it asked for."""
    steps, asked, answer = search(knobs, trials), [], None
    try:
        while True:
            wanted = steps.send(answer)
            asked += wanted
            answer = [loss(**one) for one in wanted]
    except StopIteration as end:
        return end.value, asked


def gradients(seed: int, workers: int = 3) -> torch.Tensor:
    return torch.randn(workers, NUMEL, generator=torch.Generator().manual_seed(seed))


def test_a_search_finds_the_least_loss_of_the_grid_and_asks_nothing_twice():
    knobs = {"lr": Scale(1.0, 2.0), "decay": Choice((0.0, 0.1, 0.5), 0.1, (True, False))}
    found, asked = searched(knobs, 40, lambda lr, decay: abs(math.log2(lr / 16)) + decay)
    assert (found.settings, found.loss, found.at_edge) == ({"lr": 16.0, "decay": 0.0}, 0.0, ())
    assert found.trials == len(asked) == len({tuple(one.values()) for one in asked})


@pytest.mark.parametrize(
    ("knob", "trials", "edge"),
    [
        (Scale(1.0, 2.0), 4, True),  # the trials are used up
        (Scale(1.0, 2.0, most=4.0), 40, False),  # the method's own limit
        (Choice((1, 2, 4), 1), 40, True),
        (Choice((1, 2, 4), 1, (True, True)), 40, False),
    ],
)
def test_an_optimum_at_the_edge_of_the_grid_is_found_out(knob, trials, edge):
    found, _ = searched({"lr": knob}, trials, lambda lr: -lr)
    assert bool(found.at_edge) == edge


def test_a_training_that_diverges_is_never_the_best():
    found, _ = searched({"lr": Scale(1.0, 2.0)}, 10, lambda lr: math.nan if lr > 1 else -lr)
    assert found.settings == {"lr": 1.0}


CONTEST = Contest(
    "A short contest", "gpt", 2, 8, 4, 5,
    {
        "dense": Method("dense", {"optimizer": "adamw", "scheme": "dense"}, {"lr": Scale(0.1, 2.0)}),
        "few": Method("**few**", {"optimizer": "sign", "scheme": "x"}, {"lr": Scale(0.1, 2.0)}, 0.01, "with.k"),
    },
    (Claim("few", "dense", 0.05, 0.02),), seeds=(0, 1),
)  # fmt: skip


def fake(job, settings, workers, steps, seed):
    """The best learning rate is 0.4 for short trainings and 0.2 for others."""
    best = 0.4 if steps == 4 else 0.2
    gap = 0.03 if settings["scheme"] == "x" else 0.0
    return {"loss": abs(math.log2(settings["lr"] / best)) + gap + seed / 100, "share": 1 - 0.99 * (gap > 0),
            "seconds": 1.0}  # fmt: skip


class SameProcess:
    """In place of a pool of processes."""

    def __init__(self, processes):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, call, one):
        future = arena.Future()
        future.set_result({**one._asdict(), **fake(*one[:1], one.settings, one.workers, one.steps, one.seed)})
        return future


@pytest.fixture
def short(tmp_path, monkeypatch):
    monkeypatch.setitem(CONTESTS, "short", CONTEST)
    monkeypatch.setattr(arena, "FOLDER", tmp_path)
    monkeypatch.setattr(arena, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(page, "PAGE", tmp_path / "arena.md")
    monkeypatch.setattr(page.figure_kit, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(page, "OVERVIEW", tmp_path / "which_preset.md")
    return tmp_path


def test_a_campaign_continues_where_it_stopped_and_trains_the_best_settings_with_the_seeds_of_the_report(short):
    arena.run_all(["short"], 2, math.inf)
    text = (short / "short.jsonl").read_text().splitlines()
    assert len(text) == len(set(text))
    (short / "short.jsonl").write_text("\n".join(text[:-5]) + "\n")
    arena.run_all(["short"], 2, math.inf)
    arena.prune(["short"])
    assert sorted((short / "short.jsonl").read_text().splitlines()) == sorted(text)
    for method, one in arena.done("short").items():
        assert one.short.settings == {"lr": 0.4} and one.long.settings == {"lr": 0.2} and not one.at_edge
        assert [(line["seed"], line["steps"], line["settings"]["lr"]) for line in one.runs] == [
            (0, 8, 0.2),
            (1, 8, 0.2),
        ]
        assert all(json.loads(line)["seed"] == 100 for line in text if json.loads(line)["steps"] == 4), method


def test_whole_trainings_are_searched_by_the_mean_of_the_tuning_seeds(short, monkeypatch):
    """The learning rate that is best with one seed diverges with another."""
    true = fake

    def cliff(job, settings, workers, steps, seed):
        line = true(job, settings, workers, steps, seed)
        return {**line, "loss": None} if (settings["lr"], steps, seed) == (0.2, 8, 101) else line

    monkeypatch.setitem(globals(), "fake", cliff)
    monkeypatch.setitem(CONTESTS, "short", replace(CONTEST, tuning_seeds=(100, 101)))
    arena.run_all(["short"], 2, math.inf)
    one = arena.done("short")["few"]
    assert one.best == {"lr": 0.4} and one.long.loss == pytest.approx(1.03 + 1.005)
    lines = arena.lines_of("short").values()
    assert {line["seed"] for line in lines if line["steps"] == 4} == {100}, "short trainings have one seed"
    assert "once more, each with 2 seeds, of which the mean counts." in page.body(
        "short", CONTESTS["short"], arena.done("short"), 1.0
    )


def test_an_optimum_at_the_edge_is_refused_before_the_seeds_are_trained(short, monkeypatch, capsys):
    monkeypatch.setitem(CONTESTS, "short", replace(CONTEST, trials=2))
    arena.run_all(["short"], 2, math.inf)
    assert {line["seed"] for line in arena.lines_of("short").values()} == {100}
    assert all(one.at_edge == ("lr",) and not one.runs for one in arena.done("short").values())
    capsys.readouterr()
    arena.plan(["short"])
    assert "few: refused: all 2 trials are spent, and better settings may be beyond: lr" in capsys.readouterr().out


def test_a_contest_with_the_settings_of_another_waits_for_it_and_searches_the_learning_rate_alone(short, monkeypatch):
    larger = replace(CONTEST, workers=4, settings_of="short", seeds=(7,))
    monkeypatch.setitem(CONTESTS, "larger", larger)
    arena.run_all(["larger"], 2, math.inf)
    assert not arena.lines_of("larger") and not arena.done("larger"), "nothing is trained before the settings are known"
    monkeypatch.setitem(CONTESTS, "short", replace(CONTEST, trials=6))  # of two knobs
    monkeypatch.setitem(larger.methods["few"].knobs, "decay", Choice((0.1, 0.2), 0.1, (True, True)))
    arena.run_all(["short", "larger"], 2, math.inf)
    one = arena.done("larger")["few"]
    assert [line["seed"] for line in one.runs] == [7] and one.best == {"lr": 0.4, "decay": 0.1}
    searches = [line for line in arena.lines_of("larger").values() if line["seed"] == 100]
    assert {line["steps"] for line in searches} == {4} and {line["workers"] for line in searches} == {4}
    assert {line["settings"]["decay"] for line in searches if "decay" in line["settings"]} == {0.1}
    assert "4 steps, 5 for each method of lr; other settings are those of `short`" in page.body(
        "larger", larger, arena.done("larger"), 1.0
    )


def test_claims_are_judged_once_more_with_other_seeds_and_the_settings_that_were_found(short, monkeypatch):
    arena.run_all(["short"], 2, math.inf)
    monkeypatch.setitem(CONTESTS, "short-again", once_more("short"))
    monkeypatch.setattr(page, "write_overview", lambda *given: None)
    monkeypatch.setattr(page, "write_losses", lambda *given: None)
    arena.run_all(["short-again"], 2, math.inf)
    lines = arena.lines_of("short-again").values()
    assert sorted((line["seed"], line["steps"]) for line in lines) == [(10, 8), (10, 8), (11, 8), (11, 8)]
    assert {line["settings"]["lr"] for line in lines} == {0.2}, "nothing is searched"
    monkeypatch.setattr(arena, "CONTESTS", {name: CONTESTS[name] for name in ("short", "short-again")})
    arena.report()
    text = page.PAGE.read_text()
    assert text.count("<!-- begin") == 1
    assert "between the seeds. With 2 other seeds: **Yes**, +0.030 (+0.030 to +0.030)." in text


def test_the_page_is_computed_and_a_method_at_the_edge_has_no_row(short, monkeypatch):
    arena.run_all(["short"], 2, math.inf)
    page.PAGE.write_text(page.about(1.0, 0.5))
    page.write("short", CONTEST, arena.done("short"), 2.0)
    text = (short / "arena.md").read_text()
    assert "| **few** | 1.000% | 0.0350 | +0.030 (+0.030 to +0.030) | lr 0.2 |" in text
    assert "- **Yes.** **few**: at most +0.050 nats from _dense_, at 2.00% of the bytes or less." in text
    page.write_overview({"short": CONTEST}, {"short": arena.done("short")})
    assert "| A short contest | **few** | 1.00% | 0.0350 | +0.030 ± 0.000 |" in (short / "which_preset.md").read_text()
    tighter = replace(CONTEST, claims=(Claim("few", "dense", 0.02),))
    assert "- **No.**" in page.body("short", tighter, arena.done("short"), 2.0)
    found = arena.done("short")
    other = found["few"].runs[1]
    found["few"].runs[1] = {**other, "loss": other["loss"] + 0.02, "early": {"loss": 9.0}}
    near = replace(CONTEST, claims=(Claim("few", "dense", 0.045),))
    assert "- **Not decided.**" in page.body("short", near, found, 2.0), "0.03 and 0.05"
    for one in found.values():
        for line in one.runs:
            line["early"] = {"loss": 5.0 if line["settings"]["scheme"] == "x" else 6.0}
    early = replace(CONTEST, claims=(Claim("few", "dense", -0.5, early=True),))
    assert "- **Yes.**" in page.body("short", early, found, 2.0)
    found["dense"].runs[0]["early"] = {"loss": 7.5}
    assert "_dense_ itself spreads over 1.500 between" in page.body("short", early, found, 2.0), "after a fifth, too"
    fewer = replace(CONTEST, claims=(Claim("few", "dense", 0.045, share=0.005),))
    assert "- **No.**" in page.body("short", fewer, found, 2.0), "whatever the loss is"
    monkeypatch.setitem(CONTESTS, "short", replace(CONTEST, trials=2))
    arena.run_all(["short"], 2, math.inf)
    trainings = len(arena.lines_of("short"))
    arena.prune(["short"])
    retired = [json.loads(line) for line in (short / "retired.jsonl").read_text().splitlines()]
    assert len(arena.lines_of("short")) == trainings - len(retired) < trainings
    assert {line["contest"] for line in retired} == {"short"}
    edge = page.body("short", CONTESTS["short"], arena.done("short"), 2.0)
    assert "| **few** |" not in edge and "at the edge of lr" in edge and "- Open." in edge
    monkeypatch.setitem(CONTESTS, "short", CONTEST)
    monkeypatch.delattr(SameProcess, "submit")
    arena.run_all(["short"], 2, math.inf)
    assert len(arena.done("short")) == 2, "what was retired is taken back, and not trained again"
    arena.prune(["short"])
    assert not set(arena.lines_of(arena.RETIRED)) & set(arena.lines_of("short"))


def test_a_mean_is_as_certain_as_the_seeds_allow():
    """The one-sided 95% points of Student's t: 6.314 with one degree of freedom, 2.132 with four."""
    assert page.uncertainty([0.0, 1.0]) == pytest.approx(6.314 * 0.5, rel=1e-3)
    assert page.uncertainty([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.132 * math.sqrt(2.5 / 5), rel=1e-3)
    assert page.uncertainty([0.3]) == math.inf


def test_the_tables_of_the_documents_are_those_of_the_lines(monkeypatch):
    """``report`` writes the same page, overview and README as are there."""
    written = {}
    monkeypatch.setattr(page.doc_sections, "write", lambda *given: written.update({given[:2]: given[3]}))
    found = {name: arena.done(name) for name in CONTESTS}
    page.write_overview(CONTESTS, found)
    page.write_losses(CONTESTS, found)
    for (path, name), body in written.items():
        assert body in path.read_text("utf-8"), f"{name} of {path.name}: run python scripts/arena/arena.py report"


@pytest.mark.parametrize("name", CONTESTS)
def test_the_lines_of_the_documents_are_those_that_the_contests_ask_for(name):
    """Lines that no campaign asks for any more are deleted with the change that no longer asks for them."""
    known = arena.lines_of(name)
    assert set(known) <= arena.asked(CONTESTS[name], known), "run python scripts/arena/arena.py prune"


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("every", [1, 15])
def test_a_density_takes_the_share_of_bytes_that_it_is_for(workers, every):
    density, numel = density_of(0.003, workers, every, 1.0), 100_000
    count = round(density * numel)
    sent = (workers - 1) * (entropy_bits(numel, count) + count) / every
    assert sent / (2 * (workers - 1) / workers * 32 * numel) == pytest.approx(0.003, rel=0.02)


def test_the_share_of_a_published_format_is_that_of_its_elements():
    method = CONTESTS["adamw-8"].methods["sparseloco"]
    settings = method.settings({path: knob.value(0) for path, knob in method.knobs.items()}, 8)
    numel, steps = 4096 * 100, 30
    sent = 7 * 2 * (64 * 100 * 14)  # two rounds, to each other worker
    assert method.published_share(settings, 8) == pytest.approx(sent / (2 * 7 / 8 * 32 * numel * steps))


def test_the_bits_of_a_support_are_those_of_the_binomial_coefficient():
    assert entropy_bits(40, 5) == pytest.approx(math.log2(math.comb(40, 5)))


def test_power_sgd_keeps_what_it_has_not_sent_and_is_exact_at_full_rank():
    given, scheme = gradients(0), PowerSGD(3, SHAPES, 10, rank=2)
    sent = scheme.combine(given)
    for begin, end in ((0, 24), (29, NUMEL)):
        torch.testing.assert_close((sent[None] + scheme.errors)[:, begin:end], given[:, begin:end])
    torch.testing.assert_close(sent[24:29], given[:, 24:29].mean(0))
    assert scheme.errors[:, 24:29].abs().max() == 0, "vectors are sent as they are"
    low = torch.zeros(3, NUMEL)
    low[:, 29:] = torch.outer(torch.arange(8.0), torch.ones(8)).flatten()
    exact = PowerSGD(3, SHAPES, 10, rank=2)
    torch.testing.assert_close(exact.combine(low), low[0], atol=1e-5, rtol=1e-5)


def test_demo_sends_the_largest_coefficients_of_each_chunk():
    """A row is missing to two chunks."""
    scheme = DeMo(2, [(7, 8)], 10, chunk=4, top=3, decay=0.5)
    given = torch.randn(2, 56, generator=torch.Generator().manual_seed(1))
    direction = scheme.combine(given).view(7, 8).numpy()
    total, momentum = np.zeros((8, 8)), np.zeros((2, 8, 8))
    for worker in range(2):
        matrix = np.pad(given[worker].view(7, 8).numpy(), ((0, 1), (0, 0)))
        for row in (slice(0, 4), slice(4, 8)):
            for column in (slice(0, 4), slice(4, 8)):
                turned = scipy.fft.dctn(matrix[row, column], norm="ortho")
                kept = np.where(np.abs(turned) >= np.sort(np.abs(turned).ravel())[-3], turned, 0)
                back = scipy.fft.idctn(kept, norm="ortho")
                total[row, column] += back
                momentum[worker, row, column] = matrix[row, column] - back
    np.testing.assert_array_equal(direction, np.sign(total)[:7])
    np.testing.assert_allclose(scheme.momentum.view(2, 7, 8).numpy(), momentum[:, :7], atol=1e-5)


def test_demo_with_coded_indices_takes_as_many_bits_as_there_are_subsets():
    for coded, places in ((False, 3 * 4), (True, math.log2(math.comb(16, 3)))):
        scheme = DeMo(3, [(8, 8)], 10, chunk=4, top=3, decay=0.5, signs=True, coded=coded)
        scheme.combine(torch.randn(3, 64))
        assert scheme.sent == pytest.approx(2 * 4 * (places + 3) / 8), "4 chunks, to 2 other workers"


def test_a_warm_up_is_told_in_shares_of_the_steps():
    config = {"sparsifier": {"name": "topk", "density": 0.1}, "value": "raw", "scope": "model", "memory": "dgc"}
    sent = {}
    for warm_up in ((), ((0.1, 1.0),)):
        scheme = Containers(2, SHAPES, 20, config, warm_up)
        for step in range(20):
            scheme.combine(gradients(step)[:2])
        sent[bool(warm_up)] = scheme.container_bytes
    assert sent[True] - sent[False] > 2 * 2 * 0.8 * 4 * NUMEL, "two steps of two workers with all elements"


def test_one_bit_momentum_keeps_its_errors_after_the_warm_up():
    scheme = OneBitMomentum(3, SHAPES, steps=10, warm=0.2)
    for step in range(2):
        scheme.combine(gradients(step))
    second, first = scheme.second.clone(), scheme.first.clone()
    given = gradients(2)
    scheme.combine(given)
    torch.testing.assert_close(scheme.second, second, rtol=0, atol=0)
    exact = (0.9 * first + 0.1 * given).mean(0)
    torch.testing.assert_close(scheme.first + scheme.owners + scheme.errors.mean(0), exact)
    for part in scheme.first.split([24, 5, 64]):
        assert part.abs().unique().numel() == 1, "one scale for each part"


def test_query_key_and_value_are_three_matrices():
    assert muon.separated([(97, 8), (64, 8), (24, 8), (8, 8), (32, 8)]) == [
        (97, 8), (64, 8), *[(8, 8)] * 4, (32, 8)
    ]  # fmt: skip


def test_muon_is_that_of_pytorch():
    rng = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(2, NUMEL, generator=rng) for _ in range(2))
    models = torch.nn.Parameter(start.clone())
    mine = muon.Muon(models, SHAPES, 0.1, 0.95, 0.1, 0.99, embeddings=2)
    hidden = [torch.nn.Parameter(one[29:].view(8, 8).clone()) for one in start]
    theirs = torch.optim.Muon(hidden, 0.1, 0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    others = [torch.nn.Parameter(one[:29].clone()) for one in start]
    adamw = torch.optim.AdamW(others, 0.1, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(3):
        models.grad = gradient.clone()
        for one, other, part in zip(hidden, others, gradient, strict=True):
            one.grad, other.grad = part[29:].view(8, 8).clone(), part[:29].clone()
        mine.step(), theirs.step(), adamw.step()
    torch.testing.assert_close(models[:, :29], torch.stack(others), rtol=1e-4, atol=1e-5)
    expected = torch.stack([one.flatten() for one in hidden])
    torch.testing.assert_close(models[:, 29:], expected, rtol=0, atol=0.01)  # theirs is in bfloat16


@pytest.fixture
def few_windows(monkeypatch):
    """The loss of few windows, since that of all takes longer than three steps."""
    monkeypatch.setattr(gpt_job.Job, "validate", partialmethod(gpt_job.Job.validate, windows=64))


RUNS = {
    **{name: {"optimizer": "adamw", "lr": 1e-3, "scheme": name} for name in ("dense", "one_bit")},
    "updates": {"optimizer": "muon", "lr": 1e-3, "every": 2, "outer_momentum": 0.5},
    "containers": {"optimizer": "adamw", "lr": 1e-3, "scheme": "containers", "with": {"config": "fast"}},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_repeatable_and_counts_its_bytes(name, few_windows):
    first, again = (train("lstm" if name == "containers" else "gpt", RUNS[name], 2, 3, 0) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert first["share"] == pytest.approx({"dense": 1.0, "updates": 2 / 3}.get(name, first["share"]))
    assert 0 < first["share"] <= 1 and 3 < first["loss"] < 4.7


def test_updates_that_a_preset_sends_as_they_are_go_through_a_ring(few_windows):
    """Which takes fewer bytes than an allgather, from three workers on."""
    line = train("gpt", {"optimizer": "adamw", "lr": 1e-3, "every": 2, "config": "diloco"}, 4, 2, 0)
    assert line["share"] == pytest.approx(0.5) and line["volume"] is None


def test_a_step_of_updates_without_compression_is_that_of_dense(few_windows):
    plain = {"optimizer": "sgd", "lr": 0.5}
    dense, updates = (train("gpt", {**plain, **one}, 2, 3, 0) for one in ({"scheme": "dense"}, {"every": 1}))
    assert updates["loss"] == pytest.approx(dense["loss"], abs=1e-5)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 3), (2, 0), (3, 4)])
def test_updates_in_turn_follow_the_schedule_of_local_sgd(fragments, delay):
    """Beside an obvious version: each fragment every 5 steps, the last one after 5, the others evenly before it."""
    sizes, every, steps, workers = [3, 2, 4], 5, 17, 2
    rng = np.random.default_rng(0)
    moves = rng.standard_normal((steps, workers, 9)).astype(np.float32)
    start = rng.standard_normal(9).astype(np.float32)
    replicas = np.tile(start, (workers, 1))
    settings = {"every": every, "fragments": fragments, "delay": delay, "outer_lr": 0.5, "outer_momentum": 0.5}
    updates = _updates(settings, replicas, sizes)
    bounds = {1: [0, 9], 2: [0, 5, 9], 3: [0, 3, 5, 9]}[fragments]
    local, anchor, velocity = replicas.astype(float), start.astype(float), np.zeros(9)
    flying: dict[int, tuple] = {}

    def applied(place):
        part, (mean, begun, _) = slice(*bounds[place : place + 2]), flying.pop(place)
        velocity[part] = 0.5 * velocity[part] + mean
        anchor[part] -= 0.5 * (mean + 0.5 * velocity[part])
        local[:, part] += anchor[part] - begun

    for clock in range(1, steps + 1):
        replicas += moves[clock - 1]
        local += moves[clock - 1]
        updates.step(last=clock == steps)
        for place in range(fragments):
            part, last = slice(*bounds[place : place + 2]), clock == steps
            if place in flying and (last or clock == flying[place][2]):
                applied(place)
            if clock % every == math.ceil(every * (place + 1) / fragments) % every or last:
                flying[place] = (anchor[part] - local[:, part]).mean(0), local[:, part].copy(), clock + delay
                if last or not delay:
                    applied(place)
        np.testing.assert_allclose(replicas, local, atol=1e-5)
    np.testing.assert_array_equal(replicas[0], replicas[1])


def test_every_method_can_be_trained():
    for contest in CONTESTS.values():
        for name, method in contest.methods.items():
            settings = method.settings({path: knob.value(0) for path, knob in method.knobs.items()}, contest.workers)
            assert ("every" in settings) != ("scheme" in settings), name
            if "scheme" in settings:
                SCHEMES[settings["scheme"]](2, SHAPES, 10, **settings.get("with", {}))


def test_a_path_is_a_place_in_nested_settings():
    settings = {"a": 1}
    put(settings, "with.deep.b", 2)
    assert settings == {"a": 1, "with": {"deep": {"b": 2}}}


def test_the_command_names_unknown_contests():
    with pytest.raises(arena.typer.BadParameter, match="no contest is named nothing"):
        arena.chosen(["nothing"])
    assert arena.FOLDER == ROOT / "docs" / "results" / "arena"
