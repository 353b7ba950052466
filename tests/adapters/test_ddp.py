"""The DDP communication hook under torchrun. The cases are the functions of the files ``CASES``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvd_deepreduce.torch import ddp
from tests.adapters import test_torch
from tests.adapters.containers import EQUAL, IN_BUCKETS
from tests.jobs import Job, each_case
from tests.ranks import ROOT, launch
from tests.selection import thorough

HERE = Path(__file__).parent
PROGRAM = HERE / "ddp_cases.py"
CASES = [PROGRAM, HERE / "all_cases.py", HERE / "pytorch_cases.py"]
JOBS = [Job(PROGRAM, "torchrun", ranks) for ranks in (2, 3, 4)]
TWO, THREE, FOUR = JOBS
# Most cases need ranks that differ, and one that is neither the first nor the last. What depends on their number are
# sums, groups, errors, and who waits for whom.
FEW_CASES = [
    "the_first_iterations_are_ddp",
    "scopes_and_exchanges_equal_dense",
    "means_and_residuals_are_those_of_the_pipeline_by_hand",
    "unused_parameters_keep_their_residuals",
    "nan_and_infinity_reach_every_rank",
    "empty_selections",
    "a_config_changed_on_one_rank_only",
    "configs_differ",
    "a_corrupt_container",
    "what_fails_on_one_rank_is_an_error_on_all",
    "groups_of_some_ranks",
    "bytes_to_each_rank",
    "two_levels",
    "ranks_that_do_not_come_with_the_hook",
    "an_error_while_decoding_on_one_rank",
]
FEW = {TWO: FEW_CASES, FOUR: FEW_CASES}


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case(JOBS, *CASES, few=FEW, thorough=[TWO, FOUR]))
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@thorough
def test_containers_and_means_are_those_under_horovod(jobs):
    ours, theirs = (jobs.check(job, EQUAL) for job in (THREE, test_torch.ONCE[EQUAL]))
    assert len(ours) == len(theirs) == 3
    assert ours == theirs
    for of_rank in ours:  # in each of three steps, a container for each bucket or tensor, and four means
        each = [4 if config.get("selection") == "tensor" else 2 for config in IN_BUCKETS]
        assert [len(parts) for parts in of_rank] == [3 * (count + 4) for count in each]


@pytest.mark.launch
@thorough
def test_a_rank_that_dies_ends_the_job():
    ended = launch("torchrun", 3, HERE / "ddp_death.py", seconds=100, check=False)
    assert ended.returncode != 0, ended.stdout
    assert ended.stdout.count("step 1 done") == 3 and "step 2 done" not in ended.stdout, ended.stdout
    # The error of torch.distributed, on the ranks that live.
    assert ended.stdout.count("RuntimeError from backward") == 2, ended.stdout


def test_sharded_gradients_are_refused():
    """FullyShardedDataParallel calls a hook with tensors."""
    for tensors in ([torch.ones(3)], [torch.ones(4), torch.ones(2)]):
        with pytest.raises(TypeError, match="Wrap the model in torch.nn.parallel.DistributedDataParallel"):
            ddp.deepreduce_hook(ddp.DeepReduceState(), *tensors)


def test_horovod_is_not_needed():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "mpi4py", "tensorflow"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)
sys.meta_path.insert(0, Blocked())
from hvd_deepreduce.torch import ddp
import hvd_deepreduce.torch as package
assert package.ddp is ddp and {"ddp", "DeepReduce"} <= set(package.__all__)
ddp.DeepReduceState("topk_rice_qsgd")
from hvd_deepreduce.torch import LocalSGD
try:
    package.DeepReduce
except ImportError as error:
    print(error)
try:
    package.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    missing, unknown = done.stdout.splitlines()
    assert missing.startswith("hvd_deepreduce.torch.DeepReduce needs horovod, which is not installed"), done.stdout
    assert ": run pip install " in missing and "Without Horovod there are ddp.deepreduce_hook" in missing, done.stdout
    assert unknown == "module 'hvd_deepreduce.torch' has no attribute 'nothing'", done.stdout


@pytest.mark.parametrize("what", ["torch import DeepReduce", "torch.fsdp import Replicas"])
def test_a_missing_pytorch_is_named(what):
    """Also where Horovod is missing too, and where a module is imported directly."""
    code = f"""
import sys
sys.modules.update(torch=None, horovod=None)
try:
    from hvd_deepreduce.{what}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("hvd_deepreduce.torch needs torch, which is not installed"), done.stdout
    assert done.stdout.endswith("run pip install torch\n"), done.stdout
