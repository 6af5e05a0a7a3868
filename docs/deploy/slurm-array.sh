#!/usr/bin/env bash
# A SLURM job array that runs the jobs of an experiment, each task every Nth one:
#     sbatch --array=1-8 docs/deploy/slurm-array.sh experiment=pmfl/table1
# Every task sees the same folder. Send the same line again to resume. Add --gres=gpu:1 for a GPU a task.
#SBATCH --job-name=contrafed
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%A-%a.out
set -euo pipefail
export OMP_NUM_THREADS=1
first=${SLURM_ARRAY_TASK_MIN:-1}
exec contrafed -m "$@" engine=local "shard=$((SLURM_ARRAY_TASK_ID - first + 1))/$SLURM_ARRAY_TASK_COUNT"
