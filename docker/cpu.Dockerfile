# pdrt on CPUs. Not built on the machine it was written on.
#   docker build -f docker/cpu.Dockerfile -t pdrt:cpu .
#   docker run --rm --init -p 8000:8000 -v pdrt-cache:/home/pdrt/.cache pdrt:cpu
FROM python:3.12-slim

RUN useradd --create-home pdrt && mkdir /home/pdrt/.cache && chown pdrt: /home/pdrt/.cache
WORKDIR /opt/pdrt
COPY constraints.txt ./
# PyTorch's own index has the CPU build; PyPI's is the CUDA one, ten times the size.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
    "$(sed -n '/^torch==/s/$/+cpu/p' constraints.txt)"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY pdrt pdrt
# g++ builds the kernels, for each instruction set, and is not needed afterwards.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && pip install --no-cache-dir -c constraints.txt . \
    && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/*

USER pdrt
WORKDIR /home/pdrt
EXPOSE 8000
ENTRYPOINT ["pdrt"]
CMD ["up", "--host", "0.0.0.0", "--device", "cpu"]
