# Contrafed in a container, for the CPU:      docker build -t contrafed .
# With CUDA, on a machine with its driver:    docker build -t contrafed:cuda --build-arg TORCH=cu126 .
FROM python:3.12-slim
# PyTorch's builds for the CPU are a tenth as large.
ARG TORCH=cpu
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/${TORCH}
COPY . /contrafed
RUN pip install --no-cache-dir /contrafed
RUN useradd --create-home contrafed && install -d -o contrafed /state /runs
USER contrafed
WORKDIR /home/contrafed
ENV FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 OMP_NUM_THREADS=1
# A run without arguments: docker run --rm -v "$PWD/outputs:/home/contrafed/outputs" contrafed
CMD ["contrafed"]
