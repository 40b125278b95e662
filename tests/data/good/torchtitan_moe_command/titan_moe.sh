#!/bin/bash
torchrun --nproc_per_node=8 --nnodes=2 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \
    --training.local_batch_size 4 --training.seq_len 4096 --training.disable_cuda_graphs --parallelism.data_parallel_shard_degree 4 \
    --parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 --parallelism.expert_parallel_degree 4 \
    --parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 7
