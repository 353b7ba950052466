"""Recording the gradients of a job; on several ranks: tests/adapters."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from hvd_deepreduce.tools import gradient_file
from hvd_deepreduce.tools.gradient_file import CaptureError
from hvd_deepreduce.tools.recorder import FILE_VARIABLE, STEPS_VARIABLE, Recorder
from hvd_deepreduce.torch import Capture
from tests.command.test_command import run

SHAPES = {"a": (2, 3), "b": (4,)}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(network, steps, passes=1):
    """The gradient of each step, before the optimizer's."""
    found, generator = [], torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            network(torch.randn(5, 6, generator=generator)).square().sum().backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None]).numpy().copy())
        optimizer.step()
    return found


@pytest.mark.parametrize("passes", [1, 3])
def test_wanted_steps_are_recorded_exactly(tmp_path, passes):
    network = model()
    capture = Capture(network, tmp_path / "of.npz", [2, 4], passes=passes)
    gradients = train(network, 6, passes)
    assert capture.files == [tmp_path / "of_step2.npz", tmp_path / "of_step4.npz"]
    for file, step in zip(capture.files, (2, 4), strict=True):
        assert np.array_equal(gradient_file.read(file, "gradient", 0), gradients[step - 1])
        assert gradient_file.about(file)["step"] == step
        assert gradient_file.vectors_of(file) == [("gradient", 0)]
    names, sizes = gradient_file.parameters(capture.files[0])
    assert names == [name for name, _ in network.named_parameters()] and sum(sizes) == gradients[0].size
    assert not any(parameter._post_accumulate_grad_hooks for parameter in network.parameters()), "hooks were left"


def test_one_step_has_the_given_name_and_parameters_can_be_chosen(tmp_path):
    network = model()
    network[0].weight.requires_grad_(False)
    capture = Capture(network, tmp_path / "of.npz", [1], only="*.bias")
    train(network, 2)
    assert capture.files == [tmp_path / "of.npz"]
    assert gradient_file.parameters(tmp_path / "of.npz")[0] == ["0.bias", "2.bias"]
    assert gradient_file.about(tmp_path / "of.npz")["shapes"] == [[8], [3]]


def test_the_environment_switches_it_on(tmp_path, monkeypatch):
    network = model()
    assert Capture(network).files == []
    assert not network[0].weight._post_accumulate_grad_hooks
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "of.npz"))
    monkeypatch.setenv(STEPS_VARIABLE, "1,2")
    capture = Capture(network, steps=[5])
    train(network, 2)
    assert [file.name for file in capture.files] == ["of_step1.npz", "of_step2.npz"]


def test_parameters_without_a_gradient_are_zeros(tmp_path):
    for ended in ("by the next pass", "by close"):
        recorder = Recorder(tmp_path / "of.npz", [2], SHAPES)
        for _ in range(2 if ended == "by close" else 3):
            recorder.put("b", lambda: np.full(4, 3.0))
        recorder.close()
        assert recorder.files == [tmp_path / "of.npz"] and recorder.done
        assert gradient_file.read(tmp_path / "of.npz", "gradient", 0).tolist() == [0] * 6 + [3] * 4
        assert gradient_file.about(tmp_path / "of.npz")["without_gradient"] == ["a"]
    recorder.put("b", lambda: np.zeros(4))
    assert len(recorder.files) == 1


