#!/usr/bin/env bash
NGPU=${NGPU:-"8"}
torchrun --nproc_per_node=${NGPU} --nnodes=2 --rdzv_backend c10d -m torchtitan.train \
    --module llama3 \
    --config llama3_8b \
    --training.local_batch_size 2 \
    --training.global_batch_size 64 \
    --training.seq_len 8192 \
    --parallelism.data_parallel_shard_degree 4 \
    --parallelism.tensor_parallel_degree 2 \
    --parallelism.pipeline_parallel_degree 2 \
    --parallelism.context_parallel_degree 1 \
    --parallelism.expert_parallel_degree 1
