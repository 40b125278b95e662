#!/bin/bash
accelerate launch --config_file accelerate.yaml --num_processes 16 --num_machines 2 train.py \
    --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_seq_length 4096
