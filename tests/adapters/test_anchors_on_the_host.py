"""LocalSGD with ``anchors: host``: what is where, by tensors that have a GPU as their device and no values."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hvd_deepreduce.config.local_sgd import LocalSettings
from hvd_deepreduce.torch.updates import Updates


@pytest.fixture
def updates(monkeypatch):
    """Of one parameter on a GPU. An operation on tensors of several devices is an error, as with values."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    with FakeTensorMode():
        made = Updates.__new__(Updates)
        made.local = LocalSettings(anchors="host", momentum=0.9)
        made.tensors = [torch.nn.Parameter(torch.empty(6, dtype=torch.bfloat16, device="cuda"))]
        made.parameters = [SimpleNamespace(name="weight")]
        made._make_outer, made._times, made.bases = made._default_outer, None, []
        made.anchors, made.outer = made.new_anchors()
        assert pinned == made.anchors
        yield made


def test_anchors_and_outer_state_are_on_the_host_and_all_else_beside_the_parameter(updates):
    (anchor,) = updates.anchors
    for one in (updates.update(0), updates.nothing(0)):
        assert (one.device.type, one.dtype) == ("cuda", torch.float32)
    fragment = SimpleNamespace(updates={0: updates.update(0)}, numbers=[0])
    updates.outer_step(fragment)
    assert anchor.grad is None and updates.outer.state[anchor]["momentum_buffer"].device.type == "cpu"
    for start, keeps in ((updates.copy(0), 0.0), (None, 0.5)):  # without both it is copy_, which takes any device
        updates.follow(0, start, keeps)
    updates.bases = [anchor.clone()]
    assert updates.update(0).device.type == "cuda"
    assert updates.taken(0).device.type == updates.mean_of(0, anchor).device.type == "cuda"
    assert {one.device.type for one in [*updates.anchors, *updates.bases]} == {"cpu"}


def test_a_loaded_state_goes_to_the_host(updates):
    state = {"anchors": {"weight": torch.empty(6, device="cuda")}, "bases": {}, "outer": updates.outer.state_dict()}
    updates.restoring(state)()
    assert updates.anchors[0].device.type == "cpu" and updates.outer.param_groups[0]["params"] == updates.anchors
