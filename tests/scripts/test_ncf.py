"""The recommendation job: its data, as MovieLens publishes it and generated, and a short run in both frameworks."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest

from tests.ranks import ROOT, launch

PROGRAM = ROOT / "scripts" / "train" / "ncf.py"
spec = importlib.util.spec_from_file_location("ncf", PROGRAM)
ncf = sys.modules["ncf"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ncf)
# User 7 rated items 30, 10, 20 in this order of time; user 9 rated 10 and 40; user 12 only one.
ROWS = [(7, 10, 4.0, 200), (7, 20, 3.5, 300), (7, 30, 5.0, 100), (9, 40, 1.0, 20), (9, 10, 2.0, 10), (12, 50, 3.0, 1)]


@pytest.fixture
def ml_1m(tmp_path):
    (tmp_path / "ratings.dat").write_text("".join(f"{u}::{i}::{int(r)}::{t}\n" for u, i, r, t in ROWS))
    return tmp_path


@pytest.fixture
def ml_20m(tmp_path):
    lines = ["userId,movieId,rating,timestamp", *(f"{u},{i},{r},{t}" for u, i, r, t in ROWS)]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "ratings.csv"


@pytest.mark.parametrize("published", ["ml_1m", "ml_20m"])
def test_movielens_is_read_and_the_last_item_held_out(published, request):
    ratings = ncf.Ratings.read(request.getfixturevalue(published))
    assert (ratings.user_count, ratings.item_count) == (2, 4)
    assert ratings.users.tolist() == [0, 0, 1] and ratings.items.tolist() == [2, 0, 0]
    assert ratings.test.tolist() == [1, 3]
    assert ratings.rated.tolist() == [0, 1, 2, 4, 7]
    users = np.repeat([0, 1], 50)
    items = ratings.unrated_items(users, np.random.default_rng(0))
    assert set(items[:50]) == {3} and set(items[50:]) == {1, 2}


def test_a_folder_without_ratings_says_so(tmp_path):
    with pytest.raises(SystemExit, match="neither ratings.dat .* nor ratings.csv"):
        ncf.Ratings.read(tmp_path)


def test_a_generated_table_is_skewed_as_movielens():
    ratings = ncf.Ratings.generated(2000, 1200, seed=0)
    per_user, per_item = np.bincount(ratings.users) + 1, np.bincount(ratings.items)
    assert per_user.min() >= 20 and 60 < np.median(per_user) < 140 and per_user.mean() > 1.1 * np.median(per_user)
    assert per_item.mean() > 1.4 * np.median(per_item) and per_item.max() < 2000
    parts = [list(ratings.batches(1000, rank, 2, (0, 0))) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) > 10
    assert all(0.1 < labels.mean() < 0.3 for _, _, labels in parts[0])
    users, items, labels = (np.concatenate(part) for part in zip(*parts[0], strict=True))
    known = np.isin(users * ratings.item_count + items, ratings.rated)  # for all batches at once: it is slow
    assert np.array_equal(known, labels == 1)


@pytest.mark.launch
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_it_learns_from_compressed_gradients(framework, tmp_path):
    out = tmp_path / "figures.json"
    options = "--config configs/sparse_best.yaml --users 100 --items 80 --factors 16 --epochs 3 --lr 0.01".split()
    launch("mpirun", 2, PROGRAM, "train", "--framework", framework, "--out", str(out), *options)
    epochs = json.loads(out.read_text())["epochs"]
    assert epochs[-1]["loss"] < epochs[0]["loss"] and epochs[-1]["hit_rate"] > 0.2
    assert all(row["bytes_sent"] < row["dense_bytes"] / 4 for row in epochs)