class Heads(torch.nn.Module):
    """Of which a call uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = (torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, *heads):
        return sum(getattr(self, head)(self.body(x)) for head in heads).square().sum()


def test_a_layer_that_a_pass_does_not_use_is_not_of_another_pass(tmp_path):
    network = Heads()
    capture = Capture(network, tmp_path / "of.npz", [2])
    for step, heads in enumerate((["one"], ["one", "other"], ["other"]), 1):
        network.zero_grad()
        network(torch.full((2, 3), float(step)), *heads).backward()
        if step == 2:
            expected = [one.grad.reshape(-1) for one in network.parameters()]
    assert np.array_equal(gradient_file.read(capture.files[0], "gradient", 0), torch.cat(expected).numpy())


def test_of_several_passes_a_layer_has_its_gradient_from_any(tmp_path):
    network = Heads()
    capture = Capture(network, tmp_path / "of.npz", [1], passes=2)
    for head in ("other", "one"):
        network(torch.ones(2, 3), head).backward()
    expected = torch.cat([one.grad.reshape(-1) for one in network.parameters()]).numpy()
    network.eval()(torch.ones(2, 3), "one")
    assert np.array_equal(gradient_file.read(capture.files[0], "gradient", 0), expected)


def test_the_last_step_of_a_job_is_written(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LAST, str(tmp_path / "of.npz")], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert gradient_file.about(tmp_path / "of.npz")["without_gradient"] == ["1.weight", "1.bias"]


LAST = """
import sys, torch
from hvd_deepreduce.torch import Capture
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
Capture(model, sys.argv[1], [1])
model[0](torch.ones(1, 2)).sum().backward()
"""


def test_accumulators_are_gradients_and_residuals(tmp_path):
    recorder = Recorder(tmp_path / "of.npz", [1], SHAPES, accumulators=True, rank=3, all_ranks=True)
    file = tmp_path / "of_rank3.npz"
    recorder.put("a", lambda: np.ones((2, 3)), lambda: np.full(6, 0.5))
    recorder.put("b", lambda: np.ones(4), lambda: None)
    assert gradient_file.read(file, "accumulator", 3).tolist() == [1.5] * 6 + [1] * 4
    assert gradient_file.rank_count(file) == 1
    assert Recorder(tmp_path / "of.npz", [1], SHAPES, rank=3).done


def test_what_cannot_be_recorded_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "of.npz"
    for match, given in (
        ("would take 40 bytes, and max_bytes is 39", {"max_bytes": 39}),
        ("would take 80 bytes", {"max_bytes": 79, "accumulators": True}),
        ("matches none of the 2 parameters", {"only": "layer4.*"}),
        ("passes is 0; a step has one backward pass or more", {"passes": 0}),
        ("passes is 1.5; a step has", {"passes": 1.5}),
    ):
        with pytest.raises(ValueError, match=match):
            Recorder(file, [1], SHAPES, **given)
    for steps in ([0], [], ["x"], [1.5], [None], 10):
        with pytest.raises(ValueError, match="must be numbers from 1 on"):
            Capture(model(), file, steps)
    with pytest.raises(ValueError, match="no parameters that are trained"):
        Capture(model().requires_grad_(False), file)
    with pytest.raises(TypeError, match="compression is 'recommended'; it must be"):
        Capture(model(), file, compression="recommended")
    with pytest.raises(TypeError, match="parameter weight is complex"):
        Capture(torch.nn.Linear(2, 2, dtype=torch.complex64), file)
    with pytest.raises(ValueError, match="must end in .npz"):
        Capture(model(), tmp_path / "of.pt")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ValueError, match="folder.npz', which is a folder"):
        Capture(model(), tmp_path / "folder.npz")


def test_a_job_goes_on_where_its_gradients_cannot_be_written(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    network = model()
    capture = Capture(network, tmp_path / "of.npz", [1, 3])
    with monkeypatch.context() as patch:
        patch.setattr(gradient_file, "write", full)
        train(network, 2)
    train(network, 1)
    assert "step 1 were not captured" in caplog.text and "No space left" in caplog.text
    assert [file.name for file in capture.files] == ["of_step3.npz"] and capture.done


def test_files_of_something_else_are_an_error(tmp_path):
    file = tmp_path / "of.npz"
    np.savez(file, names=np.array(["a"]))
    with pytest.raises(CaptureError, match="it has no sizes and no about"):
        gradient_file.vectors_of(file)
    file.write_text("text")
    with pytest.raises(CaptureError, match="is not an .npz file"):
        gradient_file.about(file)
    gradient_file.write(file, {("gradient", 0): np.ones(3, np.float32)}, ["a"], [4], {})
    with pytest.raises(CaptureError, match=r"float32 \[3\], and its parameters have 4 elements"):
        gradient_file.read(file, "gradient", 0)


def test_the_command_says_how_and_checks(tmp_path):
    text = run("capture")
    assert 'Capture(model, "gradients.npz", steps=[10, 100])' in text and FILE_VARIABLE in text
    assert "there is nothing to print as JSON" in run("capture", "--json", code=2)
    file = tmp_path / "of.npz"
    gradient_file.write(file, {("gradient", 0): np.array([3, 4, 0], np.float32)}, ["a"], [3], {"step": 7})
    assert "3 elements of 1 parameters" in run("capture", file)
    found = json.loads(run("capture", file, "--json"))
    assert found["vectors"][0]["norm"] == 5 and found["about"] == {"step": 7}
    gradient_file.write(file, {("gradient", 0): np.array([3, np.nan], np.float32)}, ["a"], [2], {})
    assert "the gradient of rank 0" in run("capture", file, code=1)
    gradient_file.write(file, {}, ["a"], [2], {})
    assert "no gradients of them" in run("capture", file, code=1)
    assert "cannot be read" in run("capture", tmp_path / "missing.npz", code=1)
