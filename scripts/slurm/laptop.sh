#!/bin/bash
# Trains a small GPT on a laptop: two replicas on the CPU, without Slurm. The launch line is the one
# that the other examples put behind `sbatch ... --`.
# Usage: scripts/slurm/laptop.sh [RUN_DIR]
exec megatron-recover run --nproc-per-node 2 --run-dir "${1:-runs/laptop}" scripts/pretrain_gpt.py \
  --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
  --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --eval-interval 100 --eval-iters 1 \
  --tokenizer-type NullTokenizer --vocab-size 257 --mock-data --split 90,5,5 --log-interval 1
