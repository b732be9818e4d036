# Sourced by the sbatch files: the Python of their processes, in a container if IMAGE names one, and
# the CPUs of each process.
#
# With pyxis, IMAGE is a path to a .sqsh file or REGISTRY#NAME:TAG. The container has the clone and
# the hub's folder at the same paths as the host, so code and runs are those of the clone.
# MOUNTS=SRC:DST[,...] adds other folders.

python=.venv/bin/python container=()
if [ "${IMAGE:-}" ]; then
    python=python
    export HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
    mkdir -p "$HF_HOME" # pyxis refuses to mount a folder that is missing
    container=(--container-image="$IMAGE" --container-workdir="$PWD")
    container+=(--container-mounts="$PWD:$PWD,$HF_HOME:$HF_HOME${MOUNTS:+,$MOUNTS}")
fi
python=${PYTHON:-$python}

# From 22.05 on srun does not take over --cpus-per-task from sbatch.
if [ "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
