# An image of this repository, for TPUs or for NVIDIA GPUs:
#
#     docker build --platform linux/amd64 --tag IMAGE .
#     docker build --platform linux/amd64 --build-arg ACCELERATOR=cuda13 --tag IMAGE .
#
# The extra `cuda13` brings CUDA's libraries, so a GPU host needs only its driver and NVIDIA's
# container toolkit. This image has never been built: a test runs the COPY and RUN lines below in an
# empty folder, with pip as a dry run without dependencies.
FROM python:3.12-slim
ARG ACCELERATOR=tpu
# The toolkit passes the host's GPUs and driver to containers with these variables.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /moa
COPY pyproject.toml README.md LICENSE ./
COPY moa_jax moa_jax
COPY infer infer
COPY train train
COPY configs configs
RUN pip install --no-cache-dir --editable ".[$ACCELERATOR,serve,gcs,plots]"
