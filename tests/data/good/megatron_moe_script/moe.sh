#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 \
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 \
    --moe-layer-freq '([0]*1+[1]*26)' --moe-grouped-gemm --moe-token-dispatcher-type alltoall --mtp-num-layers 1 \
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 102400 --swiglu --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 64 --bf16 --fp8-format hybrid \
    --fp8-recipe blockwise --main-grads-dtype bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 13 \
    --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --context-parallel-size 1 --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --recompute-granularity selective --recompute-modules mla_up_proj layernorm
