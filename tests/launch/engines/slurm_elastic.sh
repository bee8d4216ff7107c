#!/bin/bash
#SBATCH --job-name=run
#SBATCH --output=slurm-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --account=mine
#SBATCH --time=4:00:00
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=16
#SBATCH --nodelist='node[0-1]'
#SBATCH --array=0-3
#SBATCH --signal=USR1@90
unset TORCHELASTIC_RUN_ID "${!FARFLUNG_@}"
cd /shared/home || exit 5
module load cuda
srun --kill-on-bad-exit=0 --cpus-per-task=16 \
    python3 -c 'import sys; sys.path[0] or sys.path.append(sys.path.pop(0)); import farflung; sys.path[-1] or sys.path.pop(); from farflung.launch.main import main; main()' launch --engine local --config_file none --run_dir /shared/home/run --outer diloco --elastic 2:8 --replicas 1 --meet file:///shared/home/run/meet train.py --lr '0.1 '
code=$?
if [ $code -eq 75 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $code

