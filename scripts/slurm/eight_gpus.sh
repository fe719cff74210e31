#!/bin/bash
# Prints a job on one node with 8 GPUs: four replicas of two ranks. Nobody has to be met, so there
# is no key and no address. With --submit it is submitted.
# Usage: scripts/slurm/eight_gpus.sh [OPTIONS OF sbatch]
exec megatron-recover sbatch --nodes 1 --gpus-per-node 8 --time 12:00:00 --run-dir /shared/runs/small "$@" -- \
  --nproc-per-node 8 scripts/pretrain_gpt.py --tensor-model-parallel-size 2 \
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 \
  --micro-batch-size 1 --global-batch-size 256 --train-iters 100000 --lr 3e-4 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 50000 --data-path /shared/data/text \
  --save /shared/checkpoints/small --load /shared/checkpoints/small --save-interval 1000
