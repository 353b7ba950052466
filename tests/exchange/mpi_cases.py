"""The exchanges under MPI: the cases of test_mpi.py (see tests/case_runner.py).

mpirun -np 2 python tests/exchange/mpi_cases.py [CASE ...]
"""

from mpi4py import MPI

from tests.case_runner import run_cases
from tests.exchange import damage, faults, job_cases, local_errors, queue_cases, sums  # noqa: F401

if __name__ == "__main__":
    # An exchange that failed leaves its communicator unusable.
    run_cases(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, go_on=False)
