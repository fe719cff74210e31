#!/bin/bash
# Prints a job on 4 nodes whose agents run in a container (pyxis and enroot). Its text is tested.
# It was not run with pyxis. The image is that of containers/Dockerfile.
# Usage: scripts/slurm/container.sh [OPTIONS OF sbatch]
exec megatron-recover sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 --run-dir /shared/runs/boxed \
  --container-image /shared/images/megatron-recover.sqsh \
  --container-mounts /shared/data:/shared/data,/shared/checkpoints:/shared/checkpoints \
  "$@" -- \
  --nproc-per-node 8 -m megatron_recover.scripts.pretrain_gpt --tensor-model-parallel-size 2 \
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 \
  --micro-batch-size 1 --global-batch-size 1024 --train-iters 100000 --lr 3e-4 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 50000 --data-path /shared/data/text \
  --save /shared/checkpoints/boxed --load /shared/checkpoints/boxed --save-interval 1000
