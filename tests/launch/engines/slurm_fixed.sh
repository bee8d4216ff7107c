#!/bin/bash
#SBATCH --job-name=run
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --account=mine
#SBATCH --time=4:00:00
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=16
#SBATCH --nodelist='node[0-1]'
unset TORCHELASTIC_RUN_ID "${!FARFLUNG_@}"
cd /shared/home || exit 5
module load cuda
srun --kill-on-bad-exit=0 --cpus-per-task=16 --label \
    python3 -c 'import sys; sys.path[0] or sys.path.append(sys.path.pop(0)); import farflung; sys.path[-1] or sys.path.pop(); from farflung.launch.main import main; main()' launch --engine local --config_file none --run_dir /shared/home/run --num_machines 2 train.py --lr '0.1 '
code=$?
if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code

