# Sourced by slurm_*.sbatch: reads the arguments, and starts a run again until it is finished.
#
# Resume is exact, so a job that is requeued goes on as if it had never been cut. Slurm requeues
# by itself after a node's failure or a preemption. A job whose time is nearly up is sent SIGTERM
# (--signal), saves, ends with code 75 and is requeued here; so is one that lacks a process, the hub
# or room on the disk. Any other failure but bad input (2) is requeued if it has saved something new
# since it started, so a bug does not restart it forever; for RUN=gs://BUCKET/DIR, gcloud lists the
# checkpoints. The processes end together by themselves: srun, which would hide their code, waits.
# Requeued jobs are started again up to 100 times.

config=${1:?give a config file, as in: sbatch configs/slurm_gpu.sbatch configs/moa_llama3_8b.py}
settings=("${@:2}")
run=${RUN:-runs/$(basename "$config" .py)}

# The folder of slurm_regenerate.sbatch. A drafter learns the answers of its target: other data must
# be asked for.
answers=${ANSWERS?give the folder of the answers, or ANSWERS= for the data of the config}
data=(${answers:+--data.train "$answers/train" --data.validation "$answers/validation"})

source configs/slurm_container.sh

# A job that is started again does not compile again. Process 0 fills the folder, all read it:
# the nodes must be alike, because programs for CPUs are machine code.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR-$run/compiled}

newest_checkpoint() {
    case $run in
    gs://*) gcloud storage ls "$run/checkpoints/*/commit_success.txt" | xargs -rn1 dirname ;;
    *) find "$run/checkpoints" -mindepth 1 -maxdepth 1 2>/dev/null ;;
    esac | sed -n 's|.*/\([0-9]*\)$|\1|p' | sort -n | tail -1
}
newest_before=$(newest_checkpoint)

start_again() { # the exit code of all processes together
    if [ "$1" = 0 ]; then # the run is finished
        exit 0
    fi
    if [ "$1" = 2 ] || { [ "$1" != 75 ] && [ "$(newest_checkpoint)" = "$newest_before" ]; }; then
        echo "ended with code $1: bad input (2), or no new checkpoint in $run: not started again" >&2
        exit "$1"
    fi
    if ((${SLURM_RESTART_COUNT:-0} >= 100)); then
        echo "ended with code $1 after 100 restarts: not started again" >&2
        exit "$1"
    fi
    echo "ended with code $1 before the run was finished: started again" >&2
    scontrol requeue "$SLURM_JOB_ID"
}
