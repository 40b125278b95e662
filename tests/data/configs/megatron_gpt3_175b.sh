#!/bin/bash
# GPT-3 175B on 1,024 GPUs: tensor groups of 8 in a node, 16 pipeline stages, 8 replicas.
# Written for the tests from the facts of the published Megatron-LM recipe: shape, group sizes, batch ramp-up, precision.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS=8
NODES=${NODES:-128}
CHECKPOINTS=$1
TEXT=$2

LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $NODES
    --master_addr ${MASTER_ADDR:-localhost}
    --master_port ${MASTER_PORT:-6000}
)

HIDDEN=12288
SHAPE=(
    --num-layers 96
    --hidden-size $HIDDEN
    --num-attention-heads $((HIDDEN / 128))
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)

TRAIN=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5 --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)

SPLIT="--tensor-model-parallel-size 8"
SPLIT+=" --pipeline-model-parallel-size 16"

DATA=(
    --data-path "$TEXT"
    --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt
    --split 949,50,1
)

torchrun "${LAUNCH[@]}" pretrain_gpt.py \
    "${SHAPE[@]}" \
    "${TRAIN[@]}" \
    $SPLIT \
    "${DATA[@]}" \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
    --save $CHECKPOINTS --load $CHECKPOINTS
