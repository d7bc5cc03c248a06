# syntax=docker/dockerfile:1
# lmgym in a container (docs/install.md). With CUDA, which pip's usual wheel of torch brings along:
#   docker build -t lmgym:cuda .
# For a CPU, with the address of PyTorch's index of CPU wheels:
#   docker build -t lmgym --build-arg TORCH_INDEX=ADDRESS .
# A compiler, which `policy.attention: flex` calls: --build-arg BASE=python:3.12-bookworm
# Extras of lmgym: --build-arg EXTRAS=data,lora
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY lmgym lmgym
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${BASE}
ARG TORCH_INDEX=
ARG EXTRAS=
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
# torch in a layer of its own, which a change of lmgym leaves as it is.
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        -c /constraints.txt "$(grep '^torch==' /constraints.txt)"
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir -c /constraints.txt "$(ls /dist/lmgym-*.whl)${EXTRAS:+[${EXTRAS}]}"
RUN useradd --create-home --uid 1000 lmgym && install -d -o lmgym /work
USER 1000
WORKDIR /work
ENTRYPOINT ["lmgym"]
CMD ["--help"]
