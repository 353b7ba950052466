"""The PyTorch adapter under real launchers. The cases are the functions of the files ``CASES``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.adapters import test_tensorflow
from tests.adapters.containers import COMPARED, EQUAL
from tests.jobs import Job, each_case
from tests.ranks import launch
from tests.selection import first, thorough

HERE = Path(__file__).parent
PROGRAM = HERE / "torch_cases.py"
CASES = [PROGRAM, HERE / "all_cases.py", HERE / "horovod_cases.py", HERE / "pytorch_cases.py"]
# Three ranks under mpirun run all cases: ranks that differ, and one that is neither the first nor the last.
THREE = Job(PROGRAM, "mpirun", 3)
# Gloo has allgathers, joins, errors and process sets of its own.
GLOO = Job(PROGRAM, "horovodrun --gloo", 2)
# Four ranks make two nodes of two, and TCP counts the bytes on the wire.
TCP = Job(PROGRAM, "mpirun tcp", 4)
# horovodrun --mpi starts mpirun: that it passes on what a job needs shows in the handshake, in each kind of exchange,
# and in the errors that end a job.
MPI = Job(PROGRAM, "horovodrun --mpi", 2)
JOBS = [THREE, GLOO, TCP, MPI]
STARTED = [
    "lossless_equals_dense_with_a_list_of_groups",
    "scopes_and_exchanges_equal_dense",
    "sparse_gradients_as_dense_and_as_they_are",
    "a_process_set",
    "what_is_not_sent_is_kept",
    "a_config_changed_on_one_rank_only",
    "configs_differ",
    "a_corrupt_container",
]
FEW = {
    GLOO: [
        *STARTED,
        "exchanges_over_mpi_say_so_under_gloo",
        "lossless_equals_dense_with_every_option",
        "lossy_equals_the_pipeline_run_by_hand",
        "buckets_are_encoded_on_a_thread_while_the_backward_pass_goes_on",
        "hooks_in_another_order_on_another_rank",
        "sparse_gradients_are_compressed",
        "every_dtype_and_layout",
        "nan_and_infinity_reach_every_rank",
        "models_differ",
        "an_error_while_decoding_on_one_rank",
        "adasum",
        "a_rank_that_joins_early",
        "ranks_that_join_after_a_corrupt_container",
        "a_rank_without_deepreduce",
    ],
    TCP: [
        "lossless_equals_dense_with_every_option",
        "scopes_and_exchanges_equal_dense",
        "the_exchange_is_chosen_again_under_another_config",
        "what_is_not_sent_is_kept",
        "two_levels_need_process_sets",
        "two_levels",
        "sparse_gradients_are_compressed",
        "a_process_set",
        "states_of_all_ranks_are_loaded",
        "a_rank_that_joins_early",
        "ranks_that_join_after_a_corrupt_container",
        "an_error_while_decoding_on_one_rank",
    ],
    MPI: STARTED,
}
# `make test` has ranks_that_join_after_a_corrupt_container, scopes of one model, and every option but a list of groups.
SLOW = [
    "lossless_equals_dense_with_a_list_of_groups",
    "gradients_on_a_device_equal_those_on_the_host",
    "a_rank_that_joins_early",
    "scopes_of_two_models_in_flight_at_a_time",
    COMPARED,
]
ONCE = {"stats_are_the_bytes_on_the_wire": TCP, COMPARED: THREE, EQUAL: THREE}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("job", "case"),
    each_case(JOBS, *CASES, once=ONCE, few=FEW, thorough=[*JOBS[1:], *SLOW]),
)
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@thorough
def test_containers_and_sums_are_those_of_tensorflow(jobs):
    torch, tensorflow = (jobs.check(test.ONCE[COMPARED], COMPARED) for test in (sys.modules[__name__], test_tensorflow))
    assert len(torch) == len(tensorflow) == 3
    for ours, theirs in zip(torch, tensorflow, strict=True):
        assert ours == theirs
        # One for each tensor that is not too small; then of the model, which changes its dtype twice, of buckets, and
        # of the tensors in buckets; of this rank's slice of each bucket and of the model; and of buckets, where the
        # allgather is chosen. Each step has the five sums, too.
        assert [len(parts) // 3 - 5 for parts in ours] == [5, 5, 3, 3, 3, 4, 5, 0, 0, 0, 0, 4, 3, 4, 0]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("launcher", "ranks", "exchange"),
    first([("mpirun", 3, "allgather"), ("horovodrun --gloo", 2, "allgather"), ("mpirun", 3, "densestream")]),
)
def test_a_rank_that_dies_ends_the_job(launcher, ranks, exchange):
    ended = launch(launcher, ranks, HERE / "torch_death.py", exchange, seconds=120, check=False)
    assert ended.returncode != 0, ended.stdout
    assert "step 1 done" in ended.stdout and "step 2 done" not in ended.stdout, ended.stdout


@pytest.mark.launch
@thorough
def test_nothing_is_left_of_models_that_are_gone():
    ended = launch("mpirun", 2, HERE / "torch_lifetime.py", seconds=200)
    assert all(f"rank {rank} is done" in ended.stdout for rank in range(2)), ended.stdout
    assert "Traceback" not in ended.stdout and "Error" not in ended.stdout, ended.stdout


SLOW_END = """
import time
import horovod.torch as hvd

