# docker build -t maxdiffusion .                              # CPU
# docker build -t maxdiffusion --build-arg EXTRAS=[tpu] .     # TPU hosts
# docker build -t maxdiffusion --build-arg EXTRAS=[serve] .   # the server, docs/serving.md
# docker run maxdiffusion CONFIG.yml [key=value ...]          # --entrypoint "" runs other commands
FROM python:3.11-slim

ARG EXTRAS=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# /app/outputs is output_dir where nothing else is asked for.
RUN useradd --create-home --uid 1000 maxdiffusion \
    && install --directory --owner=1000 --group=1000 /app/outputs
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
COPY configs ./configs
RUN pip install --constraint constraints.txt ".${EXTRAS}"

# A number, so that a cluster can see that it is not root.
USER 1000
ENTRYPOINT ["python", "-m", "maxdiffusion.generate_wan"]
CMD ["configs/wan_tiny.yml", "output_dir=/home/maxdiffusion/outputs"]
