# pdrt on NVIDIA GPUs. Not built on the machine it was written on.
# PyPI's torch brings its CUDA libraries along, so that the base image needs none; the driver
# comes from the host through the NVIDIA container toolkit.
#   docker build -f docker/cuda.Dockerfile -t pdrt:cuda .
#   docker run --rm --init --gpus all -p 8000:8000 -v pdrt-cache:/home/pdrt/.cache pdrt:cuda
FROM python:3.12-slim

# Triton compiles small C stubs at run time.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home pdrt && mkdir /home/pdrt/.cache && chown pdrt: /home/pdrt/.cache
WORKDIR /opt/pdrt
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY pdrt pdrt
RUN pip install --no-cache-dir -c constraints.txt .

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER pdrt
WORKDIR /home/pdrt
EXPOSE 8000
ENTRYPOINT ["pdrt"]
CMD ["up", "--host", "0.0.0.0", "--device", "cuda"]
