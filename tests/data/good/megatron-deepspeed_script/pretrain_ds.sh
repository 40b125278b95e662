#!/bin/bash
TP=2
PP=2
deepspeed --num_gpus 8 --num_nodes 2 pretrain_gpt.py \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --num-layers 24 \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 4 \
    --global-batch-size 256 \
    --vocab-size 50304 \
    --bf16 \
    --deepspeed \
    --deepspeed_config ds_config.json \
    --zero-stage 1 \
    --ds-sequence-parallel-size 1
