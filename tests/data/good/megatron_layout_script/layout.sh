#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 50304 \
    --micro-batch-size 1 --global-batch-size 128 --rampup-batch-size 32 32 1000 --fp16 --attention-dropout 0.0 --hidden-dropout 0.1 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*8|t*8|t*8|t*8L' \
    --microbatch-group-size-per-virtual-pipeline-stage 4 --optimizer adam --data-parallel-sharding-strategy no_shard
