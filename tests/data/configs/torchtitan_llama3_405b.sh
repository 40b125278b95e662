#!/bin/bash
# 512 GPUs: the mesh that torchtitan published for 405B (data, tensor and pipeline groups of 8 each), started by 0.3's command line.
NNODES=64
NGPU=8

torchrun --nnodes $NNODES --nproc_per_node $NGPU --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:29500" \
    -m torchtitan.train --module llama3 --config llama3_405b \
    --training.local-batch-size 32 --training.disable-cuda-graphs \
    --parallelism.tensor_parallel_degree 8 --parallelism.pipeline_parallel_degree=8 \
    --parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 8
