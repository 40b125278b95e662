#!/bin/bash
deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed ds_config.json --model_name_or_path meta-llama/Llama-3.1-8B \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_seq_length 4096 --bf16 true --optim adamw_torch \
    --gradient_checkpointing true --learning_rate 2e-5
