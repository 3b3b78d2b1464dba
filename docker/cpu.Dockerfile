# The whole system on CPU. Where the package index gives a CUDA build of torch, it runs as well and is larger. Build from the repository's root: docker build -f docker/cpu.Dockerfile -t seed-async .
FROM python:3.11-slim
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
WORKDIR /app
# First and alone, as in the Makefile: the largest layer stays cached when the code changes.
RUN pip install torch==2.13.0
COPY . .
RUN pip install --editable . \
    && useradd --create-home --uid 1000 seed \
    && install --directory --owner=seed /runs
USER seed
VOLUME /runs
ENTRYPOINT ["seed-async"]
CMD ["--help"]
