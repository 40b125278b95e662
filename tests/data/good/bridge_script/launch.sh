#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 2 train_llama.py \
    --config-file bridge.yaml --seed 1 model.context_parallel_size=2 train.global_batch_size=64
