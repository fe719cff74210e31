#!/bin/bash
# Prints a chain of 30 jobs on 64 nodes with 8 GPUs each: 64 replicas of 8 ranks. A lost node costs
# its microbatches; each job ends 15 minutes before its time limit, and the next one resumes.
# Usage: scripts/slurm/many_nodes.sh [OPTIONS OF sbatch]
exec megatron-recover sbatch --nodes 64 --gpus-per-node 8 --time 24:00:00 --chain 30 --signal-s 900 \
  --run-dir /shared/runs/large "$@" -- \
  --nproc-per-node 8 scripts/pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
  --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 --max-position-embeddings 8192 \
  --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 --lr 1e-4 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 50000 --data-path /shared/data/text \
  --save /shared/checkpoints/large --load /shared/checkpoints/large --save-interval 500 --async-save
