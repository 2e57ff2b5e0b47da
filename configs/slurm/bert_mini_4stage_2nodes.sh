#!/bin/bash
# Written by: vpipe slurm configs/bert_mini_4stage.yaml --nodes 2 --time 0:30:00
# Submit it with sbatch, from the folder where its paths start, with vpipe on PATH (its environment activated).
# The ranks compute on GPUs where there are any, else cpu; nccl where each has a GPU, else gloo between them.
# SLURM is asked for no GPUs; with parallel.device: cuda it is, for one per rank.

#SBATCH --job-name=bert_mini_4stage
#SBATCH --output=%x-%j.out           # <job name>-<job id>.out: what rank 0 shows; all logs are in the run's folder
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2          # a task is a rank: 4 in all
#SBATCH --cpus-per-task=1            # training.threads
#SBATCH --time=0:30:00               # then SLURM ends the job

set -euo pipefail

# One srun starts the ranks on all nodes and tells each its number; they meet on the first node. When one fails, srun
# ends the others; they have a few seconds to say what they saw. Since SLURM 22.05 the processors per task must be said
# again: srun does not take them from above.
srun --cpus-per-task=1 --kill-on-bad-exit=1 vpipe train configs/bert_mini_4stage.yaml
