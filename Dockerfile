# PyTorch, TensorFlow, Open MPI, Horovod and this package, for the CPU:   docker build -t hvd_deepreduce .
# The versions are those of the tests: scripts/dev/setup.sh installs what requirements.lock has.
FROM python:3.11-slim-bookworm AS build
# The compiler's version does not matter: any that Debian 12 has builds it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hvd_deepreduce
COPY . .
RUN scripts/dev/setup.sh \
    && rm -rf ~/.cache build

FROM python:3.11-slim-bookworm
COPY --from=build /opt/hvd_deepreduce /opt/hvd_deepreduce
WORKDIR /opt/hvd_deepreduce
# As scripts/dev/env.sh sets them for a shell.
ENV PATH=/opt/hvd_deepreduce/.venv/bin:$PATH \
    OPAL_PREFIX=/opt/hvd_deepreduce/.venv \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_hwloc_base_binding_policy=none \
    OMPI_MCA_mpi_yield_when_idle=1 \
    OMPI_MCA_plm_rsh_agent= \
    TF_USE_LEGACY_KERAS=1 \
    TF_CPP_MIN_LOG_LEVEL=2
CMD ["hvd-deepreduce", "doctor"]