hvd.init()  # starts MPI, and ends it when the first rank shuts Horovod down
from hvd_deepreduce.exchange.mpi import queue

queue_of_exchanges = queue.ExchangeQueue()
if hvd.rank() == 0:
    met = queue.meet_to_close
    queue.meet_to_close = lambda *given: (met(*given), time.sleep(2))
"""


@pytest.mark.launch
@thorough
def test_mpi_does_not_end_before_the_exchanges(tmp_path):
    """Rank 0 frees its communicators 2 s after the other rank's process has ended."""
    (tmp_path / "program.py").write_text(SLOW_END)
    ended = launch("mpirun", 2, tmp_path / "program.py")
    assert "MPI_FINALIZE" not in ended.stdout, ended.stdout


def test_one_rank_alone_needs_no_launcher():
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    hvd.init()
    model = torch.nn.Linear(40, 40)
    compression = DeepReduce(model, min_elements=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    before = model.weight.clone()
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    assert compression.stats()["total"]["bytes_sent"] == 0


def test_one_rank_alone_finds_mistakes():
    """Horovod does not call any compression then."""
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))

    def step(compression, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, **options)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return optimizer

    with pytest.raises(TypeError, match="the class DeepReduce; it must be an instance"):
        step(DeepReduce)
    with pytest.raises(ValueError, match="op=hvd.Adasum: Adasum cannot be computed on compressed gradients"):
        step(DeepReduce(model), op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"float32 \[3, 4\] does not belong to any parameter of the model that DeepR"):
        step(DeepReduce(torch.nn.Linear(4, 3)))
    model[1].requires_grad_(False)
    optimizer = step(DeepReduce(model))
    model[0].requires_grad_(False)
    optimizer.step()
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"after hvd.DistributedOptimizer was made: 1.weight, 1.bias\. Horovod does"):
        optimizer.step()
    with DeepReduce(model) as compression:
        optimizer = step(compression)
    with pytest.raises(RuntimeError, match="this was closed"):
        optimizer.step()
    step(hvd.Compression.fp16)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_what_deepreduce_is_given():
    import torch

    from hvd_deepreduce.torch import DeepReduce

    model = torch.nn.Linear(2, 2)
    given = [torch.optim.SGD(model.parameters(), lr=0.1), 7, None, "topk_rice_qsgd"]
    for one, what in zip(given, [r"an optimizer \(SGD\)", "int", "NoneType", "str"], strict=True):
        with pytest.raises(TypeError, match=f"argument of DeepReduce is {what}, but it must be the model: .* Write: "):
            DeepReduce(one)
    for items in (model.parameters(), [("a", 1)], [(model.weight, "a")], ["ab"], [()]):
        with pytest.raises(TypeError, match="its items are not pairs of a name and a tensor"):
            DeepReduce(items)


def test_momentum_is_not_applied_twice():
    """Neither by the optimizer and the memory of the job, nor of one tensor."""
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    hvd.init()
    for number, (config, make) in enumerate(
        [
            ({"memory": "dgc"}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
            ({"overrides": {"weight": {"memory": "dgc"}}}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)),
            ({"memory": "dgc"}, lambda p: torch.optim.AdamW(p)),
            ({"memory": "dgc"}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ]
    ):
        model = torch.nn.Linear(40, 40)
        compression = DeepReduce(model, config, min_elements=0)
        names = ((f"dgc{number}.{name}", parameter) for name, parameter in model.named_parameters())
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), names, compression)
        model(torch.ones(1, 40)).sum().backward()
        if number < 3:
            with pytest.raises(ValueError, match="memory is 'dgc'.*the optimizer has (momentum|betas)=.*applied twice"):
                optimizer.step()
        else:
            optimizer.step()
        compression.close()
