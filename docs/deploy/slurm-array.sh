#!/usr/bin/env bash
# A SLURM job array that runs the jobs of an experiment, each task every Nth one:
#     sbatch --array=1-8 docs/deploy/slurm-array.sh experiment=pmfl/table1
# Every task sees the same folder. Send the same line again to resume. Task 3 of 8 alone is
#     TASKS=8 sbatch --array=3 docs/deploy/slurm-array.sh experiment=pmfl/table1
# Add --gres=gpu:1 for a GPU a task.
#SBATCH --job-name=contrafed
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%A-%a.out
set -euo pipefail
export OMP_NUM_THREADS=1
: "${SLURM_ARRAY_TASK_ID:?submit with sbatch --array=1-N}"
first=${SLURM_ARRAY_TASK_MIN:-1} step=${SLURM_ARRAY_TASK_STEP:-1}
shard=$(((SLURM_ARRAY_TASK_ID - first) / step + 1))/$SLURM_ARRAY_TASK_COUNT
[ -z "${TASKS:-}" ] || shard=$SLURM_ARRAY_TASK_ID/$TASKS
exec contrafed -m "$@" engine=local "shard=$shard"
