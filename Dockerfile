# benchbox on CPUs, at the versions of constraints.txt:
#   docker build --tag benchbox .
#   docker run --rm --shm-size 1g --volume "$PWD/runs:/work/runs" benchbox run fsdp_vs_zero2
FROM python:3.11-slim-bookworm

# A compiler for the optimizer's kernels, and git for the commit that records name.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt ./
# An index with torch built for CUDA, such as https://download.pytorch.org/whl/cu130, makes an image for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m pip install -c constraints.txt --extra-index-url "${TORCH_INDEX}" torch setuptools wheel
COPY pyproject.toml README.md ./
COPY benchbox benchbox
COPY policies policies
COPY matrices matrices
RUN python -m pip install -c constraints.txt --extra-index-url "${TORCH_INDEX}" . \
    && benchbox --version

RUN useradd --create-home --uid 1000 benchbox && install --directory --owner benchbox /work/runs
USER 1000
WORKDIR /work
ENTRYPOINT ["benchbox"]
CMD ["--help"]
