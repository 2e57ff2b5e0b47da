#!/bin/bash
# Written by: vpipe slurm configs/bert_mini_4stage.yaml --nodes 1 --time 0:30:00
# Submit it with sbatch from the folder where its relative paths start, with vpipe on PATH (its environment activated).
# The ranks compute on GPUs where there are any, else cpu; nccl where each has a GPU, else gloo between them.
# The job requests no GPUs; with parallel.device: cuda it requests one per rank.

#SBATCH --job-name=bert_mini_4stage
#SBATCH --output=%x-%j.out           # <job name>-<job id>.out: output of rank 0; all logs are in the run's folder
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4          # a task is a rank: 4 in all
#SBATCH --cpus-per-task=1            # training.threads
#SBATCH --time=0:30:00               # SLURM ends the job after it

set -euo pipefail

# What only the ranks of this run know: nobody else on the cluster can pass for one.
VPIPE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d '[:space:]')
export VPIPE_SECRET

# srun starts the ranks on all nodes; they meet on the first node. When a rank fails, srun ends the others, which have a
# few seconds to report what they saw. --cpus-per-task is repeated: since SLURM 22.05 srun does not inherit it.
srun --cpus-per-task=1 --kill-on-bad-exit=1 vpipe train configs/bert_mini_4stage.yaml
